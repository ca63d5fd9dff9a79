"""Start ranks with torchrun, follow them, and leave nothing behind.

`launch` gives each rank's output to a function as it comes, and returns when all ranks are done. If
one fails, if time runs out or the caller is interrupted, all ranks are ended, by SIGKILL where they
do not listen, and their folder of temporary files is removed.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from .rank import CELL

Output = Callable[[int, str], None]
_POLL = 0.05  # seconds between two looks at the ranks' output
_GRACE = 2.0  # seconds that ranks are given to end before they are killed


class RanksFailed(RuntimeError):
    """The ranks did not all end well; the message is what to show."""

    def _render_traceback_(self) -> list[str]:
        """For IPython: the ranks' own traceback is in the message, the notebook's says nothing."""
        return str(self).splitlines()


@dataclass(frozen=True)
class Kept:
    """What the ranks handed to `keep`: for each rank its values by name."""

    by_rank: list[dict[str, object]]


def launch(
    ranks: int,
    *,
    cell: str | None = None,
    module: list[str] | None = None,
    timeout: float | None = None,
    on_output: Output = lambda rank, text: None,
) -> Kept:
    """Run a cell's source, or a module with its arguments, on `ranks` ranks of this machine.

    timeout: seconds, start-up included; None waits for ever. on_output: called with (rank, text)
    as text appears, in pieces of any size. OMP_NUM_THREADS is set, where it is not, so that the
    ranks share the processor.

    Raises RanksFailed with the first failing rank's traceback, or with where each rank was when
    time ran out; KeyboardInterrupt as it comes.
    """
    with tempfile.TemporaryDirectory(prefix="cpref-") as name:
        folder = Path(name)
        if cell is not None:
            (folder / "cell.py").write_text(cell)
        with _agent(ranks, module or [], folder) as agent:
            _follow(agent, ranks, folder, timeout, on_output)
        return Kept([_values(folder, rank) for rank in range(ranks)])


@contextlib.contextmanager
def _agent(ranks: int, module: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    """torchrun as a child of ours; on leaving, it and all its ranks are gone."""
    command = [
        *(sys.executable, "-m", "cpref.classroom.agent", str(folder), "--standalone"),
        *(f"--nproc-per-node={ranks}", f"--log-dir={folder / 'logs'}"),
        *("-m", "cpref.classroom.rank", str(folder), *module),
    ]
    share = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {"OMP_NUM_THREADS": share, **os.environ, "TMPDIR": str(folder)}
    with open(folder / "agent.log", "wb") as log:
        agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # why: Ctrl-C is for us, who then end the ranks in order
        )
    try:
        yield agent
    finally:
        _end(agent)


def _follow(
    agent: subprocess.Popen, ranks: int, folder: Path, timeout: float | None, on_output: Output
) -> None:
    started, read = time.monotonic(), [0] * ranks
    while agent.poll() is None:
        _pass_on(folder, read, on_output)
        if timeout is not None and time.monotonic() - started > timeout:
            raise RanksFailed(_timed_out(folder, ranks, timeout))
        time.sleep(_POLL)
    _pass_on(folder, read, on_output)
    if agent.returncode:
        raise RanksFailed(_first_failure(folder, ranks))


def _pass_on(folder: Path, read: list[int], on_output: Output) -> None:
    """Give to `on_output` what each rank has printed since the last look."""
    for rank, position in enumerate(read):
        path = folder / f"out.{rank}"
        if not path.exists():
            continue
        with open(path, "rb") as out:
            out.seek(position)
            while new := out.read(1 << 20):
                new = new[: _whole_characters(new)]
                if not new:
                    break
                read[rank] += len(new)
                out.seek(read[rank])
                on_output(rank, new.decode(errors="replace"))


def _whole_characters(new: bytes) -> int:
    """How many bytes of `new` are whole UTF-8 characters: the last may still be under way."""
    for cut in range(1, min(4, len(new)) + 1):
        lead = new[-cut]
        if lead < 0x80:
            break
        if lead >= 0xC0:
            wanted = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return len(new) - cut if wanted > cut else len(new)
    return len(new)


def _first_failure(folder: Path, ranks: int) -> str:
    errors = []
    for rank in range(ranks):
        with contextlib.suppress(OSError):
            errors.append((json.loads((folder / f"error.{rank}").read_text()), rank))
    if errors:
        # why: an error that only says that another rank failed is not the first one
        error, rank = min(errors, key=lambda e: (e[0]["secondary"], e[0]["when"]))
        return f"rank {rank} of {ranks} failed:\n{error['text']}"
    log = (folder / "agent.log").read_text(errors="replace")
    ended = re.search(r"rank\s+: (\d+) .*?\n\s+exitcode\s+: (-?\d+)", log)
    if ended:
        rank, code = ended[1], int(ended[2])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"rank {rank} of {ranks} {how}"
    return f"torchrun failed:\n{log.strip()}"


def _timed_out(folder: Path, ranks: int, timeout: float) -> str:
    where = _stacks(folder, ranks)
    lines = [f"rank {rank}: {where[rank]}" for rank in range(ranks)]
    return f"the ranks were not done after {timeout:g} s, and have been ended:\n" + "\n".join(lines)


def _stacks(folder: Path, ranks: int) -> list[str]:
    """Where each rank is: its line of the cell, or how far it has come."""
    if hasattr(signal, "SIGUSR1"):
        for rank in range(ranks):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((folder / f"pid.{rank}").read_text()), signal.SIGUSR1)
    time.sleep(0.5)
    return [_place(folder, rank) for rank in range(ranks)]


def _place(folder: Path, rank: int) -> str:
    if (folder / f"kept.{rank}").exists():
        return "done"
    if not (folder / f"stack.{rank}").exists():
        return "not yet started"
    frames = re.findall(r'File "(.+?)", line (\d+) in', (folder / f"stack.{rank}").read_text())
    line = next((int(line) for file, line in frames if file == CELL), None)
    if line is None:
        return f"in {frames[0][0]}, line {frames[0][1]}" if frames else "does not answer"
    source = (folder / "cell.py").read_text().splitlines()[line - 1].strip()
    return f"at line {line}: {source}"


def _values(folder: Path, rank: int) -> dict[str, object]:
    packed = torch.load(folder / f"kept.{rank}", weights_only=False)
    return {name: _unpacked(value) for name, value in packed.items()}


def _unpacked(value: bytes) -> object:
    return torch.load(io.BytesIO(value), weights_only=False)


def _end(agent: subprocess.Popen) -> None:
    """End the agent and everything below it: asked first, then by force."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(agent.pid)
        family = [*top.children(recursive=True), top]
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(process)
        _, family = psutil.wait_procs(family, timeout=_GRACE)
    agent.stdin.close()
    agent.wait()
