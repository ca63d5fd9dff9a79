"""What torchrun starts as each rank of the demo; the plan comes as JSON."""

import json
import sys

from cpref.demo.job import Plan, main

if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
