"""`python -m cpref` is the `cpref` command."""

from .cli import main

raise SystemExit(main())
