"""How much there is to compute, on which rank and in which step: pairs and tiles, counted.

The tiles are those that `cpref.tiles` plans for the strategies, so that what is counted here is
what runs. A rank is a row of the arrays, the owner of the keys a column:

    zigzag, causal, P = 4, in halves of L² pairs (L = S/4, the diagonal about)

             keys of 0    1    2    3
    rank 0           1    1    1    1
    rank 1           1    1    1    1       every rank has the same work, in every step
    rank 2           1    1    1    1
    rank 3           1    1    1    1

    contiguous: the diagonal 1, 2 below it, 0 above it
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from ..layout import Placement, place
from ..mask import Causal, Mask
from ..tiles import Job


@dataclass(frozen=True)
class Work:
    """What the tiles of each rank with the keys of each rank add up to, in one head.

    Each field is a (P, P) array, [rank, owner of the keys].
    pairs: queries and keys that attend; computed: pairs that kernels compute, which for masked
    tiles are all, attend or not; diagonal: rows of causal tiles; rows, keys: over all tiles; calls:
    the number of tiles.
    """

    pairs: np.ndarray
    computed: np.ndarray
    diagonal: np.ndarray
    rows: np.ndarray
    keys: np.ndarray
    calls: np.ndarray

    @property
    def ranks(self) -> int:
        return len(self.pairs)


def work(q: Placement, kv: Placement, mask: Mask) -> Work:
    """The work of queries and keys that are dealt out in this way, under this mask."""
    ranks = q.shards
    job = Job(q, kv, mask, scale=1.0, kv_heads=1, dtype=torch.float32)
    counted = np.zeros((len(fields(Work)), ranks, ranks), dtype=np.int64)
    for rank, owner in np.ndindex(ranks, ranks):
        for tile in job.tiles(rank, owner):
            rows, keys = tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start
            causal = tile.kind == "causal"
            computed = tile.pairs if causal else rows * keys
            counted[:, rank, owner] += (tile.pairs, computed, rows * causal, rows, keys, 1)
    return Work(*counted)


def attention_work(
    seq_len: int, ranks: int, layout: str = "zigzag", mask: Mask | None = None, joined: int = 1
) -> Work:
    """The work of self-attention of one sequence. mask: None means causal.

    joined: how many neighbouring ranks hold their tokens together (all under ulysses, a row under
    hybrid), each for its own part of the heads.
    """
    placement = place(seq_len, ranks, layout).join(joined)
    return work(placement, placement, Causal() if mask is None else mask)


def causal_zigzag(seq_len: int, ranks: int) -> Work:
    """The same as `attention_work(seq_len, ranks)` without looking at a position.

    For lengths of millions; seq_len must be divisible by twice the ranks.
    """
    if seq_len % (2 * ranks):
        raise ValueError(f"seq_len is {seq_len}; it must be divisible by {2 * ranks}, twice P")
    local = seq_len // ranks
    own = np.eye(ranks, dtype=bool)
    earlier = np.tri(ranks, k=-1, dtype=bool)  # the keys are of an earlier rank: half are seen
    triangle, half = local * (local + 1) // 2, local * local // 2
    return Work(
        pairs=np.where(own, triangle, half),
        computed=np.where(own, triangle, half),
        diagonal=np.where(own, local, 0),
        rows=np.where(own | earlier, local, local // 2),
        keys=np.where(earlier, local // 2, local),
        calls=np.ones((ranks, ranks), dtype=np.int64),
    )


def by_step(table: np.ndarray) -> np.ndarray:
    """[rank, owner] as [rank, step of the ring]: at step i rank r has the keys of rank r - i."""
    rank, step = np.indices(table.shape)
    return table[rank, (rank - step) % len(table)]
