"""Ulysses: heads instead of tokens.

An all-to-all turns "all heads of my tokens" into "my heads of all tokens". Then attention is that
of one device, and an all-to-all brings the out back:

    P = 2                 before                after                 on the way back
    rank 0       tokens 0, heads 0 1    tokens 0 1, head 0       tokens 0, heads 0 1
    rank 1       tokens 1, heads 0 1    tokens 0 1, head 1       tokens 1, heads 0 1

After the all-to-all the tokens come in the order of the ranks, and are put in the order of their
positions. The query heads must be divisible by P. With fewer K,V heads than that, each is repeated
just often enough, and the gradients of the copies are summed.

Bytes sent per rank, with L = S/P: (H·D + Hkv·D + Hkv·Dv + H·Dv)·B·L·e·(P-1)/P, in backward the
same. What is kept for backward is in the order of heads, so nothing has to be sent twice.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509), section 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..block import attend, attend_backward, empty_partial, query_rows
from ..comm import Group
from ..layout import Placement
from ..merge import Partial, accumulator_dtype
from ..parcels import pack, unpack
from ..tiles import Job
from . import Gradients, Saved, finish


def forward(q: Tensor, k: Tensor, v: Tensor, job: Job, group: Group) -> tuple[Partial, Saved]:
    swap = Swap(group)
    q, k, v = swap.inputs_to_heads(q, k, v, job)
    whole = job.join(group.size)
    total = empty_partial(q, v)
    with group.computing("ulysses forward"):
        attend(total, q, k, v, whole.tiles(0, 0), whole)
    part, saved = finish(q, k, v, total, job)
    return swap.partial_to_tokens(part, job), saved


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, job: Job, group: Group
) -> Gradients:
    swap = Swap(group)
    q, k, v, out, lse = saved
    grad_out, grad_lse = swap.grads_to_heads(grad_out, grad_lse, job)
    rows = query_rows(q, grad_out, out, lse, grad_lse)
    whole = job.join(group.size)
    grads = [torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in (q, k, v)]
    with group.computing("ulysses backward"):
        attend_backward(rows, k, v, whole.tiles(0, 0), whole, *grads)
    return swap.grads_to_tokens(*grads, job)


@dataclass(frozen=True)
class Swap:
    """The all-to-all among a row of ranks, and back.

    group: the row; row: the how manyth row it is, when there are several (hybrid). "To heads" takes
    (B, H, S_local, D) to (B, H/P, S_row, D), with the tokens of the row in the order of positions.
    """

    group: Group
    row: int = 0

    def inputs_to_heads(self, q: Tensor, k: Tensor, v: Tensor, job: Job) -> list[Tensor]:
        times = copies(job.kv_heads, self.group.size)
        k, v = (x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v))
        return self._to_heads([q, k, v], [job.q, job.kv, job.kv], "ulysses q, k, v")

    def partial_to_tokens(self, part: Partial, job: Job) -> Partial:
        (out,) = self._to_tokens([part.out], [job.q], "ulysses out")
        if not job.return_lse:
            return Partial(out, part.lse)  # why: nobody looks at it, so it does not travel
        (lse,) = self._to_tokens([part.lse.unsqueeze(-1)], [job.q], "ulysses lse")
        return Partial(out, lse.squeeze(-1))

    def grads_to_heads(
        self, grad_out: Tensor, grad_lse: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor | None]:
        (grad_out,) = self._to_heads([grad_out], [job.q], "ulysses grad_out")
        if grad_lse is None:
            return grad_out, None
        (grad_lse,) = self._to_heads([grad_lse.unsqueeze(-1)], [job.q], "ulysses grad_lse")
        return grad_out, grad_lse.squeeze(-1)

    def grads_to_tokens(self, dq: Tensor, dk: Tensor, dv: Tensor, job: Job) -> Gradients:
        times = copies(job.kv_heads, self.group.size)
        # why: gradients that are complete are sent as they will be returned; those of copies are
        # still to be summed
        wire = job.dtype if times == 1 else dq.dtype
        dq, dk, dv = self._to_tokens(
            [x.to(wire) for x in (dq, dk, dv)], [job.q, job.kv, job.kv], "ulysses dq, dk, dv"
        )
        return dq, *(x.unflatten(1, (-1, times)).sum(2) if times > 1 else x for x in (dk, dv))

    def _to_heads(
        self, tensors: Sequence[Tensor], places: Sequence[Placement], label: str
    ) -> list[Tensor]:
        ranks = self.group.size
        by_rank = zip(*(x.chunk(ranks, 1) for x in tensors), strict=True)
        shapes = [
            [
                (x.shape[0], x.shape[1] // ranks, place.length(shard), x.shape[3])
                for x, place in zip(tensors, places, strict=True)
            ]
            for shard in self._shards()
        ]
        arrived = self._exchange([list(part) for part in by_rank], shapes, label)
        return [
            torch.cat(parts, 2).index_select(2, self._order(place, parts[0].device))
            for parts, place in zip(zip(*arrived, strict=True), places, strict=True)
        ]

    def _to_tokens(
        self, tensors: Sequence[Tensor], places: Sequence[Placement], label: str
    ) -> list[Tensor]:
        by_rank = [
            [
                x.index_select(2, self._rows_of(shard, place, x.device))
                for x, place in zip(tensors, places, strict=True)
            ]
            for shard in self._shards()
        ]
        mine = [x.shape for x in by_rank[self.group.rank]]
        arrived = self._exchange(by_rank, [mine] * self.group.size, label)
        return [torch.cat(parts, 1) for parts in zip(*arrived, strict=True)]

    def _exchange(self, parts: list, shapes: list, label: str) -> list[list[Tensor]]:
        """All-to-all of several tensors for each rank, in one message each."""
        flat = [[sum(math.prod(shape) for shape in of_rank)] for of_rank in shapes]
        arrived = self.group.all_to_all([pack(*p) for p in parts], flat, label=label).wait()
        return [unpack(one, of_rank) for one, of_rank in zip(arrived, shapes, strict=True)]

    def _shards(self) -> range:
        return range(self.row * self.group.size, (self.row + 1) * self.group.size)

    def _order(self, place: Placement, device: torch.device) -> Tensor:
        """Indices that put the row's tokens, rank after rank, in the order of positions."""
        arrived = np.concatenate([place.positions(shard) for shard in self._shards()])
        return torch.tensor(np.argsort(arrived), device=device)

    def _rows_of(self, shard: int, place: Placement, device: torch.device) -> Tensor:
        """Where the tokens of `shard` stand among those of the row."""
        together = place.join(self.group.size).positions(self.row)
        return torch.tensor(np.searchsorted(together, place.positions(shard)), device=device)


def copies(kv_heads: int, ranks: int) -> int:
    """How often each K,V head is repeated so that `ranks` ranks can share them."""
    return ranks // math.gcd(kv_heads, ranks)
