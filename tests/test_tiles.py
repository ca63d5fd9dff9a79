"""The tile planner: every pair that the mask allows, exactly once, with the cheapest kernels."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpref import Causal, Documents, Full, MaskMod, SlidingWindow
from cpref.layout import LAYOUTS, place
from cpref.matrix import MASKS
from cpref.tiles import Job


def job(mask, seq_len, ranks, layout, kv_seq_len=None):
    return Job(
        q=place(seq_len, ranks, layout),
        kv=place(kv_seq_len or seq_len, ranks, layout),
        mask=mask,
        scale=1.0,
        kv_heads=1,
        dtype=torch.float32,
    )


def drawn(tile) -> np.ndarray:
    """Which pairs of its rows and keys a tile computes."""
    rows, keys = tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start
    if tile.kind == "causal":
        assert rows == keys
        return np.tri(rows, dtype=bool)
    return np.ones((rows, keys), dtype=bool) if tile.kind == "full" else tile.allowed()


def counted(plan: Job) -> np.ndarray:
    """(S, Skv): how often each pair of global positions is computed by all tiles of all ranks."""
    counts = np.zeros((plan.q.seq_len, plan.kv.seq_len), dtype=int)
    for q_shard in range(plan.q.shards):
        for kv_shard in range(plan.kv.shards):
            rows, keys = plan.q.positions(q_shard), plan.kv.positions(kv_shard)
            for tile in plan.tiles(q_shard, kv_shard):
                shape = drawn(tile)
                assert tile.pairs == shape.sum()
                counts[np.ix_(rows[tile.rows], keys[tile.keys])] += shape
    return counts


def allowed(plan: Job) -> np.ndarray:
    rows, keys = torch.arange(plan.q.seq_len)[:, None], torch.arange(plan.kv.seq_len)[None]
    return plan.mask.allowed(rows, keys).numpy()


inners = st.one_of(st.just(Causal()), st.just(Full()), st.builds(SlidingWindow, st.integers(1, 90)))
lengths = st.lists(st.integers(1, 120), min_size=1, max_size=7)


@st.composite
def plans(draw):
    dealt = {"ranks": draw(st.integers(1, 6)), "layout": draw(st.sampled_from(LAYOUTS))}
    if draw(st.booleans()):
        mask = Documents(draw(lengths), draw(inners))
        return job(mask, sum(mask.lengths), **dealt)
    seq_len, kv_seq_len = draw(st.integers(1, 400)), None
    mask = draw(st.one_of(inners, st.just(MaskMod(lambda q, kv: (q * 5 + kv) % 7 < 3))))
    if isinstance(mask, Full | MaskMod):
        kv_seq_len = draw(st.integers(1, 400))
    return job(mask, seq_len, kv_seq_len=kv_seq_len, **dealt)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(plan=plans())
def test_every_allowed_pair_is_computed_exactly_once(plan):
    assert (counted(plan) == allowed(plan)).all()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(plan=plans(), rows=st.integers(1, 3), wide=st.integers(1, 3))
def test_joined_ranks_compute_every_allowed_pair_exactly_once(plan, rows, wide):
    joined = job(
        plan.mask, plan.q.seq_len, rows * wide, plan.q.layout, kv_seq_len=plan.kv.seq_len
    ).join(wide)
    assert (counted(joined) == allowed(joined)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [SlidingWindow(700), Documents([900, 30, 1100, 470]), Causal()])
def test_long_shards_are_cut_without_gap_or_overlap(mask, layout):
    plan = job(mask, 2500, 2, layout)
    assert (counted(plan) == allowed(plan)).all()


def kinds(plan, q_shard, kv_shard):
    return [(tile.kind, tile.rows, tile.keys) for tile in plan.tiles(q_shard, kv_shard)]


def test_causal_zigzag_gives_the_schedule_of_llama_3():
    plan, chunk = job(Causal(), 4 * 128, 2, "zigzag"), 128
    whole, first, second = slice(0, 256), slice(0, chunk), slice(chunk, 256)
    assert kinds(plan, 1, 1) == [("causal", whole, whole)]
    assert kinds(plan, 1, 0) == [("full", whole, first)]
    assert kinds(plan, 0, 1) == [("full", second, whole)]


def test_causal_contiguous_gives_the_diagonal_what_is_before_it_and_nothing_after_it():
    plan, whole = job(Causal(), 512, 4, "contiguous"), slice(0, 128)
    assert kinds(plan, 2, 2) == [("causal", whole, whole)]
    assert kinds(plan, 2, 1) == [("full", whole, whole)]
    assert kinds(plan, 2, 3) == []


def test_causal_striped_gives_triangles_with_and_without_the_diagonal():
    plan, whole = job(Causal(), 512, 4, "striped"), slice(0, 128)
    assert kinds(plan, 2, 1) == [("causal", whole, whole)]
    assert kinds(plan, 2, 2) == [("causal", whole, whole)]
    assert kinds(plan, 2, 3) == [("causal", slice(1, 128), slice(0, 127))]


def work(plan):
    """Pairs that each rank computes."""
    shards = range(plan.q.shards)
    return [sum(t.pairs for kv in shards for t in plan.tiles(q, kv)) for q in shards]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("chunk", [1, 3, 40])
def test_causal_zigzag_gives_every_rank_the_same_work(ranks, chunk):
    seq_len = 2 * ranks * chunk
    pairs = work(job(Causal(), seq_len, ranks, "zigzag"))
    assert pairs == [seq_len * (seq_len + 1) // (2 * ranks)] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_every_step_of_causal_zigzag_after_the_first_has_the_same_work(ranks):
    plan = job(Causal(), 2 * ranks * 24, ranks, "zigzag")
    steps = {
        sum(t.pairs for t in plan.tiles(rank, source))
        for rank in range(ranks)
        for source in range(ranks)
        if source != rank
    }
    assert steps == {2 * 24 * 24}


def test_causal_contiguous_gives_the_last_rank_the_most_work():
    pairs = work(job(Causal(), 512, 4, "contiguous"))
    assert pairs == [128 * 129 // 2 + rank * 128 * 128 for rank in range(4)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", MASKS)
def test_all_ranks_together_do_the_work_of_one(name, ranks, layout):
    mask, kv_seq_len = MASKS[name](257)
    one = work(job(mask, 257, 1, layout, kv_seq_len))
    assert sum(work(job(mask, 257, ranks, layout, kv_seq_len))) == sum(one)


@pytest.mark.parametrize("size", [1, 2, 16, 17, 33, 100])
def test_a_window_over_contiguous_shards_has_no_more_steps_than_it_reaches(size):
    plan = job(SlidingWindow(size), 128, 8, "contiguous")
    assert plan.steps() == tuple(range(min(8, math.ceil((size - 1) / 16) + 1)))


@pytest.mark.parametrize(("size", "empty"), [(1, 12), (2, 9), (3, 9), (16, 6)])
def test_a_tile_that_the_mask_leaves_empty_is_not_planned(size, empty):
    """16 tokens on 4 contiguous ranks: 16 tiles."""
    plan = job(SlidingWindow(size), 16, 4, "contiguous")
    assert sum(plan.tiles(q, kv) == () for q in range(4) for kv in range(4)) == empty


def test_documents_within_the_shards_need_no_step_but_the_first():
    assert job(Documents([4, 4, 4, 4]), 16, 4, "contiguous").steps() == (0,)
    assert job(Documents([3, 5, 8]), 16, 4, "contiguous").steps() == (0, 1)
    assert job(Documents([12, 4]), 16, 4, "contiguous").steps() == (0, 1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_a_step_that_is_left_out_has_no_work_on_any_rank(name, layout):
    mask, kv_seq_len = MASKS[name](64)
    plan = job(mask, 64, 5, layout, kv_seq_len)
    for distance in set(range(5)) - set(plan.steps()):
        assert not any(plan.tiles(rank, (rank - distance) % 5) for rank in range(5))


def test_no_plan_keeps_a_mask_mod_alive():
    """A mask_mod refers to tensors of its batch; a plan that is kept would keep them all."""
    ids = torch.zeros(8)
    mask, placement = MaskMod(lambda q, kv: ids[q] == ids[kv]), place(8, 2, "zigzag")
    assert Job(placement, placement, mask, 1.0, 1, torch.float32).tiles(0, 1)
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


def test_an_empty_shard_has_no_tiles():
    plan = job(Causal(), 2, 4, "contiguous")
    assert plan.tiles(0, 3) == plan.tiles(3, 0) == plan.tiles(3, 3) == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_short_documents_do_not_become_many_tiles(layout):
    """A kernel call for each document would cost more than masking a few together."""
    plan = job(Documents([2] * 512), 1024, 2, layout)
    assert all(len(plan.tiles(q, kv)) <= 16 for q in range(2) for kv in range(2))
