"""The emulated link: exactly, by a clock that only what is tested moves."""

import math
import threading
import time

import pytest
import torch

import cpref
from cpref.measure.link import (
    Clock,
    EmulatedLink,
    emulated_link,
    own_core,
    ring_seconds,
    ring_timeline,
)
from cpref.measure.timeline import record_timeline
from cpref.strategies import ring


class Steps(threading.local):
    """A clock of its own in each rank's thread, which stands still unless it is moved."""

    def __init__(self):
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def move(self, seconds: float) -> None:
        self.time += seconds


def test_a_core_of_its_own_counts_work_and_asked_for_sleep_and_nothing_else():
    clock = own_core()
    begun, real = clock.now(), time.perf_counter()
    clock.sleep(5)
    time.sleep(0.2)  # another has the core
    assert 5 <= clock.now() - begun < 5.15 and time.perf_counter() - real < 5
    worked = time.thread_time()
    while time.thread_time() - worked < 0.05:
        pass
    assert clock.now() - begun >= 5.05


def test_one_message_goes_after_the_other_and_the_latency_is_nobody_elses():
    steps = Steps()
    link = EmulatedLink(latency=0.5, bandwidth=10, clock=Clock(steps.now, steps.move))
    assert link.send(20) == (0, 2.5)
    assert link.send(10) == (2, 3.5)
    steps.move(100)
    assert link.send(0) == (100, 100.5)


def test_a_wait_returns_at_the_ride_s_end_and_not_later_when_that_has_passed():
    steps = Steps()
    link = EmulatedLink(0, 10, Clock(steps.now, steps.move))
    _, there = link.send(20)
    link.wait_until(there)
    assert steps.now() == 2
    steps.move(5)
    link.wait_until(there)
    assert steps.now() == 7


def pass_on(group, bandwidth, latency):
    """Seconds from the post to the return of the wait, and the next of a free link."""
    x = torch.full((1000,), float(group.rank))
    begun = time.perf_counter()
    with emulated_link(group, latency=latency, bandwidth=bandwidth):
        arrived = group.shift(x).wait()
    linked = time.perf_counter() - begun
    assert (arrived == (group.rank - 1) % group.size).all()
    return linked, group.watch.link


def test_every_move_takes_at_least_its_time_by_the_real_clock(world):
    for linked, left in world(pass_on, 2, 40_000, 0.02):
        assert linked >= 4000 / 40_000 + 0.02
        assert left is None


TILE = 3.0
BLOCK = 2 * 4 * 8 * 4 * 4  # bytes: k and v of (1, 4, 8, 4), float32


def attention(group, steps, transfer, overlap):
    q, k, v = torch.zeros(3, 1, 4, 8, 4)
    clock = Clock(steps.now, steps.move)
    steps.time = 0.0
    with (
        emulated_link(group, bandwidth=BLOCK / transfer, clock=clock),
        record_timeline(group, now=steps.now) as timeline,
    ):
        cpref.context_parallel_attention(
            q, k, v, group=group, mask=cpref.Full(), overlap=overlap, layout="contiguous"
        )
    return timeline


@pytest.fixture
def steps(monkeypatch) -> Steps:
    """A clock that each tile of the ring moves by TILE."""
    steps = Steps()
    monkeypatch.setattr(ring, "attend", lambda *args: steps.move(TILE))
    return steps


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("transfer", [1.0, 3.0, 7.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_ring_takes_the_sum_one_after_the_other_and_the_longer_overlapped(
    steps, ranks, transfer, overlap
):
    timelines = cpref.run_local(attention, ranks, steps, transfer, overlap)
    step = max(TILE, transfer) if overlap else TILE + transfer
    taken = (ranks - 1) * step + TILE
    assert ring_seconds(ranks, TILE, transfer, overlap=overlap) == taken
    for timeline in timelines:
        assert timeline.seconds == pytest.approx(taken, abs=1e-6)
        assert timeline.idle_share() == pytest.approx(1 - ranks * TILE / taken, abs=1e-6)
        hidden = min(TILE, transfer) / transfer if overlap else 0
        assert timeline.overlap_share() == pytest.approx(hidden, abs=1e-6)
        modelled = ring_timeline(ranks, TILE, transfer, overlap=overlap)
        assert modelled.seconds == taken
        for kind in ("compute", "send", "wait"):
            found = [end - begin for begin, end in timeline.of(kind, 0) if begin < end]
            expected = [end - begin for begin, end in modelled.of(kind, 0)]
            assert found == pytest.approx(expected, abs=1e-6)


def backward(group, steps, transfer, overlap):
    q, k, v = (x.requires_grad_() for x in torch.zeros(3, 1, 4, 8, 4))
    out = cpref.context_parallel_attention(
        q, k, v, group=group, mask=cpref.Full(), overlap=overlap, layout="contiguous"
    )
    clock = Clock(steps.now, steps.move)
    steps.time = 0.0
    with (
        emulated_link(group, bandwidth=BLOCK / transfer, clock=clock),
        record_timeline(group, now=steps.now) as timeline,
    ):
        out.sum().backward()
    return timeline


def test_backward_hides_two_transfers_behind_each_tile(steps, monkeypatch):
    monkeypatch.setattr(ring, "attend_backward", lambda *args: steps.move(4 * TILE))
    hidden = cpref.run_local(backward, 4, steps, 1.0, True)[0]
    apart = cpref.run_local(backward, 4, steps, 1.0, False)[0]
    # the first block has no tile to hide behind; of six transfers the other five have
    assert hidden.seconds == pytest.approx(1 + 4 * 4 * TILE, abs=1e-6)
    assert apart.seconds == pytest.approx(6 + 4 * 4 * TILE, abs=1e-6)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "reduce_scatter", "ulysses"])
def test_the_numbers_are_those_of_a_free_link(strategy):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 24, 8)

    def run(group, bandwidth):
        mine = [cpref.shard(x, 2, group=group) for x in (q, k, v)]
        with emulated_link(group, bandwidth=bandwidth):
            return cpref.context_parallel_attention(*mine, group=group, strategy=strategy)

    outs = cpref.run_local(run, 2, 1e6), cpref.run_local(run, 2, math.inf)
    for slow, free in zip(*outs, strict=True):
        assert torch.equal(slow, free)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"latency": -1}, "latency is -1; it must be a number of seconds, at least 0"),
        ({"latency": math.inf}, "latency is inf; it must be"),
        ({"bandwidth": 0}, "bandwidth is 0; it must be bytes per second, more than 0"),
        ({"bandwidth": math.nan}, "bandwidth is nan; it must be"),
        ({"bandwidth": "1e9"}, "bandwidth is '1e9'; it must be"),
        ({"bandwidth": True}, "bandwidth is True; it must be"),
    ],
)
def test_a_link_that_cannot_be_is_refused(wrong, said):
    def run(group):
        with emulated_link(group, **wrong):
            pass

    with pytest.raises(ValueError, match=said):
        cpref.run_local(run, 1)


def test_a_group_has_one_link_and_it_goes_with_its_block_whatever_happens():
    def run(group):
        with pytest.raises(ValueError, match="has an emulated link already"):  # noqa: SIM117
            with emulated_link(group), emulated_link(group):
                pass
        with pytest.raises(KeyError), emulated_link(group):
            raise KeyError
        return group.watch.link

    assert cpref.run_local(run, 1) == [None]


def test_the_parts_of_a_grid_send_through_one_link():
    def run(group):
        grid = group.grid(2)
        with emulated_link(grid, latency=1) as link:
            return grid.ring.watch.link is link and grid.ulysses.watch.link is link

    assert cpref.run_local(run, 4) == [True] * 4
