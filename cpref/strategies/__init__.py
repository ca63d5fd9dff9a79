"""The strategies: each module is a `forward` and a `backward`, and differs only in what travels.

forward(q, k, v, job, group) -> (Partial, Saved)
    q: (B, H, S_local, D); k: (B, Hkv, S_local, D); v: (B, Hkv, S_local, Dv), this rank's shards.
backward(grad_out, grad_lse, saved, job, group) -> (dq, dk, dv)
    grad_out as the out, grad_lse as the lse or None; the gradients in the accumulator's dtype.

All are plain functions of tensors and a group; the autograd.Function around them is in
`attention.py`. None knows which layout, mask or kernel it is used with: that is the tile planner's.
"""

from typing import NamedTuple

from torch import Tensor

from ..kernels import Gradients as Gradients
from ..merge import Partial
from ..tiles import Job


class Saved(NamedTuple):
    """What a forward keeps for its backward.

    out in the dtype of q, in an exact job in the accumulator's; lse float32 (or float64).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def finish(q: Tensor, k: Tensor, v: Tensor, total: Partial, job: Job) -> tuple[Partial, Saved]:
    """The result in the dtype of q, and what to keep for backward."""
    out = total.out.to(q.dtype)
    kept = total.out if job.exact else out  # why: delta is made of it, and is not to be rounded
    return Partial(out, total.lse), Saved(q, k, v, kept, total.lse)


def block_shapes(k: Tensor, v: Tensor, job: Job) -> list[list[tuple[int, ...]]]:
    """The shapes of k and v on every rank."""
    return [[(*x.shape[:2], length, x.shape[3]) for x in (k, v)] for length in job.kv.lengths()]
