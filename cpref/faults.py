"""Which rank is it? When a move fails, find the rank behind it.

A transport only knows that a socket closed or that time ran out. The rank at its other end may be
just as innocent: it has stopped because its own neighbour did. So each rank writes into the store
that all ranks share (the one they met at) who it is when it starts, whom it was waiting for when it
fails, and that it leaves when it leaves. The culprit is then at the end of the chain of waiting
ranks: one that has failed of itself, or has left or died, or that is waited for but says nothing.

The store may be down, with the rank that holds it, or stopped with it. Then what is known of the
processes of this machine has to do.
"""

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")

_GRACE = 2.0  # seconds that other ranks are given to notice the fault, too
_PATIENCE = 2.0  # seconds that the store is given to answer


class RankError(RuntimeError):
    """Another rank has died, hangs, or has failed. rank: which, in the world; step: where."""

    def __init__(self, message: str, rank: int | None, step: str):
        super().__init__(message)
        self.rank, self.step = rank, step

    def __reduce__(self):  # why: it is sent between processes, and is not made from its text alone
        return type(self), (str(self), self.rank, self.step)


# -- what a rank says of itself -------------------------------------------------------------------


def announce() -> None:
    """Write into the shared store which process this rank is; when it ends, also how it ended."""
    _write("who", {"host": socket.gethostname(), "pid": os.getpid()})
    _erase("left")  # why: a launcher's store outlives a shutdown
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def met() -> dict[int, dict]:
    """Who all ranks are, by rank. Read while all is well: the store may go down with its rank."""
    ranks = range(dist.get_world_size())
    said = _ask(lambda store: {rank: _read(store, "who", rank) for rank in ranks}) or {}
    return {rank: who for rank, who in said.items() if who}


def report(cause: BaseException, step: str) -> None:
    """Write into the shared store that this rank itself has failed, before it goes.

    Not if all that has failed it is another rank.
    """
    if dist.is_initialized() and not _stems_from_another_rank(cause):
        _fail([], {"for": [], "step": step, "cause": f"{type(cause).__name__}: {cause}"})


def clear() -> None:
    """Take back that this rank has failed: all ranks go on together, so the fault is over."""
    if _failed:
        _failed.clear()
        _erase("failed")


def leave() -> None:
    """Write into the shared store that this rank leaves, and has nothing more to send."""
    if dist.is_initialized():
        _write("left", {"pid": os.getpid()})


# why here, too: asking the store whether there is something to clear would cost every call
_failed: list[dict] = []


def _fail(among: list[int], what: dict) -> None:
    """among: the ranks of the group that it failed in. Of each group the last failure counts."""
    _failed[:] = [earlier for earlier in _failed if earlier["among"] != among]
    _failed.append({"among": among, **what})
    _write("failed", _failed)


def _stems_from_another_rank(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, RankError):
        error = error.__cause__ or error.__context__
    return error is not None


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)  # what has just ended the program, if it was an error
    if error is None:
        leave()
    else:
        report(error, "the program")


# -- what a rank finds out about the others -------------------------------------------------------


def is_local(error: RuntimeError, *, posting: bool) -> bool:
    """Whether an error in a move is this rank's own, such as memory, and no other rank's fault."""
    if isinstance(error, (RankError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    # why: what cannot be posted is a matter of this rank, unless a connection is already lost
    return posting and not isinstance(error, dist.DistError) and "gloo" not in str(error)


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
    among = dist.get_process_group_ranks(group)
    transport = _in_short(error)
    _fail(among, {"for": waited_for, "step": step, "cause": transport})
    culprits, cause = _culprits(me, among, waited_for, {**met(), **known})
    names = " or ".join(str(rank) for rank in culprits)
    culprit = culprits[0] if len(culprits) == 1 else None
    return RankError(
        f"rank {me}, {step}: rank {names} failed: {cause} ({transport})", culprit, step
    )


def _culprits(
    me: int, among: list[int], waited_for: list[int], known: dict[int, dict]
) -> tuple[list[int], str]:
    """The rank behind the fault, or those among which it is, and what is known of it."""
    deadline = time.monotonic() + _GRACE
    while True:
        chain = _ask(lambda store: _Chain(store, me, among, waited_for))
        if chain is None:
            return _without_a_store(me, waited_for, known)
        if chain.failed:
            rank, said = chain.failed
            return [rank], f"{said['cause']} in {said['step']}"
        ended = [rank for rank in chain.silent if _has_ended(known.get(rank))]
        died = [rank for rank in ended if rank not in chain.left]
        if died or chain.left:
            return died or chain.left, _ENDED if died else _LEFT
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    # why: a rank on the way to the culprit may not have noticed yet
    ended = [r for r, who in known.items() if r not in (me, *chain.others) and _has_ended(who)]
    died = _ask(lambda store: [rank for rank in ended if not _read(store, "left", rank)])
    if died:
        return died, _ENDED
    return chain.silent if len(chain.silent) == 1 else waited_for, _HANGS


def _without_a_store(
    me: int, waited_for: list[int], known: dict[int, dict]
) -> tuple[list[int], str]:
    ended = [rank for rank, who in known.items() if rank != me and _has_ended(who)]
    if ended:
        return [rank for rank in ended if rank in waited_for] or ended, _ENDED
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and me != 0:
        return [0], "its part of the run, the store of all ranks, does not answer either"
    return waited_for, _HANGS


_ENDED = "its process has ended"
_HANGS = "it has died, hangs, or makes another call than this rank"
_LEFT = "it has left: its program came to its end, or called shutdown, while others wait for it"


class _Chain:
    """Who waits for whom, as far as the ranks have told. Of several failures of a rank, the last in
    our group counts, or of itself; if there is none, the last of all.

    failed: a rank that failed of itself, and what it said; silent: ranks that are waited for and
    have said nothing; left: those of them that have left; others: ranks that have given up, too.
    """

    def __init__(self, store: dist.Store, me: int, among: list[int], waited_for: list[int]):
        self.failed: tuple[int, dict] | None = None
        self.silent, self.left, self.others = [], [], []
        seen, ahead = {me}, list(waited_for)
        while ahead:
            rank = ahead.pop()
            if rank in seen:
                continue
            seen.add(rank)
            failures = _read(store, "failed", rank)
            if not failures:
                self.silent.append(rank)
                if _read(store, "left", rank):
                    self.left.append(rank)
                continue
            ours = [failure for failure in failures if failure["among"] in (among, [])]
            said = (ours or failures)[-1]
            if said["for"]:
                self.others.append(rank)
                ahead.extend(said["for"])
            else:
                self.failed = rank, said


def _has_ended(who: dict | None) -> bool:
    """Whether the process is known to have ended: only for ranks of this machine."""
    if who is None or who["host"] != socket.gethostname():
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
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "gloo" in said:
        said = said.rpartition("] ")[2]
    return said.partition(". ")[0]


# -- the store ------------------------------------------------------------------------------------


def _key(what: str, rank: int) -> str:
    return f"cpref/{what}/{rank}"


def _write(what: str, value: dict | list[dict]) -> None:
    key, text = _key(what, dist.get_rank()), json.dumps(value)
    _ask(lambda store: store.set(key, text))


def _erase(what: str) -> None:
    key = _key(what, dist.get_rank())
    _ask(lambda store: store.delete_key(key))


def _read(store: dist.Store, what: str, rank: int) -> dict | list[dict] | None:
    key = _key(what, rank)
    return json.loads(store.get(key)) if store.check([key]) else None


def _ask(act: Callable[[dist.Store], T]) -> T | None:
    """act(store); None if the store is down, or does not answer because its rank is stopped."""
    answer: list[T] = []

    def run() -> None:
        try:
            # why private: there is no public way to the store that the ranks met at
            answer.append(act(dist.distributed_c10d._get_default_store()))
        except Exception:  # why: a store that is down says so in many ways
            return

    asking = threading.Thread(target=run, daemon=True, name="cpref asks the store")
    asking.start()
    asking.join(_PATIENCE)
    return answer[0] if answer else None
