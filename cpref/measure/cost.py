"""Bytes and messages that a rank sends, and FLOPs: formulas, to be held against what is counted.

With L = S/P, K = B·Hkv·L·(D + Dv) numbers in a block of K,V, Q = B·H·L·D, O = B·H·L·Dv, e bytes per
number of the inputs and a bytes per number of the sums (4; 8 for float64):

    strategy         forward                                backward
    ring             K·e·(P-1)                              K·e·(P-1) + K·a·(P-1)
    all_gather       K·e·(P-1)                              K·e·(P-1) + K·a·(P-1)
    reduce_scatter   (Q·e + B·H·S·a + O·a)·(P-1)            ((Q + O)·e + 2·B·H·L·a + Q·a)·(P-1)
    ulysses          (Q + K' + O)·e·(P-1)/P                 (O·e + (Q + K')·w)·(P-1)/P

K' is K with each head repeated until P divides their number; w is e where nothing had to be
repeated, and a where the gradients of copies are still to be summed.

hybrid is ulysses among the Pu neighbours of a row, which is the line of ulysses with Pu in the
place of P (L stays S/P), and the ring among P/Pu rows, which is the line of ring with K' and P/Pu.

In messages: one for each hop of the ring; for a collective, one to each of the other ranks.

They hold where all blocks travel (no step of the ring is empty) and P divides S.

A pair is a query and a key that attend. In each head it costs 4·D FLOPs forward: a product of
length D for the score, and D multiply-adds of v. Backward makes five such products of it where
forward makes two: the score again, and dv, the gradient of the share, dq and dk. `work.py` counts
the pairs.

Source of the FLOPs: Dao 2023, FlashAttention-2 (arXiv 2307.08691), section 4.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One attention call.

    bytes_each: of a number of q, k, v; sum_bytes: of a sum (4, or 8); v_head_dim: None means
    head_dim; neighbours: ranks of a row under hybrid.
    """

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    ranks: int
    bytes_each: int
    v_head_dim: int | None = None
    neighbours: int = 1

    @property
    def sum_bytes(self) -> int:
        return max(4, self.bytes_each)

    @property
    def local(self) -> int:
        return self.seq_len // self.ranks

    @property
    def q(self) -> int:
        return self.batch * self.heads * self.local * self.head_dim

    @property
    def out(self) -> int:
        return self.batch * self.heads * self.local * (self.v_head_dim or self.head_dim)

    @property
    def kv(self) -> int:
        width = self.head_dim + (self.v_head_dim or self.head_dim)
        return self.batch * self.kv_heads * self.local * width

    @property
    def lse(self) -> int:
        return self.batch * self.heads * self.local


@dataclass(frozen=True)
class Sent:
    """What one rank sends in one pass."""

    bytes: int
    messages: int

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.bytes + other.bytes, self.messages + other.messages)


def forward_sent(strategy: str, shape: Shape) -> Sent:
    """What a rank sends in forward.

    strategy: "ring", "all_gather", "reduce_scatter", "ulysses" or "hybrid".
    """
    return _FORWARD[strategy](shape)


def backward_sent(strategy: str, shape: Shape) -> Sent:
    """What a rank sends in backward."""
    return _BACKWARD[strategy](shape)


def forward_flops(shape: Shape, pairs: int) -> int:
    """FLOPs of `pairs` pairs in every head: 4·B·H·D·pairs where D = Dv."""
    d, dv = shape.head_dim, shape.v_head_dim or shape.head_dim
    return 2 * shape.batch * shape.heads * (d + dv) * pairs


def backward_flops(shape: Shape, pairs: int) -> int:
    """The same of backward: 2.5 times those of forward where D = Dv."""
    d, dv = shape.head_dim, shape.v_head_dim or shape.head_dim
    return 2 * shape.batch * shape.heads * (3 * d + 2 * dv) * pairs


def _to_others(ranks: int, *payloads: int) -> Sent:
    """Each payload goes to each of the other ranks."""
    return Sent(sum(payloads) * (ranks - 1), len(payloads) * (ranks - 1))


def _shared_out(ranks: int, *payloads: int) -> Sent:
    """Of each payload each other rank gets its own part."""
    return _to_others(ranks, *(payload // ranks for payload in payloads))


def _block_forward(shape: Shape) -> Sent:
    return _ring_forward(shape, shape.ranks, shape.kv)


def _block_backward(shape: Shape) -> Sent:
    return _ring_backward(shape, shape.ranks, shape.kv)


def _ring_forward(shape: Shape, ranks: int, block: int) -> Sent:
    return _to_others(ranks, block * shape.bytes_each)


def _ring_backward(shape: Shape, ranks: int, block: int) -> Sent:
    return _to_others(ranks, block * shape.bytes_each, block * shape.sum_bytes)


def _reduce_scatter_forward(shape: Shape) -> Sent:
    e, a = shape.bytes_each, shape.sum_bytes
    return _to_others(shape.ranks, shape.q * e, shape.lse * shape.ranks * a, shape.out * a)


def _reduce_scatter_backward(shape: Shape) -> Sent:
    e, a = shape.bytes_each, shape.sum_bytes
    return _to_others(shape.ranks, (shape.q + shape.out) * e, 2 * shape.lse * a, shape.q * a)


def _copies(shape: Shape, row: int) -> int:
    """How often each K,V head is there, so that the ranks of a row can share them."""
    return row // math.gcd(shape.kv_heads, row)


def _ulysses_forward(shape: Shape) -> Sent:
    return _row_forward(shape, shape.ranks)


def _ulysses_backward(shape: Shape) -> Sent:
    return _row_backward(shape, shape.ranks)


def _row_forward(shape: Shape, row: int) -> Sent:
    inputs = shape.q + shape.kv * _copies(shape, row)
    return _shared_out(row, inputs * shape.bytes_each, shape.out * shape.bytes_each)


def _row_backward(shape: Shape, row: int) -> Sent:
    copies = _copies(shape, row)
    grads = shape.q + shape.kv * copies
    wire = shape.bytes_each if copies == 1 else shape.sum_bytes
    return _shared_out(row, shape.out * shape.bytes_each, grads * wire)


def _hybrid_forward(shape: Shape) -> Sent:
    row, block = shape.neighbours, shape.kv * _copies(shape, shape.neighbours)
    return _row_forward(shape, row) + _ring_forward(shape, shape.ranks // row, block)


def _hybrid_backward(shape: Shape) -> Sent:
    row, block = shape.neighbours, shape.kv * _copies(shape, shape.neighbours)
    return _row_backward(shape, row) + _ring_backward(shape, shape.ranks // row, block)


_FORWARD: dict[str, Callable[[Shape], Sent]] = {
    "ring": _block_forward,
    "all_gather": _block_forward,
    "reduce_scatter": _reduce_scatter_forward,
    "ulysses": _ulysses_forward,
    "hybrid": _hybrid_forward,
}
_BACKWARD: dict[str, Callable[[Shape], Sent]] = {
    "ring": _block_backward,
    "all_gather": _block_backward,
    "reduce_scatter": _reduce_scatter_backward,
    "ulysses": _ulysses_backward,
    "hybrid": _hybrid_backward,
}
