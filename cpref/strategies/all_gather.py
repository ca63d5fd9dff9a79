"""All-gather: the queries stay, all K,V come here at once.

    forward     all-gather K,V          own tile meanwhile, then the tiles of all other blocks
    backward    all-gather K,V again    own tile meanwhile, then the others; each gives dK,dV
                reduce-scatter dK,dV    every rank gets the sum of what all ranks have for its block

The gradient of an all-gather is a sum, since what one rank sent was used by all.

Bytes sent per rank, with L = S/P: forward B·Hkv·L·(D + Dv)·e·(P-1); backward the same again, and
B·Hkv·L·(D + Dv)·4·(P-1) for dK,dV in float32. Memory beside the shards: all of K,V, and in backward
all of dK,dV in float32. It grows with S, where the ring's does not.

Source: Llama 3 (arXiv 2407.21783), section 3.3.2, "Context parallelism for long sequences".
"""

import torch
from torch import Tensor

from ..block import attend, attend_backward, empty_partial, query_rows
from ..comm import Group, Pending
from ..merge import Partial, accumulator_dtype
from ..parcels import Parcels, numel, pack, unpack
from ..tiles import Job
from . import Gradients, Saved, block_shapes, finish


def forward(q: Tensor, k: Tensor, v: Tensor, job: Job, group: Group) -> tuple[Partial, Saved]:
    shapes = block_shapes(k, v, job)
    total = empty_partial(q, v)
    arriving = _gather(k, v, shapes, job, group, "all_gather forward")
    with group.computing("all_gather forward, own tile"):
        attend(total, q, k, v, job.tiles(group.rank, group.rank), job)
    blocks = arriving.wait()
    with group.computing("all_gather forward, the others"):
        for source, block in enumerate(blocks):
            if source != group.rank:
                attend(total, q, *unpack(block, shapes[source]), job.tiles(group.rank, source), job)
    return finish(q, k, v, total, job)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, job: Job, group: Group
) -> Gradients:
    q, k, v, out, lse = saved
    rows = query_rows(q, grad_out, out, lse, grad_lse)
    shapes = block_shapes(k, v, job)
    dq = torch.zeros_like(q, dtype=accumulator_dtype(q.dtype))
    grads = Parcels.empty(_flat(shapes), dq.dtype, q.device)
    mine = unpack(grads.parts[group.rank], shapes[group.rank])

    arriving = _gather(k, v, shapes, job, group, "all_gather backward")
    with group.computing("all_gather backward, own tile"):
        attend_backward(rows, k, v, job.tiles(group.rank, group.rank), job, dq, *mine)
    blocks = arriving.wait()
    with group.computing("all_gather backward, the others"):
        for source, block in enumerate(blocks):
            if source != group.rank:
                k_block, v_block = unpack(block, shapes[source])
                dk, dv = unpack(grads.parts[source], shapes[source])
                tiles = job.tiles(group.rank, source)
                attend_backward(rows, k_block, v_block, tiles, job, dq, dk, dv)
    summed = group.reduce_scatter(grads, label="all_gather dK,dV").wait()
    return dq, *unpack(summed, shapes[group.rank])


def _gather(
    k: Tensor, v: Tensor, shapes: list, job: Job, group: Group, label: str
) -> Pending[list[Tensor]]:
    arriving = group.all_gather(pack(k, v), _flat(shapes), label=label)
    if not job.overlap:
        arriving.wait()
    return arriving


def _flat(shapes: list) -> list[list[int]]:
    return [[sum(numel(shape) for shape in pair)] for pair in shapes]
