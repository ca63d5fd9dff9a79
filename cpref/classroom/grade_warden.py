"""The process that all answers run below: it starts kernels and ranks, watches, and ends them.

    grader ── warden ─┬─ kernel            runs the answer and its test
                      ├─ rank, rank, ...   run the test's check once more, on real ranks
                      └─ whatever these have left behind

The warden is forked from the grader when torch is imported and no thread has started, and forks the
others in the same state: that takes milliseconds, where a new process takes seconds. It runs
nothing of a learner's, and what it hears it reads as JSON.

    grader to warden    {"start": connection file, "folder": ...}     {"stop": true}
    warden to grader    {"ended": why}, when the kernel is gone        {"stopped": true}
    kernel to warden    {"ranks": 3, "call": 1, "sources": [...]}
    warden to kernel    [each rank's outcome]
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from . import grade_kernel, grade_ranks
from .grade_limits import (
    Limits,
    adopt_orphans,
    broken,
    confine,
    end_descendants,
    end_with_parent,
    reap,
)

_POLL = 0.05  # seconds between two looks at what runs
_LONGEST = 1 << 20  # bytes of what a kernel or a rank may say
_LINGER = 1.0  # seconds that ranks have to say something when one has failed


@dataclass
class _Launch:
    """Ranks that run: their processes and pipes, and what they have said so far."""

    processes: dict[int, int]  # rank by process
    pipes: dict[Connection, int]  # rank by pipe
    deadline: float
    outcomes: dict[int, dict] = field(default_factory=dict)


def start(limits: Limits) -> tuple[int, Connection]:
    """Fork the warden; its process and the grader's end of the pipe to it."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _for_ever(lambda: _Warden(theirs, limits).live())
    theirs.close()
    return pid, ours


class _Warden:
    def __init__(self, grader: Connection, limits: Limits):
        self._grader, self._limits = grader, limits
        self._kernel: int | None = None
        self._asks: Connection | None = None
        self._folder = Path()
        self._launch: _Launch | None = None
        os.setsid()
        end_with_parent()
        adopt_orphans()
        _redirect_to_nothing()

    def live(self) -> None:
        """Until the grader is gone."""
        try:
            while True:
                ears = [self._grader, *([self._asks] if self._asks else [])]
                for pipe in wait([*ears, *(self._launch.pipes if self._launch else [])], _POLL):
                    if pipe is self._grader:
                        self._obey(json.loads(pipe.recv_bytes()))
                        break  # why: the other pipes may be gone now
                    self._hear(pipe)
                self._watch()
        except (EOFError, OSError):
            end_descendants()

    def _obey(self, order: dict) -> None:
        if "start" in order:
            self._folder = Path(order["folder"])
            self._asks, theirs = Pipe()
            connection, limits = order["start"], self._limits
            self._kernel = self._fork(
                lambda: grade_kernel.main(connection, theirs, limits.seconds), [theirs]
            )
            theirs.close()
        else:
            self._end()
            self._say({"stopped": True})

    def _hear(self, pipe: Connection) -> None:
        """A word of the kernel's or of a rank's."""
        try:
            said = json.loads(pipe.recv_bytes(_LONGEST))
        except (EOFError, OSError, ValueError):
            said = None
        if pipe is self._asks:
            if said is None:
                self._asks = None
            elif self._launch is None:
                self._start_ranks(said)
        elif self._launch and pipe in self._launch.pipes:
            rank = self._launch.pipes.pop(pipe)
            if said is not None:
                self._launch.outcomes[rank] = said

    def _start_ranks(self, asked: dict) -> None:
        size, seconds = min(int(asked["ranks"]), 16), self._limits.seconds / 3
        launch = _Launch({}, {}, time.monotonic() + seconds + 3)
        store = self._folder.parent / f"store-{time.monotonic_ns()}"
        for rank in range(size):
            ours, theirs = Pipe(duplex=False)
            world = grade_ranks.World(rank, size, str(store), seconds)
            work = lambda world=world, out=theirs: grade_ranks.main(world, asked, out)  # noqa: E731
            launch.processes[self._fork(work, [theirs])] = rank
            launch.pipes[ours] = rank
            theirs.close()
        self._launch = launch

    def _watch(self) -> None:
        for pid, code in reap().items():
            if self._launch and pid in self._launch.processes:
                rank = self._launch.processes[pid]
                self._launch.outcomes.setdefault(rank, {"ended": code})
            if pid == self._kernel:
                self._kernel = None
                self._end()
                self._say({"ended": f"the answer ended its kernel ({_name(code)})"})
                return
        if self._kernel and (words := broken(self._limits)):
            self._end()
            self._say({"ended": words})
            return
        if self._launch:
            self._follow(self._launch)

    def _follow(self, launch: _Launch) -> None:
        now = time.monotonic()
        if any("ok" not in outcome for outcome in launch.outcomes.values()):
            launch.deadline = min(launch.deadline, now + _LINGER)
        if len(launch.outcomes) < len(launch.processes) and now < launch.deadline:
            return
        for pid in launch.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        outcomes = [launch.outcomes.get(rank) for rank in launch.processes.values()]
        self._launch = None
        if self._asks:
            with contextlib.suppress(OSError):
                self._asks.send_bytes(json.dumps(outcomes).encode())

    def _end(self) -> None:
        end_descendants()
        self._kernel = self._asks = self._launch = None

    def _say(self, words: dict) -> None:
        self._grader.send_bytes(json.dumps(words).encode())

    def _fork(self, work: Callable[[], None], kept: list[Connection]) -> int:
        pid = os.fork()
        if pid:
            return pid

        def confined() -> None:
            os.setsid()
            confine(self._limits)
            pipes = self._launch.pipes if self._launch else {}
            for pipe in (self._grader, self._asks, *pipes):
                if pipe is not None and pipe not in kept:
                    pipe.close()
            os.environ["TMPDIR"] = os.environ["HOME"] = str(self._folder)
            os.chdir(self._folder)
            work()

        _for_ever(confined)


def _for_ever(work: Callable[[], None]) -> None:
    """Do the work of a forked process, and never return into the code that it was forked from."""
    try:
        work()
    finally:
        os._exit(0)


def _redirect_to_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
