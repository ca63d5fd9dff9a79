"""Who may attend to whom, in global positions.

Every mask but `MaskMod` is a band: a query at position i sees the keys of one interval
[first(i), last(i)), and both ends move only forward as i grows. That is all the tile planner needs
to know of a mask. `allowed` says the same in the plainest way, and is what the judge uses.
"""

import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .layout import is_count

Interval = tuple[np.ndarray, np.ndarray]


class Mask:
    """Base of all masks. is_band: whether `interval` says all there is to know of it."""

    is_band = True

    def require_lengths(self, seq_len: int, kv_seq_len: int) -> None:
        """ValueError unless the mask has a meaning for these global lengths of q and of k, v."""
        if seq_len != kv_seq_len:
            raise ValueError(
                f"mask {self} needs as many keys as queries, but seq_len is {seq_len} and "
                f"kv_seq_len {kv_seq_len}; use Full() or a mask_mod for cross attention"
            )

    def allowed(self, q_index: Tensor, kv_index: Tensor) -> Tensor:
        """Which queries see which keys: bool, from int64 positions that broadcast."""
        raise NotImplementedError

    def interval(self, positions: np.ndarray, kv_seq_len: int) -> Interval:
        """The keys [first, last) that the queries at `positions` see."""
        raise NotImplementedError

    def signature(self, seq_len: int, kv_seq_len: int) -> str:
        """A text that is the same on two ranks only if they have the same mask."""
        return repr(self)


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key. Works for cross attention, too."""

    def require_lengths(self, seq_len: int, kv_seq_len: int) -> None:
        return

    def allowed(self, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return (q_index >= 0) & (kv_index >= 0)

    def interval(self, positions: np.ndarray, kv_seq_len: int) -> Interval:
        return np.zeros_like(positions), np.full_like(positions, kv_seq_len)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and what came before."""

    def allowed(self, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return kv_index <= q_index

    def interval(self, positions: np.ndarray, kv_seq_len: int) -> Interval:
        return np.zeros_like(positions), positions + 1


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees itself and the size - 1 positions before it. size: at least 1.

    Source: Beltagy et al. 2020, Longformer (arXiv 2004.05150); with itself counted, as in Mistral
    7B (arXiv 2310.06825).
    """

    size: int

    def __post_init__(self):
        if not is_count(self.size):
            raise ValueError(f"SlidingWindow size is {self.size!r}; it must be at least 1 token")
        object.__setattr__(self, "size", int(self.size))  # why: of numpy, it would print otherwise

    def allowed(self, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return (kv_index <= q_index) & (q_index - kv_index < self.size)

    def interval(self, positions: np.ndarray, kv_seq_len: int) -> Interval:
        return np.maximum(positions + 1 - self.size, 0), positions + 1


@dataclass(frozen=True)
class Documents(Mask):
    """Packed documents: a query sees only its own document, and there what `inner` allows.

    lengths: tokens of each document, in order; their sum is the global length. Documents may start
    and end anywhere, also inside a shard. inner: Causal(), Full() or SlidingWindow(size).
    """

    lengths: Sequence[int]
    inner: Mask = field(default_factory=Causal)

    def __post_init__(self):
        given = self.lengths.tolist() if isinstance(self.lengths, Tensor) else self.lengths
        if not len(given) or not all(is_count(length) for length in given):
            raise ValueError(f"Documents lengths are {tuple(given)}; each must be at least 1 token")
        lengths = tuple(int(length) for length in given)
        if not isinstance(self.inner, Causal | Full | SlidingWindow):
            raise ValueError(
                f"Documents inner is {self.inner!r}; it must be Causal(), Full() or SlidingWindow"
            )
        object.__setattr__(self, "lengths", lengths)

    def require_lengths(self, seq_len: int, kv_seq_len: int) -> None:
        super().require_lengths(seq_len, kv_seq_len)
        if sum(self.lengths) != seq_len:
            raise ValueError(
                f"Documents lengths add up to {sum(self.lengths)} tokens, but seq_len is {seq_len}"
            )

    def allowed(self, q_index: Tensor, kv_index: Tensor) -> Tensor:
        ends = torch.tensor(self.lengths, device=q_index.device).cumsum(0)
        q_document = torch.searchsorted(ends, q_index.contiguous(), right=True)
        kv_document = torch.searchsorted(ends, kv_index.contiguous(), right=True)
        return (q_document == kv_document) & self.inner.allowed(q_index, kv_index)

    def interval(self, positions: np.ndarray, kv_seq_len: int) -> Interval:
        ends = np.cumsum(self.lengths)
        document = np.searchsorted(ends, positions, side="right")
        first, last = self.inner.interval(positions, kv_seq_len)
        starts = ends - self.lengths
        return np.maximum(first, starts[document]), np.minimum(last, ends[document])


@dataclass(frozen=True)
class MaskMod(Mask):
    """Any rule: function(q_index, kv_index) -> bool, on int64 tensors that broadcast.

    As a mask_mod of FlexAttention without its batch and head arguments: written with tensor
    operators (`&`, `|`, `torch.where`), not with `and` or `if`.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    is_band = False

    def __repr__(self) -> str:  # why: without an address, the same text in every process
        return f"MaskMod({getattr(self.function, '__qualname__', type(self.function).__name__)})"

    def __post_init__(self):
        try:
            inspect.signature(self.function).bind(None, None)
        except TypeError as error:
            raise TypeError(
                "mask: a mask_mod takes (q_index, kv_index) and nothing else; fix other arguments "
                "beforehand, e.g. mask=lambda q, kv: mask_mod(0, 0, q, kv)"
            ) from error

    def require_lengths(self, seq_len: int, kv_seq_len: int) -> None:
        """ValueError unless the function works on tensors of positions: it tries the first."""
        first, first_kv = (torch.arange(min(2, length)) for length in (seq_len, kv_seq_len))
        try:
            self.allowed(first[:, None], first_kv[None, :])
        except TypeError:
            raise
        except Exception as error:
            raise ValueError(
                f"mask: the mask_mod fails on tensors of positions ({error}); write it with tensor "
                "operators such as &, | and torch.where"
            ) from error

    def allowed(self, q_index: Tensor, kv_index: Tensor) -> Tensor:
        answer = torch.as_tensor(self.function(q_index, kv_index))
        if answer.dtype != torch.bool:
            raise TypeError(f"mask: a mask_mod must return bool; it returned {answer.dtype}")
        return answer.expand(torch.broadcast_shapes(q_index.shape, kv_index.shape))

    def signature(self, seq_len: int, kv_seq_len: int) -> str:
        """Its name, and a checksum of its answers at positions spread over the sequence."""
        q_index, kv_index = (_spread(length) for length in (seq_len, kv_seq_len))
        answers = self.allowed(q_index[:, None], kv_index[None, :]).cpu().numpy()
        return f"{self!r} with checksum {zlib.crc32(np.packbits(answers)):08x}"


def _spread(length: int) -> Tensor:
    """64 positions, evenly from the first to the last."""
    return torch.linspace(0, length - 1, 64, dtype=torch.float64).long()


def as_mask(mask: Mask | Callable[[Tensor, Tensor], Tensor]) -> Mask:
    """A mask as the caller gave it; a function becomes a `MaskMod`. TypeError for the rest."""
    if isinstance(mask, Mask):
        return mask
    if callable(mask) and not isinstance(mask, type):
        return MaskMod(mask)
    raise TypeError(
        f"mask is {mask!r}; it must be Full(), Causal(), SlidingWindow(size), Documents(lengths) "
        "or a function (q_index, kv_index) -> bool"
    )
