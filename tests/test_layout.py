"""Where each token lives."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpref
from cpref.layout import LAYOUTS, place

quick = settings(max_examples=60, derandomize=True, deadline=None)
layouts = st.sampled_from(LAYOUTS)


@pytest.mark.parametrize(
    ("layout", "dealt"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("zigzag", [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ("striped", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
    ],
)
def test_sixteen_tokens_on_four_ranks(layout, dealt):
    placement = place(16, 4, layout)
    assert [placement.positions(rank).tolist() for rank in range(4)] == dealt


@pytest.mark.parametrize(("seq_len", "ranks"), [(17, 4), (10, 4), (2, 2), (1, 4), (3, 8)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_that_do_not_divide_are_dealt_out_evenly(seq_len, ranks, layout):
    lengths = place(seq_len, ranks, layout).lengths()
    assert sum(lengths) == seq_len
    assert max(lengths) - min(lengths) <= 1


@quick
@given(seq_len=st.integers(1, 400), ranks=st.integers(1, 9), layout=layouts)
def test_every_position_is_on_exactly_one_rank(seq_len, ranks, layout):
    placement = place(seq_len, ranks, layout)
    positions = [placement.positions(rank).tolist() for rank in range(ranks)]
    assert sorted(chain(*positions)) == list(range(seq_len))
    assert all(dealt == sorted(dealt) for dealt in positions)
    assert max(map(len, positions)) - min(map(len, positions)) <= 1


@quick
@given(seq_len=st.integers(1, 100), rows=st.integers(1, 4), wide=st.integers(1, 4), layout=layouts)
def test_joined_ranks_hold_what_each_of_them_holds(seq_len, rows, wide, layout):
    placement = place(seq_len, rows * wide, layout)
    for row, joined in enumerate(map(placement.join(wide).positions, range(rows))):
        single = [placement.positions(row * wide + i).tolist() for i in range(wide)]
        assert joined.tolist() == sorted(chain(*single))


def test_a_placement_cannot_be_written_to_by_one_of_its_readers():
    with pytest.raises(ValueError, match="read-only"):
        place(8, 2, "zigzag").positions(0)[0] = 5


def positions(group, seq_len, layout):
    return cpref.local_positions(seq_len, group=group, layout=layout)


def test_local_positions_are_global_indices(world):
    dealt = world(positions, 2, 8, "zigzag")
    assert [p.tolist() for p in dealt] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert all(p.dtype == torch.int64 for p in dealt)
    assert [p.tolist() for p in world(positions, 4, 1, "contiguous")] == [[0], [], [], []]


def there_and_back(group, shape, dim, layout, dtype):
    x = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    part = cpref.shard(x, dim, group=group, layout=layout)
    whole = cpref.unshard(part, dim, group=group, layout=layout, seq_len=shape[dim])
    return part.shape[dim], whole.dtype == dtype and torch.equal(whole, x)


@quick
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    dim=st.integers(0, 3),
    ranks=st.integers(1, 6),
    layout=layouts,
    from_the_end=st.booleans(),
)
def test_unshard_is_the_inverse_of_shard(shape, dim, ranks, layout, from_the_end):
    dim = dim % len(shape) - (len(shape) if from_the_end else 0)
    results = cpref.run_local(there_and_back, ranks, shape, dim, layout, torch.int64)
    assert all(equal for _, equal in results)
    assert sum(length for length, _ in results) == shape[dim]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize(("shape", "dim"), [((17, 3), 0), ((2, 10, 3), 1), ((1, 2, 1), -1)])
def test_unshard_gives_every_rank_the_whole(world, layout, dtype, shape, dim):
    assert all(equal for _, equal in world(there_and_back, 4, shape, dim, layout, dtype))


def gradient_of_shard(group):
    x = torch.arange(10.0, requires_grad=True)
    part = cpref.shard(x, 0, group=group)
    (part * (group.rank + 1)).sum().backward()
    return x.grad


def test_the_gradient_of_shard_is_zero_where_others_hold_the_tokens(world):
    grads = world(gradient_of_shard, 3)
    for rank, grad in enumerate(grads):
        expected = torch.zeros(10)
        expected[torch.tensor(place(10, 3, "zigzag").positions(rank))] = rank + 1.0
        assert torch.equal(grad, expected)


def gradient_of_unshard(group, layout):
    part = cpref.shard(torch.zeros(10, 3), 0, group=group, layout=layout).requires_grad_()
    whole = cpref.unshard(part, 0, group=group, layout=layout, seq_len=10)
    weights = torch.arange(30.0).view(10, 3) * (group.rank + 1)
    (whole * weights).sum().backward()
    return part.grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_unshard_sums_what_all_ranks_ask_for(world, layout):
    grads = world(gradient_of_unshard, 4, layout)
    summed = torch.arange(30.0).view(10, 3) * (1 + 2 + 3 + 4)
    for rank, grad in enumerate(grads):
        assert torch.equal(grad, summed[torch.tensor(place(10, 4, layout).positions(rank))])


def too_long_on_rank_one(group):
    part = torch.zeros(2 + (group.rank == 1))
    try:
        cpref.unshard(part, 0, group=group, seq_len=8)
    except ValueError as error:
        return str(error)


def test_a_part_of_the_wrong_length_is_an_error_on_every_rank(world):
    said = world(too_long_on_rank_one, 4)
    assert all("x has 3 tokens on rank 1" in message for message in said), said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, "zig-zag"), "layout is 'zig-zag'; it must be one of contiguous, zigzag, striped"),
        ((0, "zigzag"), "seq_len is 0; it must be a whole number of at least 1"),
        ((-3, "zigzag"), "seq_len is -3"),
        ((2.5, "zigzag"), "seq_len is 2.5"),
        ((True, "zigzag"), "seq_len is True"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cpref.run_local(positions, 2, *arguments)


def test_a_dimension_that_is_not_there_is_an_index_error():
    with pytest.raises(IndexError):
        cpref.run_local(lambda group: cpref.shard(torch.zeros(4), 1, group=group), 2)
    with pytest.raises(IndexError):
        cpref.run_local(lambda group: cpref.unshard(torch.zeros(4), 1, group=group), 2)


def test_an_empty_dimension_is_refused():
    with pytest.raises(ValueError, match="seq_len is 0"):
        cpref.run_local(lambda group: cpref.shard(torch.zeros(2, 0), 1, group=group), 2)


def test_without_ranks_the_way_to_get_some_is_named():
    with pytest.raises(ValueError, match=r"cpref\.init"):
        cpref.local_positions(8)
