"""Hybrid: heads among neighbours, a ring among the rest.

The P ranks form a table of Pr rows of Pu neighbours. Within a row an all-to-all turns tokens into
heads, as in `ulysses`; then the rows are the shards of a ring, in which K,V blocks with the heads
of one rank travel along each column:

    Pu = 2, Pr = 2      column 0                       column 1
    row 0               tokens 0 1, first heads        tokens 0 1, second heads
    row 1               tokens 2 3, first heads        tokens 2 3, second heads

The row is best where the links are fast. Only Pu has to divide the heads, so P may be larger than
their number; and the ring has only Pr - 1 steps.

Bytes sent per rank: those of `ulysses` over Pu ranks, and those of `ring` over Pr ranks with a
sequence shard Pu times as long and Pu times fewer heads.

Source: Fang and Zhao 2024, USP (arXiv 2405.07719), section 3.
"""

from torch import Tensor

from ..comm import Grid
from ..merge import Partial
from ..tiles import Job
from . import Gradients, Saved, ring
from .ulysses import Swap


def forward(q: Tensor, k: Tensor, v: Tensor, job: Job, group: Grid) -> tuple[Partial, Saved]:
    swap = Swap(group.ulysses, row=group.ring.rank)
    q, k, v = swap.inputs_to_heads(q, k, v, job)
    part, saved = ring.forward(q, k, v, job.join(group.ulysses.size), group.ring)
    return swap.partial_to_tokens(part, job), saved


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, job: Job, group: Grid
) -> Gradients:
    swap = Swap(group.ulysses, row=group.ring.rank)
    grad_out, grad_lse = swap.grads_to_heads(grad_out, grad_lse, job)
    grads = ring.backward(grad_out, grad_lse, saved, job.join(group.ulysses.size), group.ring)
    return swap.grads_to_tokens(*grads, job)
