"""Reduce-scatter: K,V stay, the queries go to everyone and their results come back.

    forward     all-gather Q              own queries meanwhile, then everyone's, over the keys here
                all-gather lse            now all know the lse over all keys, and so the share of
                                          their partial in the whole
                reduce-scatter out        the partials, weighted with that share, simply add up
    backward    all-gather Q, grad_out, lse, delta
                reduce-scatter dQ         dK,dV are complete where the keys are, and never travel

Wins when the queries are few and the keys many: a decoder that reads a long memory, or cross
attention. It is the all-gather strategy with the roles of Q and K,V exchanged.

Bytes sent per rank, with L = S/P: forward B·H·L·D·e·(P-1) for Q, B·H·S·4·(P-1) for the lse and
B·H·L·Dv·4·(P-1) for the outs; backward B·H·L·(D + Dv)·e·(P-1) for Q and grad_out, B·H·L·2·4·(P-1)
for lse and delta, B·H·L·D·4·(P-1) for dQ. Memory beside the shards: all of Q and a float32 partial
out for all of S.

Source: the merge is that of FlashAttention-2 (arXiv 2307.08691), section 3.1; sending queries is
the pass-Q of Yang et al. 2024, Context Parallelism for Scalable Million-Token Inference (arXiv
2411.01783), section 3.
"""

import torch
from torch import Tensor

from ..block import attend, attend_backward, rows_with_delta, rowsum
from ..comm import Group
from ..merge import Partial, accumulator_dtype, join_lse, weight_in
from ..parcels import Parcels, pack, unpack
from ..tiles import Job
from . import Gradients, Saved, finish


def forward(q: Tensor, k: Tensor, v: Tensor, job: Job, group: Group) -> tuple[Partial, Saved]:
    arriving = group.all_gather(q, _shapes(q, job), label="reduce_scatter Q")
    if not job.overlap:
        arriving.wait()
    out_shapes = [(*shape[:-1], v.shape[-1]) for shape in _shapes(q, job)]
    outs = Parcels.empty(out_shapes, accumulator_dtype(q.dtype), q.device)
    partials = [Partial.empty(out) for out in outs.parts]

    with group.computing("reduce_scatter forward, own tile"):
        attend(partials[group.rank], q, k, v, job.tiles(group.rank, group.rank), job)
    queries = arriving.wait()
    with group.computing("reduce_scatter forward, the others"):
        for source, q_source in enumerate(queries):
            if source != group.rank:
                attend(partials[source], q_source, k, v, job.tiles(source, group.rank), job)

    everyones = group.all_gather(
        pack(*(p.lse for p in partials)), label="reduce_scatter lse"
    ).wait()
    lses = [unpack(lses, [p.lse.shape for p in partials]) for lses in everyones]
    totals = [join_lse(of_rank) for of_rank in zip(*lses, strict=True)]
    for part, total in zip(partials, totals, strict=True):
        part.out.mul_(weight_in(part.lse, total).unsqueeze(-1))
    out = group.reduce_scatter(outs, label="reduce_scatter out").wait()
    return finish(q, k, v, Partial(out, totals[group.rank]), job)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, job: Job, group: Group
) -> Gradients:
    q, k, v, out, lse = saved
    delta = rowsum(grad_out, out)
    if grad_lse is not None:
        delta = delta - grad_lse
    q_shapes = _shapes(q, job)
    wide = [[*shape[:-1], q.shape[-1] + v.shape[-1]] for shape in q_shapes]
    narrow = [[2, *shape[:-1]] for shape in q_shapes]
    queries = group.all_gather(
        torch.cat([q, grad_out], -1), wide, label="reduce_scatter Q, grad_out"
    )
    sums = group.all_gather(torch.stack([lse, delta]), narrow, label="reduce_scatter lse, delta")
    if not job.overlap:
        queries.wait()
        sums.wait()

    dtype = accumulator_dtype(q.dtype)
    dqs = Parcels.empty(q_shapes, dtype, q.device)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
    own = rows_with_delta(q, grad_out, lse, delta)
    tiles = job.tiles(group.rank, group.rank)
    with group.computing("reduce_scatter backward, own tile"):
        attend_backward(own, k, v, tiles, job, dqs.parts[group.rank], dk, dv)
    arrived = zip(queries.wait(), sums.wait(), strict=True)
    with group.computing("reduce_scatter backward, the others"):
        for source, (both, (lse, delta)) in enumerate(arrived):
            if source != group.rank:
                q_source, grad_source = both.split([q.shape[-1], v.shape[-1]], -1)
                rows = rows_with_delta(q_source, grad_source, lse, delta)
                tiles = job.tiles(source, group.rank)
                attend_backward(rows, k, v, tiles, job, dqs.parts[source], dk, dv)
    dq = group.reduce_scatter(dqs, label="reduce_scatter dQ").wait()
    return dq, dk, dv


def _shapes(q: Tensor, job: Job) -> list[tuple[int, ...]]:
    """The shape of q on every rank."""
    return [(*q.shape[:2], length, q.shape[3]) for length in job.q.lengths()]
