"""Which rank is it? When a move fails, find the rank behind it.

A transport only knows that a socket closed or that time ran out. The rank at its other end may be
just as innocent: it has stopped because its own neighbour did. So each rank writes into the store
that all ranks share (the one they met at) who it is when it starts, and whom it was waiting for
when it fails. The culprit is then a rank whose process is gone, else the rank at the end of the
chain of waiting ranks: waited for, but waiting for nobody.
"""

import json
import os
import socket
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

_GRACE = 2.0  # seconds that other ranks are given to notice the fault, too


class RankError(RuntimeError):
    """Another rank has died, hangs, or has failed. rank: which, in the world; step: where."""

    def __init__(self, message: str, rank: int | None, step: str):
        super().__init__(message)
        self.rank, self.step = rank, step

    def __reduce__(self):  # why: it is sent between processes, and is not made from its text alone
        return type(self), (str(self), self.rank, self.step)


def announce() -> None:
    """Write into the shared store which process this rank is."""
    _write(f"who/{dist.get_rank()}", {"host": socket.gethostname(), "pid": os.getpid()})


def met() -> dict[int, dict]:
    """Who all ranks are, by rank. Read while all is well: the store may go down with its rank."""
    said = {rank: _read(f"who/{rank}") for rank in range(dist.get_world_size())}
    return {rank: who for rank, who in said.items() if who}


def report(cause: BaseException, step: str) -> None:
    """Write into the shared store that this rank itself has failed, before it goes."""
    if dist.is_initialized():
        said = f"{type(cause).__name__}: {cause}"
        _write(f"failed/{dist.get_rank()}", {"for": [], "step": step, "cause": said})


def explain(
    error: RuntimeError,
    group: ProcessGroup,
    peers: Sequence[int],
    step: str,
    known: dict[int, dict],
) -> RankError:
    """The error to raise instead of the transport's `error`: it names rank, step and cause.

    peers: the group ranks that this rank was waiting for in `step`; known: what `met` has told.
    """
    me = dist.get_rank()
    waited_for = [dist.get_global_rank(group, peer) for peer in peers]
    transport = _in_short(error)
    _write(f"failed/{me}", {"for": waited_for, "step": step, "cause": transport})
    culprits, cause = _culprits(me, waited_for, {**met(), **known})
    names = " or ".join(str(rank) for rank in culprits)
    culprit = culprits[0] if len(culprits) == 1 else None
    return RankError(
        f"rank {me}, {step}: rank {names} failed: {cause} ({transport})", culprit, step
    )


def _culprits(me: int, waited_for: list[int], known: dict[int, dict]) -> tuple[list[int], str]:
    """The rank behind the fault, or those among which it is, and what is known of it."""
    deadline = time.monotonic() + _GRACE
    while True:
        gone = [rank for rank, who in known.items() if rank != me and _is_gone(who)]
        unheard = [rank for rank in gone if not _read(f"failed/{rank}")]
        if unheard:
            return unheard, "its process has ended"
        rank, cause, silent = _end_of_chain(me, waited_for)
        if cause:
            return [rank], cause
        if time.monotonic() > deadline:
            likely = silent if len(silent) == 1 else waited_for
            return likely, "it has died, hangs, or makes another call than this rank"
        time.sleep(0.1)


def _end_of_chain(me: int, waited_for: list[int]) -> tuple[int | None, str | None, list[int]]:
    """Follow who waits for whom: (rank, its own error, silent ranks that are waited for)."""
    seen, silent, ahead = {me}, [], list(waited_for)
    while ahead:
        rank = ahead.pop()
        if rank in seen:
            continue
        seen.add(rank)
        said = _read(f"failed/{rank}")
        if not said:
            silent.append(rank)
        elif not said["for"]:
            return rank, f"{said['cause']} in {said['step']}", silent
        else:
            ahead.extend(said["for"])
    return (silent[0] if silent else None), None, silent


def _is_gone(who: dict) -> bool:
    """Whether the process is known to have ended: only for ranks of this machine."""
    if who["host"] != socket.gethostname():
        return False
    try:
        os.kill(who["pid"], 0)
        with open(f"/proc/{who['pid']}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _in_short(error: RuntimeError) -> str:
    """What the transport says, without its source lines, stack and advice."""
    said = str(error).splitlines()[0].rpartition("] ")[2] if "gloo" in str(error) else str(error)
    return said.splitlines()[0].partition(". ")[0]


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()  # why: no public way to the ranks' own store


def _write(key: str, value: dict) -> None:
    try:
        _store().set(f"cpref/{key}", json.dumps(value))
    except Exception:  # why: the store may have died with its rank
        return


def _read(key: str) -> dict | None:
    try:
        store = _store()
        key = f"cpref/{key}"
        return json.loads(store.get(key)) if store.check([key]) else None
    except Exception:  # why: as above
        return None
