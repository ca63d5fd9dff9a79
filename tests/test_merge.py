"""Joining partials by their log-sum-exp."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpref.merge import (
    Partial,
    accumulator_dtype,
    join_lse,
    merge,
    merge_into,
    weight_in,
)

B, H, S, D = 2, 3, 4, 5


def partial_over(scores, values):
    """The partial of (..., K) scores over (..., K, D) values, by its definition."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    return Partial((weights.unsqueeze(-2) @ values).squeeze(-2), lse)


def random_scores(keys, spread=3.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(B, H, S, keys, generator=draw, dtype=torch.float64)
    return scores, torch.randn(B, H, S, keys, D, generator=draw, dtype=torch.float64)


def same(one: Partial, other: Partial, largest_score=10.0):
    # why: the lse is rounded relative to its own size, and weights are exponentials of differences
    close = 64 * torch.finfo(torch.float64).eps * max(1.0, largest_score)
    torch.testing.assert_close(one.out, other.out, rtol=close, atol=close)
    torch.testing.assert_close(one.lse, other.lse, rtol=close, atol=close)


def empty():
    return Partial.empty(torch.empty(B, H, S, D, dtype=torch.float64))


# Scores of three shards of keys; -inf is a key that the row does not see.
scores_of_shard = st.lists(
    st.one_of(st.floats(-1e4, 1e4), st.just(-torch.inf)), min_size=1, max_size=4
)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(shards=st.lists(scores_of_shard, min_size=3, max_size=3))
def test_merging_shards_in_any_order_gives_attention_over_all(shards):
    parts, all_scores, all_values = [], [], []
    for seed, scores in enumerate(shards):
        draw = torch.Generator().manual_seed(seed)
        row = torch.tensor(scores, dtype=torch.float64).view(1, 1, 1, -1)
        values = torch.randn(*row.shape, D, generator=draw, dtype=torch.float64)
        parts.append(partial_over(row, values))
        all_scores.append(row)
        all_values.append(values)
    whole = partial_over(torch.cat(all_scores, -1), torch.cat(all_values, -2))
    largest = max((abs(x) for scores in shards for x in scores if x != -torch.inf), default=0)
    for a, b, c in itertools.permutations(parts):
        same(merge(merge(a, b), c), whole, largest)
        same(merge(a, merge(b, c)), whole, largest)


def test_the_empty_partial_is_neutral_first_and_last():
    part = partial_over(*random_scores(7))
    same(merge(empty(), part), part)
    same(merge(part, empty()), part)
    same(merge(merge(empty(), empty()), part), part)
    same(merge(merge(part, empty()), empty()), part)


def test_two_empty_partials_make_an_empty_one():
    nothing = merge(empty(), empty())
    assert (nothing.out == 0).all()
    assert (nothing.lse == -torch.inf).all()


def test_rows_that_see_nothing_do_not_disturb_the_others():
    scores, values = random_scores(6)
    scores[:, :, 1] = -torch.inf
    scores[:, :, 2, :3] = -torch.inf
    parts = [partial_over(scores[..., k], values[..., k, :]) for k in (slice(3), slice(3, 6))]
    merged = merge(*parts)
    same(merged, partial_over(scores, values))
    assert (merged.lse[:, :, 1] == -torch.inf).all()


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wide_gap_between_two_lse_neither_overflows_nor_is_nan(gap, dtype):
    scores, values = random_scores(4)
    one = partial_over(scores.to(dtype), values.to(dtype))
    other = Partial(one.out + 1, one.lse + gap)
    larger = other if gap > 0 else one
    merged = merge(one, other)
    torch.testing.assert_close(merged.out, larger.out)
    torch.testing.assert_close(merged.lse, larger.lse)


def test_merge_into_writes_only_the_rows_it_is_given():
    scores, values = random_scores(8)
    parts = [partial_over(scores[..., k], values[..., k, :]) for k in (slice(3), slice(3, 8))]
    total, rows = Partial(parts[0].out.clone(), parts[0].lse.clone()), slice(1, 3)
    merge_into(total.rows(rows), parts[1].rows(rows))
    same(total.rows(rows), partial_over(scores, values).rows(rows))
    same(total.rows(slice(0, 1)), parts[0].rows(slice(0, 1)))
    same(total.rows(slice(3, 4)), parts[0].rows(slice(3, 4)))


def test_half_an_lse_of_a_batch_is_not_contiguous_and_merges_all_the_same():
    scores, values = random_scores(8)
    parts = [partial_over(scores[..., k], values[..., k, :]) for k in (slice(3), slice(3, 8))]
    halves = [part.rows(slice(S // 2, S)) for part in parts]
    assert not halves[0].lse.is_contiguous()
    same(merge(*halves), partial_over(scores, values).rows(slice(S // 2, S)))


def test_weighted_partials_add_up_to_the_whole():
    """What the reduce-scatter strategy does instead of merging one by one."""
    scores, values = random_scores(9)
    scores[:, :, 0] = -torch.inf
    scores[:, :, 1, :3] = -torch.inf
    parts = [
        partial_over(scores[..., i : i + 3], values[..., i : i + 3, :]) for i in range(0, 9, 3)
    ]
    whole, total = partial_over(scores, values), join_lse([part.lse for part in parts])
    torch.testing.assert_close(total, whole.lse)
    out = sum(part.out * weight_in(part.lse, total).unsqueeze(-1) for part in parts)
    torch.testing.assert_close(out, whole.out)


def test_the_share_of_an_empty_partial_is_zero_even_in_an_empty_whole():
    nothing = torch.tensor([-torch.inf, -torch.inf, 2.0])
    assert weight_in(nothing, torch.tensor([1.0, -torch.inf, 2.0])).tolist() == [0, 0, 1]
    assert join_lse([nothing, nothing])[0] == -torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_kept_in_float32(dtype):
    assert accumulator_dtype(dtype) == torch.float32


def test_sums_of_float64_are_kept_in_float64():
    assert accumulator_dtype(torch.float64) == torch.float64
