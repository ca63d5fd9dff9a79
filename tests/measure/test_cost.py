import pytest
import torch

import cpref
from cpref.measure.cost import Sent, Shape, backward_sent, forward_sent

STRATEGIES = ["ring", "all_gather", "reduce_scatter", "ulysses"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("v_head_dim", [16, 24])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_counted_is_what_the_formulas_say(
    strategy, layout, dtype, kv_heads, v_head_dim, ranks
):
    shape = Shape(2, 64, 8, kv_heads, 16, ranks, dtype.itemsize, v_head_dim)

    def fn(group):
        dims = [(8, 16), (kv_heads, 16), (kv_heads, v_head_dim)]
        q, k, v = (
            torch.randn(2, h, shape.local, d, dtype=dtype, requires_grad=True) for h, d in dims
        )
        out = cpref.context_parallel_attention(
            q, k, v, group=group, strategy=strategy, layout=layout
        )
        forward = Sent(group.traffic.bytes, group.traffic.messages)
        group.traffic.reset()
        out.backward(torch.randn_like(out))
        return forward, Sent(group.traffic.bytes, group.traffic.messages)

    for forward, backward in cpref.run_local(fn, ranks):
        assert forward == forward_sent(strategy, shape)
        assert backward == backward_sent(strategy, shape)


def test_one_rank_sends_nothing():
    shape = Shape(2, 64, 8, 4, 16, 1, 2)
    for strategy in STRATEGIES:
        assert forward_sent(strategy, shape) + backward_sent(strategy, shape) == Sent(0, 0)


def test_few_kv_heads_make_the_ring_cheaper_than_ulysses():
    """As algorithms say: where H / Hkv is above P - 1."""
    many, few = Shape(1, 64, 8, 8, 16, 4, 2), Shape(1, 64, 8, 1, 16, 4, 2)
    assert forward_sent("ring", many).bytes > forward_sent("ulysses", many).bytes
    assert forward_sent("ring", few).bytes < forward_sent("ulysses", few).bytes
