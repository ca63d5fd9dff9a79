"""The `%%torchrun` cell magic: a notebook cell that runs on real ranks.

    %load_ext cpref

    %%torchrun -n 4
    cpref.init()
    ...

The cell runs as the program of n fresh processes, as with the command of the same name: it sees no
variable of the notebook, and what it wants to give back it hands to `cpref.keep`.
"""

import argparse
import shlex
import traceback
import warnings

from .launch import Kept, RanksFailed, launch
from .rank import CELL

_SHOWN = 1 << 20  # characters of output that a cell shows at most
_USAGE = "%%torchrun [-n RANKS] [--timeout SECONDS] [--each]"


class UsageError(ValueError):
    """The cell asks for what cannot be."""

    def _render_traceback_(self) -> list[str]:
        """For IPython, whose own UsageError looks so too, but passes for a success in nbval."""
        return [f"UsageError: {self}"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


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
    Raises UsageError, a ValueError, and RanksFailed.
    """
    options = _options(line)
    source = "\n" + cell  # why: Jupyter counts the line of the magic as the first
    _require_python(source)
    screen = _Screen(options.n if options.each else 1, prefixed=options.each)
    try:
        kept = launch(options.n, cell=source, timeout=options.timeout, on_output=screen.show)
    finally:
        screen.finish()
    return _for_notebook(kept, each=options.each)


def _options(line: str) -> argparse.Namespace:
    try:
        options = _parser().parse_args(shlex.split(line, comments=True))
    except ValueError as error:
        raise UsageError(f"{error}; usage: {_USAGE}") from None
    if options.n < 1:
        raise UsageError(f"-n is {options.n}; it must be at least 1 rank")
    if not options.timeout > 0:
        raise UsageError(f"--timeout is {options.timeout:g}; it must be above 0 seconds")
    return options


def _require_python(source: str) -> None:
    """RanksFailed with the line that is no Python, before any rank starts."""
    try:
        with warnings.catch_warnings(action="ignore"):  # why: rank 0 will show them
            compile(source, CELL, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise RanksFailed("".join(traceback.format_exception_only(error)).rstrip()) from None


def _for_notebook(kept: Kept, *, each: bool) -> dict[str, object]:
    names = {name: None for values in kept.by_rank for name in values}
    if each:
        return {name: [values.get(name) for values in kept.by_rank] for name in names}
    for name in names:
        if name not in kept.by_rank[0]:
            rank = next(r for r, values in enumerate(kept.by_rank) if name in values)
            raise UsageError(
                f"{name} was kept by rank {rank} and not by rank 0, whose values the notebook "
                "gets; keep it on rank 0, or use %%torchrun --each"
            )
    return kept.by_rank[0]


class _Screen:
    """Prints the output of the first `ranks` ranks.

    prefixed: in lines that begin with the rank. Those of rank 0 come at once, those of the others
    when all ranks have ended, rank by rank: so the same cell always shows the same.
    """

    def __init__(self, ranks: int, *, prefixed: bool):
        self._prefixed = prefixed
        self._left = [_SHOWN // ranks] * ranks
        self._held = [""] * ranks

    def show(self, rank: int, text: str) -> None:
        if rank >= len(self._left) or self._left[rank] < 0:
            return
        if len(text) > self._left[rank]:
            text = f"{text[: self._left[rank]]}\n... the rest of the output is not shown\n"
        self._left[rank] -= len(text)
        if not self._prefixed:
            print(text, end="", flush=True)
            return
        self._held[rank] += text
        if rank == 0:
            self._print_lines(rank)

    def finish(self) -> None:
        for rank, held in enumerate(self._held):
            if held and not held.endswith("\n"):
                self._held[rank] += "\n"
            self._print_lines(rank)

    def _print_lines(self, rank: int) -> None:
        *lines, self._held[rank] = self._held[rank].split("\n")
        for line in lines:
            last = line.rstrip("\r").rpartition("\r")[2]  # why: a progress bar's final state
            print(f"[rank {rank}] {last}", flush=True)


def load_ipython_extension(ipython) -> None:
    """Called by `%load_ext cpref`."""

    def magic(line: str, cell: str) -> None:
        """%%torchrun [-n RANKS] [--timeout SECONDS] [--each]

        Run this cell as the program of RANKS fresh processes (2 if not given). You see what rank 0
        prints, and get the values that rank 0 hands to `cpref.keep`. With --each you see what every
        rank prints, and get for each name the list of all ranks' values. If a rank fails you see
        its traceback. After SECONDS (300) all ranks are ended, and you see where each one was.
        """
        ipython.push(torchrun(line, cell))

    ipython.register_magic_function(magic, "cell", "torchrun")
