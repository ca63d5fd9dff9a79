"""torchrun, tied to the process that started it.

`python -m cpref.classroom.agent ARGUMENTS` is `torchrun ARGUMENTS`, but ends, with all ranks, as
soon as its standard input is closed: when the one who started it is gone, however that happened.
"""

import os
import signal
import sys
import threading

import psutil
from torch.distributed.run import main


def _end_with_the_starter() -> None:
    while os.read(0, 1024):
        pass
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    main(sys.argv[1:])
