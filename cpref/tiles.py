"""The tile planner: which kernels turn one shard of queries and one shard of keys into a partial.

Here, and only here, layouts and masks meet. A query sees one interval of global positions, and the
positions of a shard increase; so it also sees one interval of the shard's keys, and both ends only
move forward from row to row. The planner walks along that staircase and cuts it into the cheapest
kernels that are right:

    nothing            no tile
    full               a rectangle, no mask
    causal             a square on the diagonal; strictly causal is the same one row further down
    masked             anything else, with its mask

Under a zigzag layout and a causal mask this gives the known schedule: the whole local tile causal;
half the keys of an earlier rank's block; half the queries against a later rank's block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch

from .layout import Placement
from .mask import Mask

_SMALL = 32  # rows under which neighbouring tiles are cheaper as one masked tile
_MASKED_ROWS = 512  # rows of a masked tile at most: its mask is held in memory
_MASKED_ROWS_AT_LEAST = 64


@dataclass(frozen=True)
class Tile:
    """One (queries, keys) pair given to a kernel, as indices into the local shards.

    kind: "full", "causal" (square, query i sees keys 0..i) or "masked".
    allowed: for a masked tile, gives its (rows, keys) bool array; else None.
    """

    rows: slice
    keys: slice
    kind: str
    allowed: Callable[[], np.ndarray] | None = None

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs attend: 4·D FLOPs each, forward, for each head."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        if self.kind == "full":
            return rows * keys
        if self.kind == "causal":
            return rows * (rows + 1) // 2
        return int(self.allowed().sum())


@dataclass(frozen=True)
class Job:
    """What one attention call computes, apart from its tensors.

    q, kv: how the queries and the keys are dealt out; mask: in global positions; scale: of the
    scores; kv_heads, dtype: of k and v as they were given; exact: tiles in float32 even for half
    precision inputs; overlap: whether a strategy computes between posting a move and waiting for
    it; return_lse: whether the lse is asked for.
    """

    q: Placement
    kv: Placement
    mask: Mask
    scale: float
    kv_heads: int
    dtype: torch.dtype
    exact: bool = False
    overlap: bool = True
    return_lse: bool = False

    def tiles(self, q_shard: int, kv_shard: int) -> tuple[Tile, ...]:
        """The tiles of one shard of queries against one shard of keys."""
        if not self.mask.is_band:  # why: kept plans would keep alive all that a function refers to
            rows, keys = self.q.positions(q_shard), self.kv.positions(kv_shard)
            return tuple(_unstructured(self.mask, rows, keys))
        return _plan(self.mask, self.q, self.kv, q_shard, kv_shard)

    def steps(self) -> tuple[int, ...]:
        """The distances at which some rank has work: rank r with the keys of rank r - distance.

        0 is always among them. Equal on all ranks, so that a ring can leave out the other hops.
        """
        if not self.mask.is_band:
            return tuple(range(self.q.shards))
        return _steps(self.mask, self.q, self.kv)

    def join(self, ranks: int) -> "Job":
        """The same job for ranks that hold the tokens of `ranks` neighbours at once."""
        return replace(self, q=self.q.join(ranks), kv=self.kv.join(ranks))


@lru_cache(maxsize=1024)
def _plan(mask: Mask, q: Placement, kv: Placement, q_shard: int, kv_shard: int) -> tuple[Tile, ...]:
    rows, keys = q.positions(q_shard), kv.positions(kv_shard)
    if not len(rows) or not len(keys):
        return ()
    band = mask.interval(rows, kv.seq_len)
    return tuple(_staircase(*(np.searchsorted(keys, end) for end in band)))


@lru_cache(maxsize=256)
def _steps(mask: Mask, q: Placement, kv: Placement) -> tuple[int, ...]:
    ranks = q.shards
    bands = [mask.interval(q.positions(rank), kv.seq_len) for rank in range(ranks)]

    def meet(rank: int, source: int) -> bool:
        first, last = (np.searchsorted(kv.positions(source), end) for end in bands[rank])
        return bool((first < last).any())

    away = (d for d in range(1, ranks) if any(meet(r, (r - d) % ranks) for r in range(ranks)))
    return (0, *away)


def _unstructured(mask: Mask, rows: np.ndarray, keys: np.ndarray) -> Iterator[Tile]:
    """Masked tiles over everything, for a mask of which nothing is known beforehand."""
    if not len(keys):
        return
    for start in range(0, len(rows), _MASKED_ROWS):
        chunk = slice(start, min(start + _MASKED_ROWS, len(rows)))
        allowed = partial(_evaluate, mask, rows[chunk], keys)
        yield Tile(chunk, slice(0, len(keys)), "masked", allowed)


def _evaluate(mask: Mask, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    # why: torch.tensor copies; the position arrays are shared and read-only
    return mask.allowed(torch.tensor(rows)[:, None], torch.tensor(keys)[None, :]).cpu().numpy()


def _staircase(first: np.ndarray, last: np.ndarray) -> Iterator[Tile]:
    """Tiles for rows of which row i sees the keys [first[i], last[i])."""
    for start, stop in _runs(first < last):
        for a, b, masked in _merge_small(_segments(first[start:stop], last[start:stop])):
            a, b = a + start, b + start
            if masked:
                yield from _masked(first, last, a, b)
            elif b - a > 1 and last[a] < last[a + 1]:
                yield from _growing(first, last, a, b)
            else:
                yield Tile(slice(a, b), slice(int(first[a]), int(last[a])), "full")


def _runs(seeing: np.ndarray) -> Iterator[tuple[int, int]]:
    """The maximal runs [start, stop) of rows that see anything."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], seeing, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _segments(first: np.ndarray, last: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """Cut rows where the pattern changes: (start, stop, whether a mask is needed).

    Between a row and the next the interval stays (a rectangle), or grows by one key at its end (a
    rectangle and a triangle), or does something else, for which there is no kernel without a mask.
    """
    same_start = np.diff(first) == 0
    grown = np.diff(last)
    link = np.where(same_start & (grown == 0), 0, np.where(same_start & (grown == 1), 1, 2))
    changes = np.append(np.flatnonzero(np.diff(link)) + 1, len(link)).tolist()
    row, rows = 0, len(first)
    for change in changes:
        if row > change or row == rows:
            continue
        if row < change and link[row] == 2:
            yield row, change, True  # why: the row after it may begin a pattern of its own
            row = change
        elif row < change:
            yield row, change + 1, False
            row = change + 1
    if row < rows:
        yield row, rows, False


def _merge_small(
    segments: Iterator[tuple[int, int, bool]],
) -> Iterator[tuple[int, int, bool]]:
    """Join neighbouring segments of a few rows: many tiny kernels cost more than one mask."""
    held: tuple[int, int, bool] | None = None
    for start, stop, masked in segments:
        if held and stop - start < _SMALL and held[1] - held[0] < _MASKED_ROWS_AT_LEAST:
            held = held[0], stop, True
            continue
        if held:
            yield held
        held = start, stop, masked
    if held:
        yield held


def _growing(first: np.ndarray, last: np.ndarray, a: int, b: int) -> Iterator[Tile]:
    """Rows that each see one key more than the row before: a rectangle, then a triangle."""
    corner = int(last[a]) - 1
    if first[a] < corner:
        yield Tile(slice(a, b), slice(int(first[a]), corner), "full")
    yield Tile(slice(a, b), slice(corner, corner + b - a), "causal")


def _masked(first: np.ndarray, last: np.ndarray, a: int, b: int) -> Iterator[Tile]:
    """Masked tiles of about as many rows as a row sees keys, so that half of each is of use."""
    width = int(last[a] - first[a])
    size = min(max(width, _MASKED_ROWS_AT_LEAST), _MASKED_ROWS)
    for start in range(a, b, size):
        rows = slice(start, min(start + size, b))
        keys = slice(int(first[start]), int(last[rows.stop - 1]))
        # why a copy: a view would keep the ends of all rows, as long as the plan is kept
        ends = first[rows].copy(), last[rows].copy()
        yield Tile(rows, keys, "masked", partial(_between, *ends, keys))


def _between(first: np.ndarray, last: np.ndarray, keys: slice) -> np.ndarray:
    index = np.arange(keys.start, keys.stop)
    return (first[:, None] <= index) & (index < last[:, None])
