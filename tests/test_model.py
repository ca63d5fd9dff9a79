import pytest
import torch

import cpref
from cpref.model import Config, Decoder, rotary, rotate
from cpref.train import sharded_attention

CONFIG = Config(vocab=32, layers=2, width=32, heads=4, kv_heads=2, hidden=48)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("seq_len", [24, 17])
def test_the_sharded_decoder_gives_the_logits_of_the_whole_one(strategy, layout, seq_len):
    model = Decoder(CONFIG).double()
    tokens = torch.arange(2 * seq_len).view(2, seq_len) % 32
    exact = model(tokens, torch.arange(seq_len))

    def fn(group):
        positions = cpref.local_positions(seq_len, group=group, layout=layout)
        attention = sharded_attention(group, strategy, layout, seq_len)
        mine = cpref.shard(tokens, 1, group=group, layout=layout)
        logits = model(mine, positions, attention)
        return cpref.unshard(logits, 1, group=group, layout=layout, seq_len=seq_len)

    for logits in cpref.run_local(fn, 3):
        assert ((logits - exact).norm() / exact.norm()).item() < 1e-13


def test_rotation_depends_only_on_the_distance_of_two_positions():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(at, other):
        turned = rotate(q, rotary(torch.tensor([at]), 16))
        return (turned * rotate(k, rotary(torch.tensor([other]), 16))).sum()

    assert torch.allclose(score(7, 3), score(1_000_007, 1_000_003), rtol=1e-5)
    assert not torch.allclose(score(7, 3), score(7, 4), rtol=1e-2)


def test_a_local_arange_as_positions_is_wrong_on_every_rank_but_the_first():
    model = Decoder(CONFIG).double()
    tokens = torch.arange(24).view(1, 24) % 32
    exact = model(tokens, torch.arange(24))

    def fn(group):
        attention = sharded_attention(group, "ring", "contiguous", 24)
        mine = cpref.shard(tokens, 1, group=group, layout="contiguous")
        return model(mine, torch.arange(mine.shape[1]), attention)

    parts = cpref.run_local(fn, 3)
    wrong = [
        ((p - e).norm() / e.norm()).item() for p, e in zip(parts, exact.chunk(3, 1), strict=True)
    ]
    assert wrong[0] < 1e-13
    assert min(wrong[1:]) > 1e-6


def test_positions_of_packed_documents_may_restart_and_differ_in_the_batch():
    model = Decoder(CONFIG).double()
    tokens = torch.arange(8).view(1, 8)
    restarted = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    documents = cpref.Documents([5, 3])
    both = cpref.run_local(
        lambda group: model(
            tokens,
            restarted,
            lambda q, k, v: cpref.context_parallel_attention(q, k, v, group=group, mask=documents),
        ),
        1,
    )[0]
    alone = [model(part, torch.arange(part.shape[1])) for part in tokens.split([5, 3], 1)]
    assert torch.allclose(both, torch.cat(alone, 1), atol=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"width": 30, "heads": 4}, {"heads": 4, "kv_heads": 3}, {"width": 12, "heads": 4}]
)
def test_a_shape_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="head"):
        Decoder(Config(**wrong))


def test_recomputing_changes_no_gradient():
    tokens = torch.arange(32).view(1, -1)

    def gradients(group, recompute):
        model = Decoder(Config(), recompute=recompute)
        mine = cpref.shard(tokens, 1, group=group)
        attention = sharded_attention(group, "ring", "zigzag", 32)
        model(mine, cpref.local_positions(32, group=group), attention).square().mean().backward()
        return [p.grad for p in model.parameters()]

    kept, again = (cpref.run_local(gradients, 2, recompute) for recompute in (False, True))
    for a, b in zip(kept, again, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)
