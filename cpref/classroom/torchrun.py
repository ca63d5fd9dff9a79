"""The `%%torchrun` cell magic: a notebook cell that runs on real ranks.

    %load_ext cpref

    %%torchrun -n 4
    cpref.init()
    ...

The cell runs as the program of n fresh processes, as with the command of the same name: it sees no
variable of the notebook, and what it wants to give back it hands to `cpref.keep`.
"""

import argparse
import traceback

from .launch import Kept, RanksFailed, launch
from .rank import CELL

_SHOWN = 1 << 20  # characters of output that a cell shows at most


class _Usage(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise _Usage(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="%%torchrun", add_help=False, description="Run this cell on several ranks."
    )
    parser.add_argument("-n", type=int, default=2, help="number of ranks")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until they are ended")
    parser.add_argument("--each", action="store_true", help="every rank's output and kept values")
    return parser


def torchrun(line: str, cell: str) -> dict[str, object]:
    """Run `cell` on the ranks that `line` asks for; print their output; return what they kept.

    line: the options of the magic. Values are rank 0's; with --each lists of all ranks' values.
    Raises ValueError for options that cannot be, and RanksFailed.
    """
    try:
        options = _parser().parse_args(line.split())
    except _Usage as error:
        usage = "%%torchrun [-n RANKS] [--timeout SECONDS] [--each]"
        raise ValueError(f"{error}; usage: {usage}") from None
    if options.n < 1:
        raise ValueError(f"-n is {options.n}; it must be at least 1 rank")
    if not options.timeout > 0:
        raise ValueError(f"--timeout is {options.timeout:g}; it must be above 0 seconds")
    source = "\n" + cell  # why: Jupyter counts the line of the magic as the first
    try:
        compile(source, CELL, "exec")
    except SyntaxError as error:
        raise RanksFailed("".join(traceback.format_exception_only(error))) from None
    screen = _Screen(options.n if options.each else 1, prefixed=options.each)
    kept = launch(options.n, cell=source, timeout=options.timeout, on_output=screen.show)
    screen.finish()
    return _for_notebook(kept, each=options.each)


def _for_notebook(kept: Kept, *, each: bool) -> dict[str, object]:
    names = {name: None for values in kept.by_rank for name in values}
    if each:
        return {name: [values.get(name) for values in kept.by_rank] for name in names}
    for name in names:
        if name not in kept.by_rank[0]:
            rank = next(r for r, values in enumerate(kept.by_rank) if name in values)
            raise ValueError(
                f"{name} was kept by rank {rank} and not by rank 0, whose values the notebook "
                "gets; keep it on rank 0, or use %%torchrun --each"
            )
    return kept.by_rank[0]


class _Screen:
    """Prints the output of the first `ranks` ranks; prefixed: line by line, with the rank."""

    def __init__(self, ranks: int, *, prefixed: bool):
        self._ranks, self._prefixed = ranks, prefixed
        self._rest = [""] * ranks
        self._shown = 0

    def show(self, rank: int, text: str) -> None:
        if rank >= self._ranks or self._shown > _SHOWN:
            return
        if self._prefixed:
            *lines, self._rest[rank] = (self._rest[rank] + text).split("\n")
            text = "".join(f"[rank {rank}] {line}\n" for line in lines)
        self._shown += len(text)
        if self._shown > _SHOWN:
            text = f"{text[:_SHOWN]}\n... the rest of the output is not shown\n"
        print(text, end="", flush=True)

    def finish(self) -> None:
        for rank, rest in enumerate(self._rest):
            if rest:
                self.show(rank, "\n")


def load_ipython_extension(ipython) -> None:
    """Called by `%load_ext cpref`."""

    def magic(line: str, cell: str) -> None:
        from IPython.core.error import UsageError

        try:
            ipython.push(torchrun(line, cell))
        except ValueError as error:
            raise UsageError(str(error)) from None

    ipython.register_magic_function(magic, "cell", "torchrun")
