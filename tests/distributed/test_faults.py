"""A rank dies, hangs or fails in the middle of a step: the others end, and say which one it was."""

import os
import pickle
import signal
import subprocess
import sys
import time

import psutil
import pytest

import cpref
from cpref import RankError
from cpref.strategies import all_gather, ring

from ..sharded import attention, draw, for_strategy
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


def run(group, strategy, where, act):
    """Attention forward and backward, in which one rank acts before its second tile."""
    module = {"ring": ring, "all_gather": all_gather}[strategy]
    tiles = 0
    before = getattr(module, where)

    def misbehave(*args):
        nonlocal tiles
        tiles += 1
        if group.rank == CULPRIT and tiles == 2:
            act()
        before(*args)

    setattr(module, where, misbehave)
    started = time.monotonic()
    try:
        q, k, v = draw(seq_len=64)[:3]
        leaf = q.requires_grad_()
        out = attention(
            for_strategy(group, strategy),
            leaf,
            k,
            v,
            strategy=strategy,
            layout="contiguous",
            mask=cpref.Full(),
        )
        out.sum().backward()
    except RankError as error:
        return error, time.monotonic() - started
    finally:
        setattr(module, where, before)


@pytest.fixture
def ranks():
    """A world of its own, since it does not survive; no process of it is left afterwards."""
    world = Ranks(RANKS, timeout=TIMEOUT)
    yield world
    pids = [process.pid for process in world.processes]
    world.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def others(outcomes):
    return [outcome for rank, outcome in enumerate(outcomes) if rank != CULPRIT]


def named_by_all_others(outcomes, step):
    """step: a part of where they waited; ranks that are further on may wait in the next one."""
    for outcome in others(outcomes):
        error, seconds = outcome
        assert isinstance(error, RankError)
        assert error.rank == CULPRIT, str(error)
        assert f"rank {CULPRIT} failed" in str(error)
        assert step in error.step
        assert error.step in str(error)
        assert seconds < NOTICED


def test_a_rank_that_is_killed_in_a_ring_step_is_named_by_all_others(ranks):
    outcomes = ranks.outcomes(run, "ring", "attend", die, limit=NOTICED + 10)
    assert isinstance(outcomes[CULPRIT], RankEnded)
    assert outcomes[CULPRIT].args == (-signal.SIGKILL,)
    named_by_all_others(outcomes, "ring ")
    assert all("its process has ended" in str(error) for error, _ in others(outcomes))


def test_a_rank_that_is_killed_in_a_collective_is_named_by_all_others(ranks):
    outcomes = ranks.outcomes(run, "all_gather", "attend_backward", die, limit=NOTICED + 10)
    named_by_all_others(outcomes, "all_gather dK,dV")


@pytest.mark.parametrize("act", [stop, sleep])
def test_a_rank_that_hangs_is_named_by_all_others(ranks, act):
    ranks.start(run, "ring", "attend", act)
    outcomes = ranks.collect(NOTICED + 10, without=CULPRIT)
    named_by_all_others(outcomes, "ring ")


@pytest.mark.parametrize(
    ("strategy", "where"),
    [("ring", "attend"), ("ring", "attend_backward"), ("all_gather", "attend")],
)
def test_a_rank_that_raises_is_named_with_what_it_raised(ranks, strategy, where):
    outcomes = ranks.outcomes(run, strategy, where, fail, limit=NOTICED + 10)
    assert isinstance(outcomes[CULPRIT], Failure)
    named_by_all_others(outcomes, strategy)
    assert all("Failure: out of luck" in str(error) for error, _ in others(outcomes))


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
