import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import cpref
from cpref.measure.memory import measure_memory
from cpref.model import Config, Decoder
from cpref.train import sharded_attention


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
