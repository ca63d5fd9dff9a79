"""The judge: attention on one device, in float64, by its definition."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .mask import Mask, as_mask


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Callable[[Tensor, Tensor], Tensor],
    scale: float | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ under the mask)·v of whole tensors, computed and returned in float64.

    q: (B, H, S, D); k: (B, Hkv, Skv, D); v: (B, Hkv, Skv, Dv), any float dtype, whole sequences.
    Returns (B, H, S, Dv) float64; rows that may attend to nothing are 0. Differentiable by
    autograd; the gradients are rounded once, to the dtypes of q, k, v. It shares no code with what
    it judges, and needs the memory of all scores: B·H·S·Skv·8 bytes several times over.
    Raises ValueError if the heads of q are no multiple of those of k, v, or if the mask has no
    meaning for these lengths.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}; it must be a multiple")
    mask = as_mask(mask)
    mask.require_lengths(q.shape[2], k.shape[2])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    q_index = torch.arange(q.shape[2], device=q.device)
    kv_index = torch.arange(k.shape[2], device=q.device)
    allowed = mask.allowed(q_index[:, None], kv_index[None, :])
    scores = (q @ k.mT * scale).masked_fill(~allowed, -torch.inf)
    sees = allowed.any(-1)[:, None]
    weights = scores.masked_fill(~sees, 0).softmax(-1).masked_fill(~sees, 0)
    return weights @ v
