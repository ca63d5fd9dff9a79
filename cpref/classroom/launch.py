"""Start ranks by torchrun's agent, follow them, and leave nothing behind.

`launch` gives each rank's output to a function as it comes, and returns when all ranks are done. If
one fails, if time runs out or the caller is interrupted, all ranks are ended, by SIGKILL where they
do not listen, and their folder of temporary files is removed.
"""

import codecs
import contextlib
import io
import os
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

from .machine import cores
from .outcome import failures, first_failure, has_left, where
from .rank import ERROR_LINGER

Output = Callable[[int, str], None]
_POLL = 0.02  # seconds between two looks at the ranks
_GRACE = 2.0  # seconds that ranks are given to end before they are killed
_ALIKE = 0.3  # seconds in which ranks that fail alike do so; less than they linger


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
        try:
            for rank in range(ranks):
                os.mkfifo(folder / f"out.{rank}")
                self._ends.append(os.open(folder / f"out.{rank}", os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            self._close()  # why: a notebook that has no file left to open is lost
            raise RanksFailed(f"{ranks} ranks cannot start: {error.strerror}; use fewer") from None
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
            self._close()

    def _close(self) -> None:
        for end in self._ends:
            os.close(end)


@contextlib.contextmanager
def _agent(ranks: int, module: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    """torchrun's agent as a child of ours; on leaving, it and all its ranks are gone."""
    share = max(1, cores() // ranks)
    environment = {
        "OMP_NUM_THREADS": str(share),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # why: the transports' warnings have times and ports
        # why: torch's store asks for the names of those who connect; a name server that does not
        # answer would hold every launch up for ten seconds
        "RES_OPTIONS": "timeout:1 attempts:1",
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


def _follow(
    agent: subprocess.Popen, ranks: int, folder: Path, timeout: float | None, pipes: _Pipes
) -> None:
    started = time.monotonic()
    try:
        while not all((folder / f"kept.{rank}").exists() for rank in range(ranks)):
            if agent.poll() is not None:
                raise RanksFailed(first_failure(folder, ranks))
            if timeout is not None and time.monotonic() - started > timeout:
                places = where(folder, ranks)
                raise RanksFailed(f"not done after {timeout:g} s, all ranks ended:\n{places}")
            failed = failures(folder, ranks)
            age = time.time() - min((failure.when for failure in failed), default=time.time())
            if age > _ALIKE and not all(failure.secondary for failure in failed):
                raise RanksFailed(first_failure(folder, ranks))
            left = next((rank for rank in range(ranks) if has_left(folder, rank)), None)
            if left is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(5 * _GRACE)  # why: it knows more, unless the rank exited with 0
                # why: later, it may be the agent that has ended the rank, for another's failure
                of_itself = age < ERROR_LINGER
                raise RanksFailed(first_failure(folder, ranks, left if of_itself else None))
            if not pipes.pass_on():
                time.sleep(_POLL)
    except KeyboardInterrupt:
        places = where(folder, ranks)
        raise RanksInterrupted(f"interrupted, all ranks ended:\n{places}") from None


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
