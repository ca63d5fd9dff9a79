"""What became of the ranks of a launch, read from the files that they leave in its folder.

`rank.py` says what lies there.
"""

import contextlib
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from .rank import CELL

_PATIENCE = 2.0  # seconds that ranks are given to say where they are
_SILENT = "does not answer"


@dataclass(frozen=True)
class Failure:
    """An error of a rank. secondary: it only says that another rank is gone."""

    rank: int
    when: float
    secondary: bool
    text: str


def first_failure(folder: Path, ranks: int, left: int | None = None) -> str:
    """What to show; left: a rank that has left before all others, if one has."""
    failed = failures(folder, ranks)
    own = [failure for failure in failed if not failure.secondary]
    if not own and (ended := _ended_without_a_word(folder, ranks)):
        return ended
    if not own and left is not None:
        return f"rank {left} of {ranks} left before its cell was done"
    if failed:
        first = min(own or failed, key=lambda failure: failure.when)
        # why: which of the ranks that fail alike is the first differs from run to run
        rank = min(failure.rank for failure in failed if failure.text == first.text)
        return f"rank {rank} of {ranks} failed:\n{first.text}"
    log = (folder / "agent.log").read_text(errors="replace").strip()
    return f"torchrun failed:\n{log or 'its agent is gone, without a word'}"


def failures(folder: Path, ranks: int) -> list[Failure]:
    """The errors that ranks have told, in the order of the ranks."""
    found = []
    for rank in range(ranks):
        with contextlib.suppress(OSError):
            said = json.loads((folder / f"error.{rank}").read_text())
            found.append(Failure(rank, **said))
    return found


def _ended_without_a_word(folder: Path, ranks: int) -> str | None:
    """How the rank ended that the agent saw fail, if it has left no error."""
    with contextlib.suppress(OSError):
        [(rank, code)] = json.loads((folder / "failed").read_text()).items()
        if (folder / f"error.{rank}").exists():
            return None
        if code > 0:
            return f"rank {rank} of {ranks} exited with {code}"
        name = signal.Signals(-code).name
        where = _place(folder, int(rank)) if name != "SIGKILL" else "as by a lack of memory"
        return f"rank {rank} of {ranks} was ended by {name}, {where}"
    return None


def has_left(folder: Path, rank: int) -> bool:
    """Whether the process of the rank is gone, and has said neither why nor that it is done."""
    try:
        gone = not psutil.pid_exists(int((folder / f"pid.{rank}").read_text()))
    except (OSError, ValueError):  # not yet started
        return False
    said = (folder / f"{what}.{rank}" for what in ("kept", "error"))
    return gone and not any(path.exists() for path in said)


def where(folder: Path, ranks: int) -> str:
    """For each rank the line of the cell that it is at, or how far it has come."""
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / f"pid.{rank}").read_text()), signal.SIGUSR1)
    deadline = time.monotonic() + _PATIENCE
    while any(_place(folder, rank) == _SILENT for rank in range(ranks)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    time.sleep(0.1)  # why: the last stack may still be half written
    return "\n".join(f"rank {rank}: {_place(folder, rank)}" for rank in range(ranks))


def _place(folder: Path, rank: int) -> str:
    if (folder / f"kept.{rank}").exists():
        return "done"
    if not (folder / f"stack.{rank}").exists():
        return "not yet started"
    stack = (folder / f"stack.{rank}").read_text()
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack)
    line = next((int(line) for file, line, _ in frames if file == CELL), None)
    if line is None:
        return f"in {frames[0][0]}, line {frames[0][1]}" if frames else _SILENT
    source = (folder / "cell.py").read_text("utf-8").splitlines()[line - 1].strip()
    file, _, function = frames[0]
    inside = "" if file == CELL or function in source else f", in {function}"
    return f"at line {line}: {source}{inside}"
