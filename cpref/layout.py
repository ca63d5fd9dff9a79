"""Where each token lives.

A layout deals the S positions of a sequence to P ranks, in chunks as even as they can be:

    S = 16, P = 4     rank 0          rank 1          rank 2          rank 3
    contiguous        0  1  2  3      4  5  6  7      8  9 10 11     12 13 14 15
    zigzag            0  1 14 15      2  3 12 13      4  5 10 11      6  7  8  9
    striped           0  4  8 12      1  5  9 13      2  6 10 14      3  7 11 15

Under a causal mask late positions see more keys than early ones. Zigzag gives every rank one early
chunk and one late chunk, striped gives every rank positions from everywhere, so both share the
work evenly; contiguous does not. The positions of a rank always increase.

Sources: zigzag, Llama 3 (arXiv 2407.21783), section 3.3.2; striped, Brandon et al. 2023
(arXiv 2311.09431).
"""

from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from .comm import Group, GroupLike, resolve
from .merge import accumulator_dtype

LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Placement:
    """A sequence dealt to ranks: the answer to "which positions does rank r hold?".

    seq_len: S, the global length; world_size: P; layout: one of `LAYOUTS`.
    joined: how many neighbouring ranks are looked at as one. With joined = 1 there are P shards;
    with joined = P there is one, the whole sequence. Ulysses and the hybrid strategy need this,
    because after their all-to-all a rank holds the tokens of its whole row of ranks.
    """

    seq_len: int
    world_size: int
    layout: str
    joined: int = 1

    @property
    def shards(self) -> int:
        return self.world_size // self.joined

    def positions(self, shard: int) -> np.ndarray:
        """(S_local,) int64, increasing: the global positions that `shard` holds."""
        return _positions(self, shard)

    def length(self, shard: int) -> int:
        return len(self.positions(shard))

    def lengths(self) -> list[int]:
        return [self.length(shard) for shard in range(self.shards)]

    def join(self, ranks: int) -> "Placement":
        """The same tokens, seen with every `ranks` neighbouring shards as one."""
        return Placement(self.seq_len, self.world_size, self.layout, self.joined * ranks)


@lru_cache(maxsize=4096)
def _positions(placement: Placement, shard: int) -> np.ndarray:
    first = shard * placement.joined
    dealt = [_dealt(placement, rank) for rank in range(first, first + placement.joined)]
    positions = np.sort(np.concatenate(dealt))
    positions.flags.writeable = False  # why: the array is shared by every later caller
    return positions


def _dealt(placement: Placement, rank: int) -> np.ndarray:
    seq_len, world_size = placement.seq_len, placement.world_size
    if placement.layout == "striped":
        return np.arange(rank, seq_len, world_size)
    if placement.layout == "contiguous":
        return _chunk(seq_len, world_size, rank)
    early = _chunk(seq_len, 2 * world_size, rank)
    late = _chunk(seq_len, 2 * world_size, 2 * world_size - 1 - rank)
    return np.concatenate([early, late])


def _chunk(seq_len: int, chunks: int, index: int) -> np.ndarray:
    """Chunk `index` of `chunks`; the first S mod chunks of them are one token longer."""
    size, longer = divmod(seq_len, chunks)
    start = index * size + min(index, longer)
    return np.arange(start, start + size + (index < longer))


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1, of Python's or of anybody else's kind."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 1


def place(seq_len: int, world_size: int, layout: str, *, name: str = "seq_len") -> Placement:
    """The `Placement` of a sequence, after a check of the arguments.

    Raises ValueError if the layout is unknown or seq_len is not a positive whole number.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    if not is_count(seq_len):
        raise ValueError(f"{name} is {seq_len!r}; it must be a whole number of at least 1 token")
    return Placement(int(seq_len), world_size, layout)


def local_positions(
    seq_len: int,
    *,
    group: GroupLike = None,
    layout: str = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """The global positions of this rank's tokens, (S_local,) int64, increasing.

    Feed them to whatever depends on the place of a token: rotary embeddings, labels, masks. A local
    `arange` is wrong on every rank but the first.

    seq_len: the global length S, any number from 1 on, divisible by P or not. With S < P some ranks
    hold no token and get an empty tensor.
    Raises ValueError if the layout is unknown, if seq_len < 1, or if this rank is not in the group.
    """
    comm = resolve(group)
    positions = place(seq_len, comm.size, layout).positions(comm.rank)
    return torch.tensor(positions, dtype=torch.int64, device=device)


def shard(x: Tensor, dim: int, *, group: GroupLike = None, layout: str = "zigzag") -> Tensor:
    """This rank's part of a tensor that every rank holds whole.

    x: any shape and dtype, its dimension `dim` of global length S; returned with S_local there, as
    a copy in the order of `local_positions`.
    Nothing is sent. The gradient is that of this rank's own x: zero at the positions of others.
    Raises ValueError if the layout is unknown, the dimension is empty, or this rank is not in the
    group; IndexError if x has no dimension `dim`.
    """
    comm = resolve(group)
    positions = place(x.shape[require_dim(x, dim)], comm.size, layout).positions(comm.rank)
    return x.index_select(dim, torch.tensor(positions, device=x.device))


def unshard(
    x: Tensor,
    dim: int,
    *,
    group: GroupLike = None,
    layout: str = "zigzag",
    seq_len: int | None = None,
) -> Tensor:
    """The whole tensor, from the parts that the ranks hold: the inverse of `shard`.

    x: this rank's part, S_local along `dim`; returned with the global length S there, the same on
    every rank. seq_len: S; None means P times the local length.
    The gradient sums what the ranks ask for: every rank's loss may depend on every part, so the
    gradient of this all-gather is a reduce-scatter.
    Raises ValueError, on every rank, if a part does not have the length that the layout deals to
    its rank, or if shapes and dtypes differ between ranks.

    Moves n·(P-1) bytes per rank for a part of n bytes, and as many again in backward.
    """
    comm = resolve(group)

    def check() -> tuple[dict[str, object], tuple[int, Placement]]:
        along = require_dim(x, dim)
        total = x.shape[along] * comm.size if seq_len is None else seq_len
        placement = place(total, comm.size, layout)
        require_length("x", x.shape[along], placement, comm.rank)
        shape = _resized(x.shape, along, total)
        terms = {
            "shape": shape,
            "dim": along,
            "layout": layout,
            "dtype": x.dtype,
            "requires_grad": torch.is_grad_enabled() and x.requires_grad,
        }
        return terms, (along, placement)

    along, placement = comm.agree("unshard", check)
    return _Unshard.apply(x, along, placement, comm)


def require_dim(x: Tensor, dim: int) -> int:
    """`dim` counted from the front; IndexError if x has no such dimension."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dim is {dim}, but x has shape {tuple(x.shape)}: {x.dim()} dimensions")
    return dim % x.dim()


def require_length(
    name: str,
    length: int,
    placement: Placement,
    rank: int,
    *,
    name_of_total: str = "seq_len",
    expected: str = "",
) -> None:
    """ValueError unless `length` is what the layout deals to `rank`. expected: how it ends."""
    dealt = placement.length(rank)
    if length != dealt:
        raise ValueError(
            f"{name} has {length} tokens on rank {rank}, but layout={placement.layout!r} deals "
            f"{dealt} of {name_of_total}={placement.seq_len} to it; pass this rank's shard, and "
            f"{name_of_total} where it is not {placement.world_size} times the local length"
            f"{expected}"
        )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, placement: Placement, group: Group) -> Tensor:
        ctx.dim, ctx.placement, ctx.group = dim, placement, group
        shapes = [_resized(x.shape, dim, length) for length in placement.lengths()]
        parts = group.all_gather(x, shapes, label="unshard").wait()
        order = np.concatenate([placement.positions(rank) for rank in range(group.size)])
        back = torch.tensor(np.argsort(order), device=x.device)
        return torch.cat(parts, dim).index_select(dim, back)

    @staticmethod
    def backward(ctx, grad: Tensor):
        wide = grad.to(accumulator_dtype(grad.dtype))
        parts = [
            wide.index_select(
                ctx.dim, torch.tensor(ctx.placement.positions(rank), device=grad.device)
            )
            for rank in range(ctx.group.size)
        ]
        mine = ctx.group.reduce_scatter(parts, label="unshard backward").wait()
        return mine.to(grad.dtype), None, None, None


def _resized(shape: torch.Size, dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])
