"""What many tests need: whole tensors in, whole results out, sharded in between; and the judge."""

from itertools import combinations, pairwise

import torch
from torch import Tensor

import cpref
from cpref.comm import resolve

Tensors = tuple[Tensor, ...]


def draw(
    dtype=torch.float64,
    *,
    batch=2,
    heads=4,
    kv_heads=2,
    seq_len=37,
    kv_seq_len=None,
    head_dim=8,
    v_head_dim=None,
    seed=0,
) -> Tensors:
    """Whole q, k, v and grad_out, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    kv_seq_len, v_head_dim = kv_seq_len or seq_len, v_head_dim or head_dim
    shapes = (
        (batch, heads, seq_len, head_dim),
        (batch, kv_heads, kv_seq_len, head_dim),
        (batch, kv_heads, kv_seq_len, v_head_dim),
        (batch, heads, seq_len, v_head_dim),
    )
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def judged(q, k, v, grad_out, mask=cpref.Causal(), scale=None) -> Tensors:  # noqa: B008 - frozen
    """out, dq, dk, dv in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = cpref.reference_attention(*leaves, mask=mask, scale=scale)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())


def attention(group, q, k, v, **options) -> Tensor:
    """context_parallel_attention of shards of whole tensors; options may give other lengths."""
    layout = options.get("layout", "zigzag")
    q_shard, *kv = (cpref.shard(x, 2, group=group, layout=layout) for x in (q, k, v))
    lengths = {"seq_len": q.shape[2], "kv_seq_len": k.shape[2]}
    return cpref.context_parallel_attention(q_shard, *kv, group=group, **{**lengths, **options})


def sharded(group, q, k, v, grad_out, **options) -> Tensors:
    """out, dq, dk, dv: whole, each in its own dtype, from attention on the ranks of the group."""
    layout = options.get("layout", "zigzag")
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(group, *leaves, **options)
    out.backward(cpref.shard(grad_out, 2, group=group, layout=layout))
    # why: a rank's gradient of the whole tensor is that of its own shard, and zero elsewhere
    grads = [resolve(group).all_reduce(leaf.grad) for leaf in leaves]
    whole = cpref.unshard(out.detach(), 2, group=group, layout=layout, seq_len=q.shape[2])
    return whole, *grads


def grid(group, neighbours: int):
    """The ranks of `group` as a table for the hybrid strategy: local, or a DeviceMesh."""
    if hasattr(group, "grid"):
        return group.grid(neighbours)
    shape = (group.size // neighbours, neighbours)
    if shape not in _meshes:
        _meshes[shape] = torch.distributed.device_mesh.init_device_mesh("cpu", shape)
    return _meshes[shape]


_meshes: dict[tuple[int, int], object] = {}


def for_strategy(group, strategy: str):
    """What the strategy takes as its group: with hybrid, rows of two neighbours where they fit."""
    if strategy != "hybrid":
        return group
    return grid(group, 2 if group.size % 2 == 0 else 1)


def with_changing_documents(group, first: int, calls: int) -> None:
    """So many attentions, forward and backward, each with other documents than any before."""
    whole = draw(torch.float32, batch=1, heads=2, kv_heads=1, seq_len=24, head_dim=4)
    *leaves, grad_out = (cpref.shard(x, 2, group=group).requires_grad_() for x in whole)
    cuts = list(combinations(range(1, 24), 3))
    for number in range(first, first + calls):
        ends = (0, *cuts[number], 24)
        mask = cpref.Documents([end - start for start, end in pairwise(ends)])
        out = cpref.context_parallel_attention(*leaves, group=group, mask=mask)
        torch.autograd.grad(out, leaves, grad_out)
