import pytest
import torch
import torch.nn.functional as F

import cpref
from cpref.data import document, sequences
from cpref.model import Config, Decoder
from cpref.train import loss_of, sharded_attention, sum_gradients, train

CONFIG = Config(layers=2, width=32, heads=4, kv_heads=2, hidden=48)


def losses(group, strategy="ring", layout="zigzag", seq_len=96):
    options = {"seq_len": seq_len, "steps": 4, "config": CONFIG, "dtype": torch.float64}
    steps = train(document(), group=group, strategy=strategy, layout=layout, **options)
    return [step.loss for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "reduce_scatter", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_training_on_several_ranks_is_training_on_one(strategy, layout):
    alone = cpref.run_local(losses, 1)[0]
    for together in cpref.run_local(losses, 4, strategy, layout):
        assert together == pytest.approx(alone, rel=1e-9)
    assert alone[-1] < alone[0]


def test_a_group_of_one_rank_is_plain_training():
    """Written out with torch alone."""
    model = Decoder(CONFIG).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plain = []
    for _, tokens in zip(range(4), sequences(document(), 96), strict=False):
        logits = model(tokens, torch.arange(96))
        loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    assert cpref.run_local(losses, 1)[0] == pytest.approx(plain, rel=1e-12)


def test_training_takes_lengths_that_no_rank_count_divides():
    alone = cpref.run_local(lambda group: losses(group, seq_len=97), 1)[0]
    for together in cpref.run_local(lambda group: losses(group, seq_len=97), 3):
        assert together == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 3])
def test_summed_gradients_are_those_of_one_rank(ranks):
    tokens = next(sequences(document(), 50, batch=2))

    def gradients(group):
        model = Decoder(CONFIG).double()
        attention = sharded_attention(group, "ring", "zigzag", 50)
        loss_of(model, tokens, attention, group, "zigzag").backward()
        sum_gradients(model, group)
        return {name: p.grad for name, p in model.named_parameters()}

    exact = cpref.run_local(gradients, 1)[0]
    for got in cpref.run_local(gradients, ranks):
        for name, grad in exact.items():
            assert ((got[name] - grad).norm() / grad.norm()).item() < 1e-12, name


def test_evaluation_without_gradients_has_the_loss_of_one_rank():
    tokens = next(sequences(document(), 40))

    @torch.no_grad()
    def loss(group):
        model = Decoder(CONFIG).double()
        attention = sharded_attention(group, "ring", "zigzag", 40)
        return loss_of(model, tokens, attention, group, "zigzag").item()

    alone = cpref.run_local(loss, 1)
    assert cpref.run_local(loss, 4) == pytest.approx(alone * 4, rel=1e-12)


def test_tokens_per_second_are_those_of_the_global_sequence(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("cpref.train.time.perf_counter", lambda: next(clock))
    options = {"seq_len": 64, "steps": 1, "config": CONFIG, "batch": 2}
    (step,) = cpref.run_local(lambda g: list(train(document(), group=g, **options)), 1)[0]
    assert step.tokens_per_second == 2 * 64
