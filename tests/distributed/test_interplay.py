"""Attention over shards inside of what else a training script uses, on real ranks."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import cpref
from cpref.comm import Group

pytestmark = pytest.mark.distributed

S, WIDTH, HEADS = 22, 32, 4


class Layer(nn.Module):
    """Attention as a user writes it. sharded: by cpref's call; else by torch's own."""

    def __init__(self, *, sharded: bool):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.sharded = sharded
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=draw)

    def forward(self, x):
        qkv = self.inputs(x).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # views of one packed projection
        if self.sharded:
            out = cpref.context_parallel_attention(q, k, v, seq_len=S)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(out.transpose(1, 2).flatten(2)).relu()


def sequence(dtype=torch.float64):
    return torch.randn(2, S, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def one_rank(dtype=torch.float64):
    """The output and the gradient of the first weight, of the whole sequence on one process."""
    layer, x = Layer(sharded=False).to(dtype), sequence(dtype)
    out = layer(x)
    out.square().sum().backward()
    return out.detach(), layer.inputs.weight.grad


def compared(layer, group: Group, forward, dtype=torch.float64) -> list[float]:
    """Relative errors of the output and of the first weight's gradient, summed over the ranks."""
    out = forward(cpref.shard(sequence(dtype), 1, group=group))
    out.square().sum().backward()
    whole = cpref.unshard(out.detach(), 1, group=group, seq_len=S)
    grad = layer.inputs.weight.grad
    grad = (
        grad.full_tensor() * group.size if hasattr(grad, "full_tensor") else group.all_reduce(grad)
    )
    exact = one_rank(dtype)
    return [((a - b).norm() / b.norm()).item() for a, b in zip((whole, grad), exact, strict=True)]


def compiled(group, backend, sharded):
    torch._dynamo.reset()
    layer = Layer(sharded=sharded).double()
    fast = torch.compile(layer, backend=backend)
    if sharded:
        return compared(layer, group, fast)

    def forward(x):
        whole = sequence()
        with cpref.context_parallel(None, buffers=[whole], buffer_seq_dims=[1]):
            return fast(x)

    return compared(layer, group, forward)


@pytest.mark.parametrize("sharded", [True, False], ids=["the call", "the context"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_surrounding_model_may_be_compiled(processes, backend, sharded):
    for errors in processes(2)(compiled, backend, sharded):
        assert max(errors) < 1e-13


class Embedded(nn.Module):
    """Tokens, a table of positions as a buffer, and PyTorch's own attention module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(S, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.register_buffer("table", torch.arange(S * WIDTH).view(S, WIDTH).cos())

    def forward(self, tokens):
        x = self.embedding(tokens) * self.table
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def compiled_with_buffers(group, backend):
    torch._dynamo.reset()
    model = Embedded().double()
    fast, tokens = torch.compile(model, backend=backend), torch.arange(S)[None]
    exact = fast(tokens)  # compiled for the whole sequence first, without the context
    (whole_grad,) = torch.autograd.grad(exact.square().sum(), model.embedding.weight)
    with cpref.context_parallel(
        None, buffers=[tokens, model.table], buffer_seq_dims=[1, 0], no_restore_buffers={tokens}
    ):
        out = fast(tokens)
    out.square().sum().backward()
    grad = group.all_reduce(model.embedding.weight.grad)
    whole = cpref.unshard(out.detach(), 1, group=group, seq_len=S)
    pairs = (whole, exact.detach()), (grad, whole_grad)
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_may_have_buffers_of_the_context(processes, backend):
    for errors in processes(2)(compiled_with_buffers, backend):
        assert max(errors) < 1e-13


def fully_sharded(group):
    layer = Layer(sharded=True).double()
    fully_shard(layer, mesh=init_device_mesh("cpu", (group.size,)))
    return compared(layer, group, layer)


def test_parameters_may_be_sharded_over_the_same_ranks(processes):
    for errors in processes(2)(fully_sharded):
        assert max(errors) < 1e-13


def checkpointed(group, use_reentrant):
    layer = Layer(sharded=True).double()

    def forward(x):
        x = x.requires_grad_()
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    return compared(layer, group, forward)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activations_may_be_recomputed(processes, use_reentrant):
    for errors in processes(3)(checkpointed, use_reentrant):
        assert max(errors) < 1e-13


def with_autocast(group):
    layer = Layer(sharded=True)

    def forward(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    seen = forward(cpref.shard(sequence(torch.float32), 1, group=group)).dtype
    return seen, compared(layer, group, forward, torch.float32)


def test_autocast_computes_in_half_precision(processes):
    for seen, errors in processes(2)(with_autocast):
        assert seen == torch.bfloat16
        assert 1e-4 < max(errors) < 3e-2  # bfloat16's own error: seen, and no more than that


def with_pytorchs_script(group):
    """As in PyTorch's tutorial, with the import changed."""
    mesh = init_device_mesh("cpu", (group.size,), mesh_dim_names=("cp",))
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 4, 64, 8, dtype=torch.float64, generator=draw) for _ in range(3))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with cpref.context_parallel(
        mesh, buffers=(q, k, v), buffer_seq_dims=(2, 2, 2), no_restore_buffers={q, k, v}
    ):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    (whole,) = cpref.context_parallel_unshard(mesh, [out], [2])
    return ((whole - exact).norm() / exact.norm()).item()


def test_a_script_written_for_pytorch_runs_on_the_cpu(processes):
    assert max(processes(2)(with_pytorchs_script)) < 1e-13
