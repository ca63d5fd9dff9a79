"""Worlds of real ranks that stay: started once for each number of ranks, then handed functions.

Starting a process and importing torch takes seconds, a test milliseconds. So the processes of a
world are forked from one that has imported torch already, join a gloo group as torchrun would have
them join it, and then run function after function.
"""

import os
import socket
import time
from collections.abc import Callable
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

import cpref
from cpref.comm import resolve

T = TypeVar("T")

_context = get_context("forkserver")
_context.set_forkserver_preload(["cpref.exactness", "pytest", "hypothesis"])


class RankEnded(Exception):
    """The process of a rank has ended, with `exit code`."""


class Ranks:
    """A world of `size` ranks. Called with fn and args it runs fn(group, *args) on each.

    fn: a function of a module, so that it can be sent by its name. timeout: of moves, in seconds.
    store_in_rank_0: the ranks meet at a store that is part of rank 0, as without torchrun, and goes
    down with it; else it is here, as it is in torchrun's agent.
    """

    def __init__(self, size: int, timeout: float = 60, *, store_in_rank_0: bool = False):
        self.size, self.usable = size, True
        if store_in_rank_0:
            port = _free_port()
        else:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
            process = _context.Process(
                target=_live,
                args=(theirs, world, port, timeout, store_in_rank_0),
                daemon=True,
            )
            process.start()
            theirs.close()  # why: so that the pipe ends with its process
            self._pipes.append(ours)
            self.processes.append(process)

    def __call__(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Each rank's result; raises what the first failing rank raised."""
        outcomes = self.outcomes(fn, *args)
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                outcome.add_note(f"raised on rank {rank} of {self.size}")
                raise outcome
        return outcomes

    def outcomes(
        self, fn: Callable[..., T], *args: object, limit: float = 120
    ) -> list[T | Exception]:
        """Each rank's result, or what it raised, or `RankEnded`. TimeoutError after `limit` s."""
        self.start(fn, *args)
        return self.collect(limit)

    def start(self, fn: Callable, *args: object) -> None:
        for pipe in self._pipes:
            pipe.send((fn, args))

    def collect(self, limit: float = 120, without: int | None = None) -> list:
        """The outcomes of what was started; of the rank `without` none is waited for."""
        deadline = time.monotonic() + limit
        return [
            None if rank == without else self.collect_one(rank, deadline - time.monotonic())
            for rank in range(self.size)
        ]

    def collect_one(self, rank: int, limit: float) -> object:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0, limit)):
            self.close()
            raise TimeoutError(f"rank {rank} of {self.size} has not answered in time")
        try:
            return pipe.recv()
        except EOFError:
            self.usable = False
            self.processes[rank].join()
            return RankEnded(self.processes[rank].exitcode)

    def close(self) -> None:
        """End all ranks, also the ones that are stopped or stuck."""
        self.usable = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class Worlds:
    """One world for each number of ranks, started when it is first asked for."""

    def __init__(self):
        self._worlds: dict[int, Ranks] = {}

    def __call__(self, size: int) -> Ranks:
        if size not in self._worlds or not self._worlds[size].usable:
            self._worlds[size] = Ranks(size)
        return self._worlds[size]

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


def left_over(patience: float = 10) -> list[str]:
    """Processes below this one that still run after `patience` s: what they are.

    Not meant: the two of multiprocessing that serve until this process ends.
    """
    serving = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    deadline = time.monotonic() + patience
    while True:
        children = psutil.Process().children(recursive=True)
        left = [p for p in children if p.pid not in serving and _runs(p)]
        if not left or time.monotonic() > deadline:
            return [_described(p) for p in left]
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _live(
    orders: Connection, world: dict[str, int], port: int, timeout: float, store_in_rank_0: bool
) -> None:
    os.environ.update({name: str(value) for name, value in world.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not store_in_rank_0)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    torch.set_num_threads(1)
    cpref.init(timeout=timeout)
    while True:
        fn, args = orders.recv()
        try:
            outcome = fn(resolve(None), *args)
        except Exception as error:  # why: the test decides what it means
            outcome = error
        orders.send(outcome)
