"""How many bytes and messages a rank sends: formulas, to be held against what `comm.py` counts.

With L = S/P, K = B·Hkv·L·(D + Dv) numbers in a block of K,V, Q = B·H·L·D, O = B·H·L·Dv, e bytes per
number of the inputs and a bytes per number of the sums (4; 8 for float64):

    strategy         forward                                backward
    ring             K·e·(P-1)                              K·e·(P-1) + K·a·(P-1)
    all_gather       K·e·(P-1)                              K·e·(P-1) + K·a·(P-1)
    reduce_scatter   (Q·e + B·H·S·a + O·a)·(P-1)            ((Q + O)·e + 2·B·H·L·a + Q·a)·(P-1)
    ulysses          (Q + K' + O)·e·(P-1)/P                 (O·e + (Q + K')·w)·(P-1)/P

K' is K with each head repeated until P divides their number; w is e where nothing had to be
repeated, and a where the gradients of copies are still to be summed.

In messages: one for each hop of the ring; for a collective, one to each of the other ranks.

They hold where all blocks travel (no step of the ring is empty) and P divides S.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One attention call. bytes_each: of a number of q, k, v; sum_bytes: of a sum (4, or 8)."""

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    ranks: int
    bytes_each: int
    v_head_dim: int | None = None

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
    """What a rank sends in forward. strategy: "ring", "all_gather", "reduce_scatter", "ulysses"."""
    return _FORWARD[strategy](shape)


def backward_sent(strategy: str, shape: Shape) -> Sent:
    """What a rank sends in backward."""
    return _BACKWARD[strategy](shape)


def _to_others(shape: Shape, *payloads: int) -> Sent:
    """Each payload goes to each of the other ranks."""
    others = shape.ranks - 1
    return Sent(sum(payloads) * others, len(payloads) * others)


def _block_forward(shape: Shape) -> Sent:
    return _to_others(shape, shape.kv * shape.bytes_each)


def _block_backward(shape: Shape) -> Sent:
    return _to_others(shape, shape.kv * shape.bytes_each, shape.kv * shape.sum_bytes)


def _reduce_scatter_forward(shape: Shape) -> Sent:
    e, a = shape.bytes_each, shape.sum_bytes
    return _to_others(shape, shape.q * e, shape.lse * shape.ranks * a, shape.out * a)


def _reduce_scatter_backward(shape: Shape) -> Sent:
    e, a = shape.bytes_each, shape.sum_bytes
    return _to_others(shape, (shape.q + shape.out) * e, 2 * shape.lse * a, shape.q * a)


def _repeated(shape: Shape) -> int:
    """How often ulysses has each K,V head."""
    return shape.ranks // math.gcd(shape.kv_heads, shape.ranks)


def _ulysses_forward(shape: Shape) -> Sent:
    inputs = shape.q + shape.kv * _repeated(shape)
    return _shared_out(shape, inputs * shape.bytes_each, shape.out * shape.bytes_each)


def _ulysses_backward(shape: Shape) -> Sent:
    times = _repeated(shape)
    grads = shape.q + shape.kv * times
    wire = shape.bytes_each if times == 1 else shape.sum_bytes
    return _shared_out(shape, shape.out * shape.bytes_each, grads * wire)


def _shared_out(shape: Shape, *payloads: int) -> Sent:
    """Of each payload each other rank gets its own part."""
    return _to_others(shape, *(payload // shape.ranks for payload in payloads))


_FORWARD: dict[str, Callable[[Shape], Sent]] = {
    "ring": _block_forward,
    "all_gather": _block_forward,
    "reduce_scatter": _reduce_scatter_forward,
    "ulysses": _ulysses_forward,
}
_BACKWARD: dict[str, Callable[[Shape], Sent]] = {
    "ring": _block_backward,
    "all_gather": _block_backward,
    "reduce_scatter": _reduce_scatter_backward,
    "ulysses": _ulysses_backward,
}
