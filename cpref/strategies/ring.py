"""The ring: the queries stay, the K,V blocks travel.

At step i rank r holds the block of rank r - i, attends to it, and passes it on to rank r + 1:

    P = 4        step 0    step 1    step 2    step 3
    rank 0        KV 0      KV 3      KV 2      KV 1
    rank 1        KV 1      KV 0      KV 3      KV 2
    rank 2        KV 2      KV 1      KV 0      KV 3
    rank 3        KV 3      KV 2      KV 1      KV 0

In backward the block takes the same way, and its dK,dV follow it, one step behind: they are added
to by every rank that the block visits. They must end where the block began. So the block sets out
first, and a rank's own tile is computed last, while dK,dV make their final hop home:

    P = 4        step 1    step 2    step 3    own tile
    rank 0        KV 3      KV 2      KV 1      KV 0
    rank 1        KV 0      KV 3      KV 2      KV 1
    rank 2        KV 1      KV 0      KV 3      KV 2
    rank 3        KV 2      KV 1      KV 0      KV 3
    dKV go on        1         1        home

Steps at which no rank has work (a sliding window, short documents) are passed over: the blocks hop
over them in one go.

Bytes sent per rank, with L = S/P: forward B·Hkv·L·(D + Dv)·e for each of P-1 hops; backward the
same again, and B·Hkv·L·(D + Dv)·4 for each of P-1 hops of dK,dV. Memory beside the shards,
whatever P is: two K,V blocks (one in use, one arriving), and in backward three dK,dV blocks in
float32 (one being made, one leaving, one arriving) beside this rank's own, and what the kernel
returns of a tile.

Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889), section 3.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ..block import attend, attend_backward, empty_partial, query_rows
from ..comm import Group, Pending
from ..merge import Partial, accumulator_dtype
from ..parcels import numel, pack, unpack
from ..tiles import Job
from . import Gradients, Saved, block_shapes, finish


def forward(q: Tensor, k: Tensor, v: Tensor, job: Job, group: Group) -> tuple[Partial, Saved]:
    shapes = block_shapes(k, v, job)
    total = empty_partial(q, v)
    block = pack(k, v)
    for step, following in pairwise([*job.steps(), 0]):
        source = group.source(step)
        if following:
            arriving = _pass_on(block, step, following, shapes, job, group, "ring forward")
        with group.computing(f"ring forward, step {step}"):
            attend(total, q, *unpack(block, shapes[source]), job.tiles(group.rank, source), job)
        if following:
            block = arriving.wait()
    return finish(q, k, v, total, job)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, job: Job, group: Group
) -> Gradients:
    q, k, v, out, lse = saved
    rows = query_rows(q, grad_out, out, lse, grad_lse)
    shapes = block_shapes(k, v, job)
    dtype = accumulator_dtype(q.dtype)
    dq, own_dk, own_dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))

    block, grads_behind = pack(k, v), None
    away = job.steps()[1:]
    if away:
        arriving = _pass_on(block, 0, away[0], shapes, job, group, "ring backward")
    for step, following in pairwise([*away, 0]):
        source = group.source(step)
        block = arriving.wait()
        if following:
            arriving = _pass_on(block, step, following, shapes, job, group, "ring backward")
        with group.computing(f"ring backward, step {step}"):
            grads = block.new_zeros(block.shape, dtype=dtype)
            dk, dv = unpack(grads, shapes[source])
            k_block, v_block = unpack(block, shapes[source])
            attend_backward(rows, k_block, v_block, job.tiles(group.rank, source), job, dq, dk, dv)
        if grads_behind:
            grads += grads_behind.wait()
        grads_behind = _pass_on(grads, step, following, shapes, job, group, "ring dK,dV")
    with group.computing("ring backward, own tile"):
        attend_backward(rows, k, v, job.tiles(group.rank, group.rank), job, dq, own_dk, own_dv)
    if grads_behind:
        dk, dv = unpack(grads_behind.wait(), shapes[group.rank])
        own_dk += dk
        own_dv += dv
    return dq, own_dk, own_dv


def _pass_on(
    block: Tensor, step: int, following: int, shapes: list, job: Job, group: Group, label: str
) -> Pending[Tensor]:
    """Post the hop from `step` to the `following` one; to 0 is home."""
    arriving = group.shift(
        block,
        hops=following - step,
        shape=[sum(numel(shape) for shape in shapes[group.source(following)])],
        label=f"{label}, step {step} to {following}",
    )
    if not job.overlap:
        arriving.wait()
    return arriving
