import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import cpref
from cpref.measure.memory import measure_memory
from cpref.model import Config, Decoder
from cpref.train import loss_of, sharded_attention

pytestmark = pytest.mark.slow


def by_hand(config: Config, seq_len: int, bytes_each: int = 4) -> int:
    """Bytes that one sequence of `seq_len` tokens saves, written down operation by operation."""
    width, hidden = config.width, config.hidden
    kv_width = config.kv_heads * config.head_dim
    norm = 2 * width + 1  # its input, the input divided by its size, and that size
    mixer = width + width + kv_width + kv_width + width + width
    # input of q, k, v; rotated q and k; v; out; input of the output projection (out transposed)
    feed_forward = width + 4 * hidden  # its input; gate, silu(gate), up, their product
    lse = config.heads
    layer = 2 * norm + mixer + lse + feed_forward
    per_token = config.layers * layer + norm + width  # final norm, input of the head
    angles = config.head_dim  # a cosine and a sine for each pair of features
    return seq_len * (per_token + angles) * bytes_each + seq_len * 8  # tokens, for the embedding


def saved_bytes(group, seq_len, config):
    model = Decoder(config)
    positions = cpref.local_positions(seq_len, group=group)
    attention = sharded_attention(group, "ring", "zigzag", seq_len)
    tokens = cpref.shard(torch.arange(seq_len).view(1, -1) % config.vocab, 1, group=group)
    with measure_memory(model.parameters()) as memory:
        model(tokens, positions, attention).sum()
    return memory.saved_bytes


def test_a_storage_is_counted_once_and_parameters_not_at_all():
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    with measure_memory([weight]) as memory:
        F.silu(x @ weight) * (x[:2] @ weight).sum()
    once = x.nbytes  # saved by both products
    silu_input, factors = 4 * 8 * 4, 4 * 8 * 4 + 4
    assert memory.saved_bytes == once + silu_input + factors


def test_what_was_saved_is_freed_with_its_graph_also_without_a_backward():
    gc.disable()
    try:
        with measure_memory():
            y = torch.randn(8, requires_grad=True).exp()  # saves its own result
        result = weakref.ref(y)
        del y
        assert result() is None
    finally:
        gc.enable()


def test_measuring_changes_no_gradient_of_any_order():
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def derivatives(x):
        y = (x.exp() * x.sigmoid()).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return first, *torch.autograd.grad((first**2).sum(), x)

    plain = derivatives(x)
    with measure_memory():
        measured = derivatives(x)
    for a, b in zip(plain, measured, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_saves_its_share(ranks):
    config = Config()
    alone = cpref.run_local(saved_bytes, 1, 256, config)[0]
    for together in cpref.run_local(saved_bytes, ranks, 256, config):
        assert together * ranks == alone


@pytest.mark.parametrize("seq_len", [256, 1024])
def test_the_decoder_saves_what_a_hand_count_says(seq_len):
    config = Config()
    measured = cpref.run_local(saved_bytes, 1, seq_len, config)[0]
    assert measured == by_hand(config, seq_len)


def test_a_saved_storage_may_have_the_address_of_one_that_is_gone():
    x = torch.randn(1000, requires_grad=True)
    with measure_memory() as memory:
        for _ in range(5):
            x.exp()  # saves its result, which is gone at once
    assert memory.saved_bytes == 5 * 4000


def one_step(group, seq_len, config, recompute=False):
    """The memory of one step of training, of this rank."""
    model = Decoder(config, recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    attention = sharded_attention(group, "ring", "zigzag", seq_len)
    tokens = torch.arange(seq_len).view(1, -1) % config.vocab
    with measure_memory(model, optimizer) as memory:
        loss_of(model, tokens, attention, group, "zigzag").backward()
        optimizer.step()
    return memory


def test_what_is_saved_is_told_apart_by_module():
    config, seq_len = Config(), 256
    memory = cpref.run_local(one_step, 1, seq_len, config)[0]
    saved = memory.saved_by_module
    assert sum(saved.values()) == memory.saved_bytes
    for block in ("blocks.0", "blocks.1"):
        assert saved[f"{block}.feed_forward.gate"] == seq_len * config.width * 4  # its input
        assert saved[f"{block}.feed_forward"] == seq_len * 3 * config.hidden * 4
    assert saved["head"] == seq_len * config.width * 4
    assert "embedding" in saved and not any("rotary" in name for name in saved)


def test_parameters_gradients_and_optimizer_state_are_counted_apart():
    config = Config()
    parameters = sum(p.numel() for p in Decoder(config).parameters()) * 4
    for ranks in (1, 2):
        memory = cpref.run_local(one_step, ranks, 256, config)[0]
        assert memory.parameter_bytes == memory.gradient_bytes == parameters
        steps = 4 * len(list(Decoder(config).parameters()))
        assert memory.optimizer_bytes == 2 * parameters + steps
    assert memory.allocator_peak_bytes is None or torch.cuda.is_available()


def test_each_pass_has_its_peak():
    x = torch.randn(1000, requires_grad=True)
    with measure_memory() as memory:
        y = x.exp().sin().sum()  # exp's result, sin's result, of which the second goes
        y.backward()
    assert memory.forward_peak_bytes == 8000 + 4
    assert memory.backward_peak_bytes > 8000
    assert memory.peak_bytes == max(memory.forward_peak_bytes, memory.backward_peak_bytes)


def test_recomputing_keeps_the_input_of_each_block():
    config, seq_len = Config(layers=8), 512
    kept, again = (cpref.run_local(one_step, 2, seq_len, config, r)[0] for r in (False, True))
    inputs = config.layers * config.width
    others = 3 * config.width + 1 + config.vocab + config.head_dim  # norm, head, loss, angles
    labels = 2 * 8 + 8  # tokens, labels and their count
    expected = seq_len // 2 * ((inputs + others) * 4 + labels)
    assert again.saved_bytes == pytest.approx(expected, rel=0.02)
    assert again.forward_peak_bytes < 0.5 * kept.forward_peak_bytes
    assert again.peak_bytes < kept.peak_bytes


@pytest.mark.parametrize("seq_len", [1024, 4096])
def test_the_peak_of_a_step_is_what_a_hand_count_says(seq_len):
    """It comes as backward begins: all that was saved is there, and the logits have gradients."""
    config = Config()
    logits = seq_len * config.vocab * 4
    loss = logits + 2 * seq_len * 8  # their logarithms of the softmax; labels, tokens
    gradients = 2 * logits  # of the logarithms, and of the logits
    memory = cpref.run_local(one_step, 1, seq_len, config)[0]
    expected = by_hand(config, seq_len) + loss + gradients
    assert memory.backward_peak_bytes == pytest.approx(expected, rel=0.02)
