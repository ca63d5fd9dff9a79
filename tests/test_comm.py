"""The moves bring what was sent, count it, and start only when all ranks agree."""

import pytest
import torch

import cpref
from cpref.comm import Traffic, as_grid, resolve
from cpref.parcels import Parcels, pack, unpack

from .sharded import attention, draw, judged

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MIB = 1 << 20


def numbers(rank, shape, dtype, to=0):
    """Small whole numbers, exact in every dtype, that tell who sent them to whom."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 17 * rank + 5 * to) % 100).view(shape).to(dtype)


def shifted(group, shape, dtype, hops):
    return group.shift(numbers(group.rank, shape, dtype), hops=hops).wait()


@dtypes
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("hops", [1, 2, -1])
def test_shift_brings_the_block_of_the_rank_some_hops_back(world, dtype, ranks, hops):
    for rank, block in enumerate(world(shifted, ranks, (3, 4), dtype, hops)):
        assert torch.equal(block, numbers((rank - hops) % ranks, (3, 4), dtype))


def shifted_uneven(group, sizes, dtype):
    came = group.shift(
        numbers(group.rank, (sizes[group.rank],), dtype), shape=(sizes[group.source(1)],)
    )
    return came.wait()


@dtypes
@pytest.mark.parametrize("sizes", [[5, 0, 7], [0, 0, 3], [0, 0, 0], [1, 2, 3]])
def test_shift_moves_blocks_of_different_length_and_none(world, dtype, sizes):
    for rank, block in enumerate(world(shifted_uneven, 3, sizes, dtype)):
        assert torch.equal(block, numbers((rank - 1) % 3, (sizes[rank - 1],), dtype))


def gathered(group, shapes, dtype):
    part = numbers(group.rank, shapes[group.rank], dtype)
    return group.all_gather(part, shapes).wait()


SHAPES = {
    "even": [(2, 3)] * 4,
    "uneven": [(2, 1), (2, 4), (2, 3), (2, 2)],
    "some empty": [(2, 0), (2, 4), (2, 0), (2, 1)],
    "all empty": [(0,)] * 4,
}
shapes = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)


@dtypes
@shapes
def test_all_gather_brings_every_part(world, dtype, shapes):
    for parts in world(gathered, 4, shapes, dtype):
        for rank, part in enumerate(parts):
            assert torch.equal(part, numbers(rank, shapes[rank], dtype))


def reduced(group, shapes, dtype):
    parts = [numbers(group.rank, shape, dtype, to) for to, shape in enumerate(shapes)]
    return group.reduce_scatter(parts).wait(), group.reduce_scatter(Parcels.of(parts)).wait()


@dtypes
@shapes
def test_reduce_scatter_adds_up_what_comes_to_each_rank(world, dtype, shapes):
    for rank, both in enumerate(world(reduced, 4, shapes, dtype)):
        total = sum(numbers(source, shapes[rank], torch.int64, rank) for source in range(4))
        for mine in both:
            # why: sums of up to 400 have more bits than bfloat16
            torch.testing.assert_close(mine.double(), total.double(), rtol=8e-3, atol=0)
            assert mine.dtype == dtype


def dealt(group, table, dtype):
    parts = [numbers(group.rank, (table[group.rank][to],), dtype, to) for to in range(group.size)]
    return group.all_to_all(parts, [(table[source][group.rank],) for source in range(group.size)])


def dealt_out(group, table, dtype):
    return dealt(group, table, dtype).wait()


@dtypes
@pytest.mark.parametrize("table", [[[2] * 3] * 3, [[1, 2, 3], [0, 4, 0], [5, 0, 2]], [[0] * 3] * 3])
def test_all_to_all_gives_each_rank_its_own_part(world, dtype, table):
    for rank, parts in enumerate(world(dealt_out, 3, table, dtype)):
        for source, part in enumerate(parts):
            assert torch.equal(part, numbers(source, (table[source][rank],), dtype, rank))


def summed(group, shape):
    return group.all_reduce(numbers(group.rank, shape, torch.float64))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(7, 3), (1,), ()])
def test_all_reduce_gives_every_rank_the_sum(world, ranks, shape):
    total = sum(numbers(rank, shape, torch.float64) for rank in range(ranks))
    assert all(torch.equal(each, total) for each in world(summed, ranks, shape))


def everything_large(group, mebibytes):
    """All four moves with parts that fill no socket buffer, posted before any is waited for."""
    count, sizes = mebibytes * MIB // 4, group.size
    block = torch.full((count,), float(group.rank + 1))
    moves = [
        group.shift(block),
        group.shift(block, hops=2),
        group.all_gather(block),
        group.reduce_scatter([block] * sizes),
        group.all_to_all([block] * sizes, [block.shape] * sizes),
    ]
    near, far, parts, mine, dealt_parts = (move.wait() for move in moves)
    return extremes(near), extremes(far), extremes(*parts), extremes(mine), extremes(*dealt_parts)


def extremes(*parts):
    """The least and the largest number of each part."""
    return [tuple(x.item() for x in part.aminmax()) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [8, 20])
def test_large_blocks_arrive_whole_and_do_not_deadlock(world, mebibytes):
    for rank, (near, far, parts, mine, dealt_parts) in enumerate(
        world(everything_large, 3, mebibytes)
    ):
        assert near == [((rank - 1) % 3 + 1,) * 2]
        assert far == [((rank - 2) % 3 + 1,) * 2]
        assert parts == dealt_parts == [(1, 1), (2, 2), (3, 3)]
        assert mine == [(6, 6)]


def sent_from_views(group):
    whole = numbers(group.rank, (6, 4), torch.float64)
    return (
        group.shift(whole.T).wait(),
        group.all_gather(whole[:, ::2]).wait(),
        group.reduce_scatter([whole.T] * group.size).wait(),
        group.all_to_all([whole[::2]] * group.size, [(3, 4)] * group.size).wait(),
    )


def test_views_are_sent_as_what_they_show(world):
    wholes = [numbers(rank, (6, 4), torch.float64) for rank in range(2)]
    for rank, (block, parts, mine, given) in enumerate(world(sent_from_views, 2)):
        assert torch.equal(block, wholes[1 - rank].T)
        assert torch.equal(torch.stack(parts), torch.stack(wholes)[:, :, ::2])
        assert torch.equal(mine, sum(wholes).T)
        assert torch.equal(torch.stack(given), torch.stack(wholes)[:, ::2])


def waited_twice(group):
    came = group.shift(torch.tensor([float(group.rank)]))
    return came.wait().item(), came.wait().item()


def test_a_move_may_be_waited_for_more_than_once(world):
    assert world(waited_twice, 2) == [(1.0, 1.0), (0.0, 0.0)]


def counted(group):
    """Bytes and messages of each move, with parts of 12 floats."""
    x, sizes, counts = torch.zeros(12), group.size, []
    for move in (
        lambda: group.shift(x),
        lambda: group.shift(x, hops=2),
        lambda: group.shift(x[:0]),
        lambda: group.all_gather(x),
        lambda: group.reduce_scatter([x] * sizes),
        lambda: group.all_to_all([x] * sizes, [x.shape] * sizes),
    ):
        group.traffic.reset()
        move().wait()
        counts.append((group.traffic.bytes, group.traffic.messages))
    group.traffic.reset()
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_rank_counts_what_it_sends(world, ranks):
    once, to_all = (48, 1), (48 * (ranks - 1), ranks - 1)
    two_hops = (0, 0) if ranks in (1, 2) else once
    expected = [once if ranks > 1 else (0, 0), two_hops, (0, 0), *[to_all] * 3]
    assert world(counted, ranks) == [expected] * ranks


def count_of_agreeing(group):
    group.traffic.reset()
    group.agree("a call", lambda: ({"x": 1}, None))
    return group.traffic


def test_agreeing_is_not_counted_as_traffic(world):
    assert world(count_of_agreeing, 3) == [Traffic()] * 3


def test_unpack_gives_back_what_was_packed():
    tensors = [torch.randn(2, 3).T, torch.randn(0, 5), torch.randn(4)]
    back = unpack(pack(*tensors), [t.shape for t in tensors])
    assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))
    assert all(part.is_contiguous() for part in back)


# -- agreeing -------------------------------------------------------------------------------------


def call(group, odd_one_out, change):
    """A call of attention that one rank makes differently; then one that all make alike."""
    options, tensors = {}, draw(seq_len=8)[:3]
    if group.rank == odd_one_out:
        options, tensors = CHANGES[change](*tensors)
    try:
        if options == "another function":
            cpref.unshard(tensors[0], 2, group=group)
        else:
            attention(group, *tensors, **options)
        said = None
    except (ValueError, TypeError) as error:
        said = type(error), str(error)
    out = attention(group, *draw(seq_len=8)[:3])
    return said, cpref.unshard(out, 2, group=group)


def every_second(q_index, kv_index):
    return kv_index % 2 == q_index % 2


def once_more(x, dim):
    return torch.cat([x, x], dim)


CHANGES = {
    "batch": lambda q, k, v: ({}, [once_more(x, 0) for x in (q, k, v)]),
    "heads": lambda q, k, v: ({}, [once_more(q, 1), k, v]),
    "kv_heads": lambda q, k, v: ({}, [q, once_more(k, 1), once_more(v, 1)]),
    "head_dim": lambda q, k, v: ({}, [once_more(q, 3), once_more(k, 3), v]),
    "v_head_dim": lambda q, k, v: ({}, [q, k, once_more(v, 3)]),
    "seq_len": lambda q, k, v: ({}, [once_more(x, 2) for x in (q, k, v)]),
    "dtype": lambda q, k, v: ({}, [x.float() for x in (q, k, v)]),
    "layout": lambda q, k, v: ({"layout": "striped"}, [q, k, v]),
    "mask": lambda q, k, v: ({"mask": cpref.Full()}, [q, k, v]),
    "mask, a function": lambda q, k, v: ({"mask": every_second}, [q, k, v]),
    "strategy": lambda q, k, v: ({"strategy": "all_gather"}, [q, k, v]),
    "scale": lambda q, k, v: ({"scale": 0.5}, [q, k, v]),
    "accumulate": lambda q, k, v: ({"accumulate": "exact"}, [q, k, v]),
    "return_lse": lambda q, k, v: ({"return_lse": True}, [q, k, v]),
    "requires_grad": lambda q, k, v: ({}, [q.requires_grad_(), k, v]),
    "kv_seq_len": lambda q, k, v: ({"mask": cpref.Full()}, [q, k[:, :, :4], v[:, :, :4]]),
    "another function": lambda q, k, v: ("another function", [q, k, v]),
    "shapes that do not fit": lambda q, k, v: ({}, [q, k[:1], v]),
    "an unknown strategy": lambda q, k, v: ({"strategy": "star"}, [q, k, v]),
    "a longer shard": lambda q, k, v: ({"seq_len": 8}, [once_more(q, 2), k, v]),
    "heads that cannot be shared": lambda q, k, v: ({"strategy": "ulysses"}, [q[:, :3], k, v]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("odd_one_out", [0, 2])
def test_a_rank_with_another_call_is_the_same_error_on_all_and_then_all_go_on(
    world, change, odd_one_out
):
    results = world(call, 4, odd_one_out, change)
    said = [message for message, _ in results]
    assert said[0] is not None
    assert all(message == said[0] for message in said), said
    assert f"rank {odd_one_out}" in said[0][1]
    name = change.partition(",")[0]
    if name in ("batch", "heads", "dtype", "layout", "mask", "strategy", "scale", "requires_grad"):
        assert f"{name} is " in said[0][1]
    right = judged(*draw(seq_len=8))[0]
    assert all(torch.allclose(out, right) for _, out in results)


def test_a_disagreement_names_who_has_what():
    with pytest.raises(ValueError) as caught:
        cpref.run_local(
            lambda group: group.agree("f", lambda: ({"x": int(group.rank == 1), "y": 3}, None)), 3
        )
    assert str(caught.value) == (
        "f: ranks disagree: x is 0 on ranks 0, 2, 1 on rank 1; it must be equal on all ranks"
    )


def test_an_error_that_all_ranks_have_is_raised_as_it_was():
    def check():
        raise TypeError("no such thing")

    with pytest.raises(TypeError, match="no such thing"):
        cpref.run_local(lambda group: group.agree("f", check), 3)


# -- groups ---------------------------------------------------------------------------------------


def test_what_is_no_group_is_refused():
    with pytest.raises(TypeError, match="group is str; it must be a ProcessGroup"):
        resolve("world")


def test_hybrid_wants_two_dimensions():
    with pytest.raises(ValueError, match="strategy='hybrid' needs two dimensions"):
        cpref.run_local(as_grid, 4)


def grid_ranks(group, neighbours):
    table = group.grid(neighbours)
    return table.ring.rank, table.ring.size, table.ulysses.rank, table.ulysses.size


def test_a_grid_has_rows_of_neighbours_and_columns_that_are_rings():
    assert cpref.run_local(grid_ranks, 6, 2) == [
        (0, 3, 0, 2),
        (0, 3, 1, 2),
        (1, 3, 0, 2),
        (1, 3, 1, 2),
        (2, 3, 0, 2),
        (2, 3, 1, 2),
    ]


def test_neighbours_must_divide_the_ranks():
    with pytest.raises(ValueError, match="neighbours is 4; it must divide the 6 ranks"):
        cpref.run_local(grid_ranks, 6, 4)
