"""What an answer may use: limits that the system keeps, and the ones that are watched for.

The system ends what passes the limits of one process. How many processes there are in all, and what
they hold together, is for the warden to count: a limit of the system on processes is none for root.
"""

import contextlib
import ctypes
import os
import signal
import sys
from dataclasses import dataclass

import psutil

try:
    import resource
except ImportError:  # why: Windows has none
    resource = None

_LINUX = sys.platform == "linux"
_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of Linux's prctl


@dataclass(frozen=True)
class Limits:
    """seconds: for each task; memory, file_size: bytes; processes: below the warden at a time."""

    seconds: float = 60
    memory: int = 4 << 30
    processes: int = 48
    file_size: int = 64 << 20


def missing() -> str | None:
    """What this system does not protect from, in words; None on Linux, which has all there is.

    Raises ValueError where nothing can be graded at all.
    """
    if resource is None or not hasattr(os, "fork"):
        raise ValueError("grading needs Linux or macOS; on Windows, use it in WSL")
    if _LINUX:
        return None
    return (
        "this system does not limit the memory of a process, and a process that an answer leaves "
        "in the background may go on"
    )


def confine(limits: Limits) -> None:
    """Put this process under the limits, for good; what it starts inherits them."""
    cpu = int(limits.seconds * (os.cpu_count() or 1)) + 5
    _limit(resource.RLIMIT_CPU, cpu)
    _limit(resource.RLIMIT_FSIZE, limits.file_size)
    _limit(resource.RLIMIT_CORE, 0)
    if _LINUX:
        _limit(resource.RLIMIT_DATA, limits.memory)
        # why: the system counts all that the user runs, threads too
        _limit(resource.RLIMIT_NPROC, _threads_of_user() + 8 * limits.processes)
        end_with_parent()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # why: if memory runs out, the answer goes, not its grader


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind, so that it can be found and ended."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def end_with_parent() -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def broken(limits: Limits) -> str | None:
    """What the processes below this one together have too much of, in words; None if nothing."""
    below = psutil.Process().children(recursive=True)
    if len(below) > limits.processes:
        return f"it started more than {limits.processes} processes"
    held = 0
    for process in below:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info()
            held += memory.rss - getattr(memory, "shared", 0)
    if held > limits.memory:
        return f"it took more than {limits.memory >> 20} MiB of memory"
    return None


def end_descendants() -> None:
    """Kill all that runs below this process, however fast it starts more."""
    me = psutil.Process()
    while below := me.children(recursive=True):
        for process in below:  # why: what stands still starts nothing
            with contextlib.suppress(psutil.Error):
                process.suspend()
        for process in {*below, *me.children(recursive=True)}:
            with contextlib.suppress(psutil.Error):
                process.kill()
        reap()


def reap() -> dict[int, int]:
    """The exit codes of the children that have ended, by process."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _threads_of_user() -> int:
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                total += process.num_threads()
    return total


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(what, (most, most))
