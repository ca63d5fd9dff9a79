import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cpref
from cpref.measure.cost import (
    Sent,
    Shape,
    backward_flops,
    backward_sent,
    forward_flops,
    forward_sent,
)


def counted(group, shape, dtype, strategy, layout):
    """What one rank sends in forward and in backward of one attention of that shape."""
    where = group.grid(shape.neighbours) if strategy == "hybrid" else group
    dims = [(shape.heads, 16), (shape.kv_heads, 16), (shape.kv_heads, shape.v_head_dim)]
    q, k, v = (
        torch.randn(2, heads, shape.local, dim, dtype=dtype, requires_grad=True)
        for heads, dim in dims
    )
    out = cpref.context_parallel_attention(q, k, v, group=where, strategy=strategy, layout=layout)
    forward = Sent(group.traffic.bytes, group.traffic.messages)
    group.traffic.reset()
    out.backward(torch.randn_like(out))
    return forward, Sent(group.traffic.bytes, group.traffic.messages)


STRATEGIES = ["ring", "all_gather", "reduce_scatter", "ulysses"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("kv_heads", "v_head_dim"), [(8, 16), (2, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_counted_is_what_the_formulas_say(
    strategy, layout, dtype, kv_heads, v_head_dim, ranks
):
    shape = Shape(2, 64, 8, kv_heads, 16, ranks, dtype.itemsize, v_head_dim)
    for forward, backward in cpref.run_local(counted, ranks, shape, dtype, strategy, layout):
        assert forward == forward_sent(strategy, shape)
        assert backward == backward_sent(strategy, shape)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "neighbours"), [(4, 1), (4, 2), (4, 4), (6, 2), (8, 4)])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_hybrid_sends_what_its_row_and_its_ring_send(dtype, kv_heads, ranks, neighbours):
    shape = Shape(2, 96, 8, kv_heads, 16, ranks, dtype.itemsize, 24, neighbours)
    for forward, backward in cpref.run_local(counted, ranks, shape, dtype, "hybrid", "zigzag"):
        assert forward == forward_sent("hybrid", shape)
        assert backward == backward_sent("hybrid", shape)


def test_one_rank_sends_nothing():
    shape = Shape(2, 64, 8, 4, 16, 1, 2)
    for strategy in STRATEGIES:
        assert forward_sent(strategy, shape) + backward_sent(strategy, shape) == Sent(0, 0)


def test_few_kv_heads_make_the_ring_cheaper_than_ulysses():
    """As algorithms say: where H / Hkv is above P - 1."""
    many, few = Shape(1, 64, 8, 8, 16, 4, 2), Shape(1, 64, 8, 1, 16, 4, 2)
    assert forward_sent("ring", many).bytes > forward_sent("ulysses", many).bytes
    assert forward_sent("ring", few).bytes < forward_sent("ulysses", few).bytes


def test_flops_of_a_pair_are_four_head_dims_forward_and_two_and_a_half_times_that_backward():
    shape = Shape(2, 64, 8, 2, 16, 4, 2)
    pairs = 64 * 65 // 2
    assert forward_flops(shape, pairs) == 4 * 2 * 8 * 16 * pairs
    assert backward_flops(shape, pairs) == 2.5 * forward_flops(shape, pairs)


def test_flops_are_those_that_torch_counts():
    """Of the products of a plain attention, unmasked, with a v of its own width."""
    shape = Shape(2, 32, 4, 4, 16, 1, 4, v_head_dim=24)
    q, k = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 4, 32, 24, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = (q @ k.mT).softmax(-1) @ v
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == forward_flops(shape, 32 * 32)
    again = 2 * 2 * 4 * 16 * 32 * 32  # the scores, which a flash kernel computes once more
    assert backward.get_total_flops() + again == backward_flops(shape, 32 * 32)
