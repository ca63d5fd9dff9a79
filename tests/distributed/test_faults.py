"""A rank dies, hangs or fails in the middle of a step: the others end, and say which one it was."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import cpref
from cpref import RankError
from cpref.comm import resolve
from cpref.faults import _in_short, is_local
from cpref.strategies import all_gather, reduce_scatter, ring, ulysses

from ..sharded import attention, draw
from .ranks import RankEnded, Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TIMEOUT = 4.0  # seconds that a move waits
NOTICED = TIMEOUT + 15  # by then every rank has to be back, on a machine with other work to do
CULPRIT, RANKS = 2, 4


class Failure(Exception):
    """What the failing rank raises of itself."""


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep():
    time.sleep(600)


def fail():
    raise Failure("out of luck")


STRATEGIES = ("ring", "all_gather", "reduce_scatter", "ulysses", "hybrid")
# where the tiles of a strategy are computed, and before which of them the culprit acts
TILES = {
    "ring": (ring, 2),
    "all_gather": (all_gather, 2),
    "reduce_scatter": (reduce_scatter, 2),
    "ulysses": (ulysses, 1),
    "hybrid": (ring, 1),  # why: in a ring of two, all that others need has gone by the second
}


def fresh(strategy):
    """A group of all ranks that no fault has reached yet."""
    everyone = list(range(dist.get_world_size()))
    if strategy == "hybrid":
        return DeviceMesh("cpu", [everyone[: RANKS // 2], everyone[RANKS // 2 :]])
    return dist.new_group(everyone, timeout=timedelta(seconds=TIMEOUT))


def run(group, strategy, where, act, culprit=CULPRIT):
    """Attention forward and backward, in which one rank acts before one of its tiles."""
    module, turn = TILES[strategy]
    group, rank, tiles = fresh(strategy), group.rank, 0
    before = getattr(module, where)

    def misbehave(*args):
        nonlocal tiles
        tiles += 1
        if rank == culprit and tiles == turn:
            act()
        before(*args)

    setattr(module, where, misbehave)
    started = time.monotonic()
    try:
        q, k, v = draw(seq_len=64)[:3]
        options = {"strategy": strategy, "layout": "contiguous", "mask": cpref.Full()}
        attention(group, q.requires_grad_(), k, v, **options).sum().backward()
    except RankError as error:
        return error, time.monotonic() - started
    finally:
        setattr(module, where, before)


@pytest.fixture
def own_world():
    """Makes a world of its own, since it may not survive; no process of it is left afterwards."""
    worlds = []

    def make(size=RANKS, **options):
        worlds.append(Ranks(size, timeout=TIMEOUT, **options))
        return worlds[-1]

    yield make
    pids = [process.pid for one in worlds for process in one.processes]
    for one in worlds:
        one.close()
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def others(outcomes, culprit=CULPRIT):
    return [outcome for rank, outcome in enumerate(outcomes) if rank != culprit]


def named_by_all_others(outcomes, step, cause, culprit=CULPRIT):
    """step: a part of where they waited; ranks that are further on may wait in the next one."""
    for error, seconds in others(outcomes, culprit):
        assert isinstance(error, RankError)
        assert error.rank == culprit, str(error)
        assert f"rank {culprit} failed" in str(error)
        assert cause in str(error)
        assert error.step in str(error)
        assert step in error.step
        assert "\n" not in str(error)
        assert seconds < NOTICED


def last_step(strategy):
    """What all labels of a strategy's moves have in common."""
    return "" if strategy == "hybrid" else f"{strategy} "


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_is_killed_is_named_by_all_others(own_world, strategy):
    where = "attend" if strategy in ("ring", "ulysses") else "attend_backward"
    outcomes = own_world().outcomes(run, strategy, where, die, limit=NOTICED + 10)
    assert isinstance(outcomes[CULPRIT], RankEnded)
    assert outcomes[CULPRIT].args == (-signal.SIGKILL,)
    named_by_all_others(outcomes, last_step(strategy), "its process has ended")


def ready(group):
    return group.all_gather(torch.zeros(1)).wait()


def in_worlds_of_their_own(make, where, act):
    """What the ranks have to say, by strategy. All at once, since a fault is mostly waiting."""
    worlds = {strategy: make() for strategy in STRATEGIES}
    for ranks in worlds.values():
        ranks.outcomes(ready)
    for strategy, ranks in worlds.items():
        ranks.start(run, strategy, where, act)
    for strategy, ranks in worlds.items():
        yield strategy, ranks.collect(NOTICED + 20, without=CULPRIT)


@pytest.mark.parametrize(
    ("act", "where", "cause"),
    [
        (stop, "attend", "it has died, hangs, or makes another call"),
        (sleep, "attend_backward", "it has died, hangs, or makes another call"),
        (fail, "attend_backward", "Failure: out of luck in attention backward"),
    ],
)
def test_a_rank_that_hangs_or_raises_is_named_by_all_others(own_world, act, where, cause):
    for strategy, outcomes in in_worlds_of_their_own(own_world, where, act):
        named_by_all_others(outcomes, last_step(strategy), cause)


def test_what_a_rank_has_said_of_an_earlier_fault_is_not_held_against_it(own_world):
    ranks = own_world()
    for where, culprit in [("attend_backward", 2), ("attend", 1)]:
        outcomes = ranks.outcomes(run, "ring", where, fail, culprit, limit=NOTICED + 10)
        assert isinstance(outcomes[culprit], Failure)
        named_by_all_others(outcomes, "ring ", "Failure: out of luck", culprit)


@pytest.mark.parametrize("act", [die, stop])
def test_a_rank_is_named_also_if_the_store_of_all_ranks_goes_with_it(own_world, act):
    """Without a launcher the store is in rank 0: then nobody reads what others have said."""
    ranks = own_world(store_in_rank_0=True)
    ranks.start(run, "ring", "attend", act, 0)
    outcomes = ranks.collect(NOTICED + 10, without=0)
    cause = "its process has ended" if act is die else "the store of all ranks, does not answer"
    named_by_all_others(outcomes, "ring ", cause, 0)


def leave_or_wait(group, late):
    """Rank 3 leaves in peace; then rank 2 sleeps while the first two wait for it."""
    some = dist.new_group([0, 1, 2], timeout=timedelta(seconds=TIMEOUT))
    group.all_gather(torch.zeros(1)).wait()
    if group.rank == 3:
        cpref.shutdown()
        os._exit(0)
    if group.rank == 2:
        sleep()
    time.sleep(1 + late * group.rank)
    some, said = resolve(some), []
    for move in (lambda: some.all_gather(torch.zeros(1)), lambda: group.shift(torch.zeros(1))):
        try:
            move().wait()
        except RankError as error:
            said.append(error)
    return said


@pytest.mark.parametrize("late", [0, 5])
def test_a_rank_that_has_left_is_blamed_only_by_those_who_wait_for_it(own_world, late):
    """Also if by then the first has failed once more, for another reason."""
    ranks = own_world()
    ranks.start(leave_or_wait, late)
    first, second = ranks.collect(NOTICED + 20, without=2)[:2]
    for said in (first, second):
        assert said[0].rank == 2, str(said[0])
        assert "it has died, hangs" in str(said[0])
    assert first[1].rank == 3, str(first[1])  # in the ring rank 0 waits for 3
    assert "it has left: its program came to its end, or called shutdown" in str(first[1])


ENDS = """
import sys, torch, torch.distributed as dist, cpref
from cpref.comm import resolve
cpref.init(timeout=20)
groups = [dist.new_group([0, other]) for other in (1, 2)]
rank = resolve(None).rank
if rank == 1:
    {}["batch 7"]
if rank == 2:
    sys.exit()
for group in groups:
    try:
        resolve(group).shift(torch.zeros(1)).wait()
    except cpref.RankError as error:
        print(error.rank, error)
"""


def test_a_program_that_ends_says_how_it_ended():
    """One rank ends with an error far from any move, one ends in peace; a third waits for both."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS],
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
                **{"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"},
                **{"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    first, second = said[0][0].splitlines()
    assert first.startswith("1 rank 0, shift: rank 1 failed: KeyError: 'batch 7' in the program")
    assert second.startswith("2 rank 0, shift: rank 2 failed: it has left: its program came to")


def of_this_rank(group):
    """What is this rank's own fault is raised as it is, and blamed on nobody."""
    try:
        group.shift(torch.zeros(2, device="meta")).wait()
    except RuntimeError as error:
        return type(error), str(error)


def test_what_cannot_be_posted_is_not_blamed_on_other_ranks(processes):
    said = "No backend type associated with device type meta"
    assert processes(2)(of_this_rank) == [(RuntimeError, said)] * 2


@pytest.mark.parametrize(
    ("error", "posting", "local"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, True),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
        (RuntimeError("No backend type associated with device type xpu"), True, True),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True, False),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), False, False),
        (dist.DistBackendError("NCCL error: remote process exited"), True, False),
        (RuntimeError(), False, False),
    ],
)
def test_an_error_of_this_rank_is_told_from_one_of_the_transport(error, posting, local):
    assert is_local(error, posting=posting) is local


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_an_error_without_a_text_has_at_least_a_name(text):
    assert _in_short(RuntimeError(text)) == "RuntimeError"


def in_a_destroyed_group(group):
    of_it = dist.new_group([0, 1])
    mine = resolve(of_it)
    dist.destroy_process_group(of_it)
    del of_it
    gc.collect()
    try:
        mine.shift(torch.zeros(1))
    except RuntimeError as error:
        return str(error)


def test_a_destroyed_group_does_not_become_that_of_all_ranks(processes):
    for said in processes(2)(in_a_destroyed_group):
        assert "has been destroyed" in said


def after_many_agreements(group):
    """As on a machine whose group has no CPU backend."""
    mine = resolve(dist.new_group([0, 1]))
    mine._has_cpu = False
    terms = [f"documents of {length}" for length in range(1100)]
    for one in [*terms, *terms[:3], *terms[-3:]]:
        mine.agree("attention", lambda one=one: ({"mask": one}, None))
    try:
        mine.agree("attention", lambda: ({"mask": f"of rank {mine.rank}"}, None))
    except ValueError:
        mine.agree("attention", lambda: ({"mask": "of rank 0"}, None))
    return len(mine._compared), len(group._compared)


def test_what_ranks_have_agreed_on_is_not_remembered_without_bound(processes):
    assert processes(2)(after_many_agreements) == [(1024, 0)] * 2


def test_a_rank_error_survives_being_sent():
    error = pickle.loads(pickle.dumps(RankError("rank 1 failed", 1, "ring forward, step 2")))
    assert (str(error), error.rank, error.step) == ("rank 1 failed", 1, "ring forward, step 2")


SCRIPT = """
import os, signal, sys, torch, cpref
cpref.init(timeout=30)
q = torch.randn(1, 2, 64, 8, requires_grad=True)
for step in range(10**9):
    cpref.context_parallel_attention(q, q, q).sum().backward()
    if step == 3:
        print("going", flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_under_torchrun_a_killed_rank_ends_the_run_and_leaves_no_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.Popen(
        [*launcher, "--nproc-per-node=2", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, _ = run.communicate(timeout=300)
    finally:
        run.kill()
    assert "going" in out
    assert run.returncode != 0
    started = [p for p in psutil.process_iter() if str(script) in " ".join(arguments(p))]
    assert not started


def arguments(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
