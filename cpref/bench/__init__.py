"""`cpref bench`: sharded attention beside the alternatives, timed in one run."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
