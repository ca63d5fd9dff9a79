"""One timeline of all ranks, whose clocks differ."""

import json
import math
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import cpref
from cpref.measure import timeline as module
from cpref.measure.device_spans import spans_of
from cpref.measure.span import Span, both, length, union, without
from cpref.measure.timeline import Timeline, align, offset_bounds, record_timeline

STRATEGIES = ["ring", "all_gather", "reduce_scatter", "ulysses", "hybrid"]


def attention(group, strategy="ring", now=time.perf_counter):
    torch.manual_seed(group.rank)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 4, 16, 8))
    group = group.grid(2) if strategy == "hybrid" else group
    with record_timeline(group, now=now) as timeline:
        out = cpref.context_parallel_attention(q, k, v, group=group, strategy=strategy)
        out.sum().backward()
    return timeline


def test_every_rank_gets_the_same_timeline_of_all(world):
    first, *others = world(attention, 4)
    assert all(other.spans == first.spans for other in others)
    assert {span.rank for span in first.spans} == {0, 1, 2, 3}
    assert first.spans[0].begin == 0 and first.seconds > 0
    assert all(a.begin <= b.begin for a, b in pairwise(first.spans))


def test_the_ring_computes_its_steps_and_waits_for_what_it_sends():
    spans = cpref.run_local(attention, 4)[0].spans
    for rank in range(4):
        mine = [s for s in spans if s.rank == rank]
        forward = [s.step for s in mine if s.kind == "compute" and "forward" in s.label]
        back = [s.step for s in mine if s.kind == "compute" and "backward" in s.label]
        assert forward == [0, 1, 2, 3] and back == [1, 2, 3, None]
        for kind in ("send", "post", "wait"):
            moves = sorted(s.label for s in mine if s.kind == kind and "ring" in s.label)
            assert moves == sorted(
                [f"ring {way}, step {i} to {i + 1}" for way in ("forward", "backward")
                 for i in range(3)]
                + ["ring dK,dV, step 1 to 2", "ring dK,dV, step 2 to 3", "ring dK,dV, step 3 to 0"]
            )  # fmt: skip


def test_no_rank_waits_while_it_computes_and_a_move_is_under_way_until_its_wait_returns():
    timeline = cpref.run_local(attention, 4)[0]
    for rank in range(4):
        assert not both(timeline.of("wait", rank), timeline.of("compute", rank))
    waits = {(s.rank, s.label): s for s in timeline.spans if s.kind == "wait"}
    for send in (s for s in timeline.spans if s.kind == "send"):
        wait = waits[send.rank, send.label]
        assert send.begin < wait.begin and send.end >= wait.end


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_says_what_it_computes_and_moves(strategy):
    timeline = cpref.run_local(attention, 4, strategy)[0]
    for rank in range(4):
        for kind in ("compute", "send", "wait"):
            assert timeline.of(kind, rank)
    assert 0 < timeline.idle_share() < 1


def test_nothing_is_kept_or_slowed_when_nobody_looks_on():
    def run(group):
        before = group.watch.during("compute", "a tile")
        attention(group)
        return before is group.watch.during("compute", "a tile"), group.watch.recorder

    assert cpref.run_local(run, 2) == [(True, None)] * 2


def test_the_labels_are_in_a_trace_of_torch_profiler():
    def run(group):
        label = "ring forward, step 0"
        with profile(activities=[ProfilerActivity.CPU]) as trace, group.computing(label):
            torch.ones(2).sum()
        return [event.name for event in trace.events()]

    assert "cpref compute: ring forward, step 0" in cpref.run_local(run, 1)[0]


# -- clocks ---------------------------------------------------------------------------------------


def skewed(group):
    """The offset that is found where rank r's clock is r·1000 s ahead, and a span of each rank."""

    def now() -> float:
        return time.perf_counter() + 1000 * group.rank

    ahead, doubt = align(group, now)
    group._exchange(torch.tensor([0]), "meet")
    with record_timeline(group, now=now) as timeline, group.computing("a second's tenth"):
        time.sleep(0.1)
    return ahead, doubt, timeline


def test_clocks_that_differ_are_aligned(world):
    for rank, (ahead, doubt, timeline) in enumerate(world(skewed, 3)):
        assert abs(ahead - 1000 * rank) <= doubt < 60
        assert timeline.seconds < 60
        assert [s.rank for s in timeline.spans if s.end - s.begin >= 0.1] != []


def test_the_bounds_hold_the_truth_and_the_quickest_round_decides():
    # rank 1 is 5 ahead; messages take 2, in the second round 1 to rank 0 and 0.5 to rank 1
    sent = np.array([[0.0, 5.0], [10.0, 15.0]])
    received = np.array([[2.0, 7.0], [11.0, 15.5]])
    assert offset_bounds(sent, received, 1) == (4.0, 5.5)


def test_one_clock_is_not_moved():
    def run(group):
        return align(group, time.perf_counter)[0]

    assert cpref.run_local(run, 4) == [0.0] * 4


# -- shares ---------------------------------------------------------------------------------------


def test_the_shares_of_a_timeline_counted_by_hand():
    timeline = Timeline(
        2,
        [
            Span(0, "compute", "a", 0, 4),
            Span(0, "send", "b", 1, 5),  # 3 of 4 hidden
            Span(0, "send", "c", 4, 6),  # 1 more second, none of it hidden
            Span(1, "compute", "a", 0, 10),
        ],
    )
    assert timeline.seconds == 10
    assert timeline.idle_share(0) == pytest.approx(0.6)
    assert timeline.idle_share() == pytest.approx(0.3)
    assert timeline.overlap_share() == timeline.overlap_share(0) == pytest.approx(3 / 5)
    assert math.isnan(timeline.overlap_share(1))
    with pytest.raises(ValueError, match="rank is 2; it must be from 0 to 1, or None"):
        timeline.idle_share(2)


def test_a_timeline_of_nothing_is_empty():
    def run(group):
        with record_timeline(group) as timeline:
            pass
        return timeline

    timeline = cpref.run_local(run, 2)[0]
    assert timeline.spans == [] and timeline.seconds == 0 and timeline.idle_share() == 0


def test_intervals():
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]
    assert length([(0, 2), (1, 3), (5, 6)]) == 4
    assert both([(0, 2), (4, 6)], [(1, 5)]) == [(1, 2), (4, 5)]
    assert without([(0, 2), (4, 6), (7, 8)], [(1, 5)]) == [(0, 1), (5, 6), (7, 8)]
    assert without([(0, 3)], [(1, 2)]) == [(0, 1), (2, 3)]


# -- the rest -------------------------------------------------------------------------------------


def test_a_trace_has_a_process_for_each_rank_and_every_span(tmp_path):
    timeline = cpref.run_local(attention, 2)[0]
    timeline.save(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"rank 0", "rank 1"}
    for phase, sending in (("X", False), ("b", True), ("e", True)):
        found = [e for e in events if e["ph"] == phase]
        assert len(found) == sum((s.kind == "send") == sending for s in timeline.spans)
    (first, *_) = (e for e in events if e["ph"] == "X")
    (span, *_) = (s for s in timeline.spans if s.kind != "send")
    assert first["name"] == span.label and first["pid"] == span.rank
    assert first["dur"] == pytest.approx(1e6 * (span.end - span.begin))


def test_a_group_is_recorded_once_at_a_time_and_released_by_an_error():
    def run(group):
        again = pytest.raises(ValueError, match="recorded already")
        with record_timeline(group), again, record_timeline(group):
            pass
        with pytest.raises(KeyError), record_timeline(group):
            raise KeyError
        return group.watch.recorder

    assert cpref.run_local(run, 1) == [None]


def event(name, begin, end, device=DeviceType.CUDA, note=False):
    """As torch.autograd.profiler_util.FunctionEvent has it, in microseconds."""
    times = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, time_range=times, device_type=device, is_user_annotation=note)


def test_on_a_gpu_the_kernels_own_times_count():
    events = [
        event("cpref origin", 1000, 1001, DeviceType.CPU),
        event("aten::mm", 1000, 9000, DeviceType.CPU),
        event("cpref compute: ring forward, step 0", 1990, 4010, note=True),
        event("flash_fwd_kernel", 2000, 4000),
        event("ncclDevKernel_SendRecv", 3000, 6000),
        event("Memcpy HtoD (Pageable -> Device)", 3000, 3500),
    ]
    spans = spans_of(events, rank=1, origin=50.0)
    compute, send, wait = spans
    assert compute.kind == "compute" and compute.label == "ring forward, step 0"
    assert compute.begin == pytest.approx(50.001) and compute.end == pytest.approx(50.003)
    assert send.kind == "send" and send.end == pytest.approx(50.005)
    assert wait.kind == "wait" and (wait.begin, wait.end) == (compute.end, send.end)


def test_without_a_gpu_nothing_of_it_is_read():
    def run(group):
        return module._device_spans(group, time.perf_counter)

    assert cpref.run_local(run, 1) == [None]
