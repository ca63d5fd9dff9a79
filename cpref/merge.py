"""Joining partial results by their log-sum-exp.

Attention over some of the keys gives a partial: `out`, normalised over those keys alone, and `lse`,
the logarithm of the sum that it was normalised by. Two partials over different keys join exactly:

    m = max(l1, l2)      a = exp(l1 - m)      b = exp(l2 - m)
    lse = m + log(a + b)
    out = (a·o1 + b·o2) / (a + b)

A row that sees none of the keys is the empty partial (0, -inf), the neutral element. The formula
needs one care: where m itself is -inf it is taken as 0, since -inf - (-inf) is not a number.

Source: the online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867), in the form that
FlashAttention-2 (arXiv 2307.08691), section 3.1, keeps one log-sum-exp for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partial:
    """Attention over some of the keys. out: (B, H, S, D); lse: (B, H, S), float32 (or float64)."""

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(out: Tensor) -> "Partial":
        """The partial over no key at all, held in `out`, which becomes 0."""
        return Partial(out.zero_(), out.new_full(out.shape[:-1], -torch.inf))

    def rows(self, rows: slice) -> "Partial":
        return Partial(self.out[:, :, rows], self.lse[:, :, rows])


def merge(one: Partial, other: Partial) -> Partial:
    """The partial over the keys of both. Exact for empty partials and for scores of any size."""
    lse, weight, other_weight = _joined(one.lse, other.lse)
    return Partial(one.out * weight + other.out * other_weight, lse)


def merge_into(total: Partial, part: Partial) -> None:
    """`merge`, with the result written over `total`: no third tensor of its size is made."""
    lse, weight, part_weight = _joined(total.lse, part.lse)
    total.out.mul_(weight).addcmul_(part.out, part_weight)
    total.lse.copy_(lse)


def _joined(lse: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lse over the keys of both, (B, H, S), and the weights of their outs, (B, H, S, 1)."""
    top = torch.maximum(lse, other)
    top = top.masked_fill(top == -torch.inf, 0)
    a, b = (lse - top).exp(), (other - top).exp()
    total = a + b
    joined = top + total.log()
    total = total.masked_fill(total == 0, 1)
    return joined, (a / total).unsqueeze(-1), (b / total).unsqueeze(-1)


def join_lse(lses: Sequence[Tensor]) -> Tensor:
    """The lse over the keys of all partials, each (B, H, S). -inf where all are empty."""
    return torch.logsumexp(torch.stack(list(lses)), 0)


def weight_in(lse: Tensor, total: Tensor) -> Tensor:
    """exp(lse - total): the share of a partial in the whole. 0 for an empty one."""
    return (lse - total.masked_fill(total == -torch.inf, 0)).exp()


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partials and gradients are summed in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
