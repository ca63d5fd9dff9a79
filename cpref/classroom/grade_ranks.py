"""One real rank of the grader's: it runs the cells that the kernel ran, and one check of the test.

The answer is compiled as it stands in its cell, so its own line numbers are in what is said.
"""

import contextlib
import itertools
import json
import linecache
import os
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType

import psutil
import torch
import torch.distributed as dist

from ..comm import Group, resolve
from . import expect
from .grade_guard import seal

ANSWER = "your cell"


@dataclass(frozen=True)
class World:
    """store: a file that the ranks find each other by; seconds: that a check may take."""

    rank: int
    size: int
    store: str
    seconds: float


class _Done(BaseException):
    """The check that this rank was started for has passed."""


class _OneCheck:
    """Stands for `on_ranks` in a rank: skips the checks before the one that is asked for."""

    is_rank = True

    def __init__(self, call: int, group: Group):
        self._call, self._group = call, group
        self._calls = itertools.count(1)

    def __call__(self, check: expect.Check, size: int) -> None:
        if next(self._calls) == self._call:
            expect.with_rank(check, self._group)
            raise _Done


def main(world: World, asked: dict, out: Connection) -> None:
    """Run the check, tell the outcome, end."""
    told = threading.Lock()

    def tell(**outcome: object) -> None:
        told.acquire()  # why: never released, only one outcome is told
        with contextlib.suppress(OSError):
            out.send_bytes(json.dumps(outcome).encode())

    _tell_when_stuck(world.seconds, tell)
    torch.set_num_threads(1)
    own = next((name for name in psutil.net_if_addrs() if name.startswith("lo")), None)  # lo, lo0
    if own:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{world.store}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.seconds + 10),
    )
    expect._real_ranks = _OneCheck(asked["call"], resolve(None))
    seal(expect)
    try:
        _run(asked["sources"])
        tell(failed="the check was not reached")
    except _Done:
        tell(ok=True)
        time.sleep(0.2)  # why: another may still be receiving
    except AssertionError as error:
        tell(failed=str(error))
    except BaseException as error:
        lost = type(error).__name__ in ("RankError", "DistNetworkError")
        words = f"rank {world.rank} of {world.size}: {_described(error)}"
        tell(**{"lost" if lost else "failed": words})
    time.sleep(2)


def _run(sources: list[str]) -> None:
    names = ["the setup"] * (len(sources) - 2) + [ANSWER, "the test"]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    for name, source in zip(names, sources, strict=True):
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        with warnings.catch_warnings(action="ignore"):
            exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)


def _described(error: BaseException) -> str:
    at = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == ANSWER:
            at = f", at line {frame.lineno} of {ANSWER}: {frame.line}"
    return f"{type(error).__name__}: {error}{at}"


def _tell_when_stuck(seconds: float, tell) -> None:
    main_thread = threading.get_ident()

    def watch() -> None:
        time.sleep(seconds)
        tell(stuck=_place(sys._current_frames()[main_thread]))

    threading.Thread(target=watch, daemon=True).start()


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        if frame.f_code.co_filename == ANSWER:
            line = linecache.getline(ANSWER, frame.f_lineno).strip()
            return f"at line {frame.f_lineno} of {ANSWER}: {line}"
        frame = frame.f_back
    return "outside of your cell"
