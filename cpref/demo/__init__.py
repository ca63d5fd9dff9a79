"""`cpref demo`: a long document, trained on by several ranks and by one, with equal numbers."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
