"""Start ranks by torchrun's agent, follow them, and leave nothing behind.

`launch` gives each rank's output to a function as it comes, and returns when all ranks are done. If
one fails, if time runs out or the caller is interrupted, all ranks are ended, by SIGKILL where they
do not listen, and their folder of temporary files is removed.
"""

import codecs
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
_POLL = 0.02  # seconds between two looks at the ranks
_GRACE = 2.0  # seconds that ranks are given to end before they are killed
_SILENT = "does not answer"


class RanksFailed(RuntimeError):
    """The ranks did not all end well; the message is what to show."""

    def _render_traceback_(self) -> list[str]:
        """For IPython: the ranks' own traceback is in the message, the notebook's says nothing."""
        return str(self).splitlines()


class RanksInterrupted(KeyboardInterrupt):
    """The one who waited for the ranks was interrupted; the message says where each rank was."""

    _render_traceback_ = RanksFailed._render_traceback_


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
    time ran out; RanksInterrupted, a KeyboardInterrupt.
    """
    with tempfile.TemporaryDirectory(prefix="cpref-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if cell is not None:
            (folder / "cell.py").write_text(cell, "utf-8")
        pipes = _Pipes(folder, ranks, on_output)
        with pipes, _agent(ranks, module or [], folder) as agent:
            _follow(agent, ranks, folder, timeout, pipes)
        return Kept([_values(folder, rank) for rank in range(ranks)])


class _Pipes:
    """The ranks' output, a named pipe each: nothing is stored, and who prints too much waits."""

    def __init__(self, folder: Path, ranks: int, on_output: Output):
        self._on_output = on_output
        self._ends: list[int] = []
        for rank in range(ranks):
            os.mkfifo(folder / f"out.{rank}")
            self._ends.append(os.open(folder / f"out.{rank}", os.O_RDONLY | os.O_NONBLOCK))
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = [decoder(errors="replace") for _ in self._ends]

    def pass_on(self) -> bool:
        """Give a piece of what each rank has printed to `on_output`; False if there was none."""
        found = False
        for rank, end in enumerate(self._ends):
            with contextlib.suppress(BlockingIOError):
                if piece := os.read(end, 1 << 16):
                    found = True
                    self._on_output(rank, self._decoders[rank].decode(piece))
        return found

    def __enter__(self) -> "_Pipes":
        return self

    def __exit__(self, *error: object) -> None:
        """By now the ranks are gone: pass on what they have left in the pipes."""
        try:
            while self.pass_on():
                pass
        finally:
            for end in self._ends:
                os.close(end)


@contextlib.contextmanager
def _agent(ranks: int, module: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    """torchrun's agent as a child of ours; on leaving, it and all its ranks are gone."""
    share = max(1, _cores() // ranks)
    environment = {
        "OMP_NUM_THREADS": str(share),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # why: the transports' warnings have times and ports
        **os.environ,
        "TMPDIR": str(folder),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(_GRACE)),
    }
    with open(folder / "agent.log", "wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "cpref.classroom.agent", str(folder), str(ranks), *module],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # why: Ctrl-C is for us, who then end the ranks in order
        )
    try:
        yield agent
    except BaseException:
        _ask_to_end(agent)
        raise
    finally:
        _end(agent, folder)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _follow(
    agent: subprocess.Popen, ranks: int, folder: Path, timeout: float | None, pipes: _Pipes
) -> None:
    started = time.monotonic()
    try:
        while not all((folder / f"kept.{rank}").exists() for rank in range(ranks)):
            if agent.poll() is not None:
                raise RanksFailed(_first_failure(folder, ranks))
            if timeout is not None and time.monotonic() - started > timeout:
                where = _where(folder, ranks)
                raise RanksFailed(f"not done after {timeout:g} s, all ranks ended:\n{where}")
            left = next((rank for rank in range(ranks) if _has_left(folder, rank)), None)
            if left is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(5 * _GRACE)  # why: it knows more, unless the rank exited with 0
                raise RanksFailed(_first_failure(folder, ranks, left))
            if not pipes.pass_on():
                time.sleep(_POLL)
    except KeyboardInterrupt:
        where = _where(folder, ranks)
        raise RanksInterrupted(f"interrupted, all ranks ended:\n{where}") from None


def _first_failure(folder: Path, ranks: int, left: int | None = None) -> str:
    """What to show; left: a rank that has left before all others, if one has."""
    errors = []
    for rank in range(ranks):
        with contextlib.suppress(OSError):
            errors.append((json.loads((folder / f"error.{rank}").read_text()), rank))
    # why: an error that only says that another rank is gone is not the first one
    own = [(error, rank) for error, rank in errors if not error["secondary"]]
    if not own and (ended := _ended_without_a_word(folder, ranks)):
        return ended
    if errors:
        error, rank = min(own or errors, key=lambda e: e[0]["when"])
        return f"rank {rank} of {ranks} failed:\n{error['text']}"
    if left is not None:
        return f"rank {left} of {ranks} left before its cell was done"
    return f"torchrun failed:\n{(folder / 'agent.log').read_text(errors='replace').strip()}"


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


def _has_left(folder: Path, rank: int) -> bool:
    """Whether the process of the rank is gone, and has said neither why nor that it is done."""
    try:
        gone = not psutil.pid_exists(int((folder / f"pid.{rank}").read_text()))
    except (OSError, ValueError):  # not yet started
        return False
    said = (folder / f"{what}.{rank}" for what in ("kept", "error"))
    return gone and not any(path.exists() for path in said)


def _where(folder: Path, ranks: int) -> str:
    """For each rank the line of the cell that it is at, or how far it has come."""
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / f"pid.{rank}").read_text()), signal.SIGUSR1)
    deadline = time.monotonic() + _GRACE
    while any(_place(folder, rank) == _SILENT for rank in range(ranks)):
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL)
    time.sleep(0.1)  # why: the last stack may still be half written
    return "\n".join(f"rank {rank}: {_place(folder, rank)}" for rank in range(ranks))


def _place(folder: Path, rank: int) -> str:
    if (folder / f"kept.{rank}").exists():
        return "done"
    if not (folder / f"stack.{rank}").exists():
        return "not yet started"
    frames = re.findall(r'File "(.+?)", line (\d+) in', (folder / f"stack.{rank}").read_text())
    line = next((int(line) for file, line in frames if file == CELL), None)
    if line is None:
        return f"in {frames[0][0]}, line {frames[0][1]}" if frames else _SILENT
    source = (folder / "cell.py").read_text("utf-8").splitlines()[line - 1].strip()
    return f"at line {line}: {source}"


def _values(folder: Path, rank: int) -> dict[str, object]:
    packed = torch.load(folder / f"kept.{rank}", weights_only=False)
    return {name: _unpacked(name, value) for name, value in packed.items()}


def _unpacked(name: str, value: bytes) -> object:
    try:
        return torch.load(io.BytesIO(value), map_location="cpu", weights_only=False)
    except Exception as error:
        raise RanksFailed(
            f"keep: {name} cannot be read in the notebook ({error}); "
            "keep tensors, numbers, strings, lists or dictionaries"
        ) from None


def _ask_to_end(agent: subprocess.Popen) -> None:
    """Ask the ranks, and give them a while. Before there are any, the agent just goes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(agent.pid).children()
        if not ranks:
            agent.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()
        psutil.wait_procs(ranks, timeout=_GRACE)


def _end(agent: subprocess.Popen, folder: Path) -> None:
    """Let the agent end everything below it; then look ourselves."""
    with contextlib.suppress(BrokenPipeError):
        agent.stdin.write(b".")
    agent.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(_GRACE)
    agent.kill()
    agent.wait()
    for path in folder.glob("pid.*"):
        with contextlib.suppress(ValueError, ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)
