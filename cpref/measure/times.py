"""How long one attention takes: an alpha-beta model of every strategy, step by step.

A message of n bytes takes alpha + n/beta seconds (`Link`); a tile takes a time for its call, its
pairs and its rows (`Rates`). The schedule is that of the strategy's own loop: what is posted, what
is computed meanwhile, and what is waited for. So a ring step that overlaps takes as long as the
longer of the two, and an uneven layout makes ranks wait for each other, as in a run:

                     step 0              step 1
    rank 0     compute |wait for KV 3| compute |
    link 3-0   KV 3 ................|           the longer of the two decides

All ranks start together. Everything here is modelled, nothing is measured.

Source of the model of a message: Hockney 1994, The communication challenge for MPP, Parallel
Computing 20(3).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .cost import Sent, Shape
from .work import Work, by_step


@dataclass(frozen=True)
class Link:
    """What joins two ranks. latency: seconds of a message, alpha; bandwidth: bytes per second in
    one direction, beta."""

    latency: float
    bandwidth: float

    def seconds(self, size: float, messages: int = 1) -> float:
        """Of `size` bytes in all, in so many messages, one after the other."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Rates:
    """How fast a rank attends, in forward or in backward: seconds for each thing.

    pair: of a pair that is computed, in one head and for each dimension of it; edge: of a row of a
    causal tile, likewise, for kernels compute whole blocks along the diagonal; number: of adding
    one number of a result (out, or dq, dk, dv) to a sum; call: of a tile's kernel; start: of
    everything that an attention does beside tiles and moves.
    """

    pair: float
    edge: float = 0.0
    number: float = 0.0
    call: float = 0.0
    start: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What one attention runs on. row: what joins the ranks of a row under hybrid, if it is faster
    than the link between rows."""

    forward: Rates
    backward: Rates
    link: Link
    row: Link | None = None


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward or a backward pass, and what the rank that sends most sends.

    compute: of the rank with most to compute, if nothing had to be waited for; transfer: of its
    moves, if nothing were computed; total: until the last rank is done.
    """

    compute: float
    transfer: float
    total: float
    sent: Sent

    @property
    def exposed(self) -> float:
        """Seconds of waiting: for bytes, and for ranks that have more to do."""
        return self.total - self.compute


def forward_pass(
    strategy: str, shape: Shape, work: Work, machine: Machine, *, overlap: bool = True
) -> Pass:
    """The forward of a strategy. work: of the shape's ranks; with joined=ranks for ulysses, with
    joined=neighbours for hybrid."""
    v_dim = shape.v_head_dim or shape.head_dim
    outs = shape.batch * _share(shape.heads, shape, work) * v_dim * work.rows
    tiles = _Tiles.of(strategy, machine.forward, shape, work, outs)
    return _run(_FORWARD[strategy], shape, tiles, machine, overlap)


def backward_pass(
    strategy: str, shape: Shape, work: Work, machine: Machine, *, overlap: bool = True
) -> Pass:
    """The backward, which moves and computes more."""
    width = shape.head_dim + (shape.v_head_dim or shape.head_dim)
    dq = _share(shape.heads, shape, work) * shape.head_dim * work.rows
    dkv = _share(shape.kv_heads, shape, work) * width * work.keys
    tiles = _Tiles.of(strategy, machine.backward, shape, work, shape.batch * (dq + dkv))
    return _run(_BACKWARD[strategy], shape, tiles, machine, overlap)


def _share(heads: int, shape: Shape, work: Work) -> float:
    """Heads that a rank computes: a part of them, where the ranks of a row share them."""
    return max(1.0, heads * work.ranks / shape.ranks)


@dataclass(frozen=True)
class _Tiles:
    """start: seconds before the first tile; seconds: (P, P), of a rank's tiles with the shard of
    each rank; steps: those of the ring at which some rank has any, the first one always."""

    start: float
    seconds: np.ndarray
    steps: list[int]

    @staticmethod
    def of(strategy: str, rates: Rates, shape: Shape, work: Work, added: np.ndarray) -> "_Tiles":
        """added: the numbers that are added to sums."""
        pairs = rates.pair * work.computed + rates.edge * work.diagonal
        heads = shape.batch * _share(shape.heads, shape, work)
        seconds = rates.call * work.calls + heads * shape.head_dim * pairs + rates.number * added
        if strategy == "reduce_scatter":  # why: a rank computes everyone's queries, over its keys
            seconds = seconds.T
        busy = by_step(work.calls).any(axis=0)
        return _Tiles(rates.start, seconds, [0, *(np.flatnonzero(busy[1:]) + 1).tolist()])

    @property
    def own(self) -> np.ndarray:
        return np.diagonal(self.seconds)

    @property
    def others(self) -> np.ndarray:
        return self.seconds.sum(1) - self.own

    def at(self) -> np.ndarray:
        """(P, steps): the seconds at each step of the ring."""
        return by_step(self.seconds)[:, self.steps]


class _Moves:
    """The links of all ranks at once: when what was posted arrives, and what it came to."""

    def __init__(self, link: Link, ranks: int, row: Link):
        self._link, self._row = link, row
        self._busy = np.zeros(ranks)
        self._next = np.roll(np.arange(ranks), -1)
        self._previous = np.roll(np.arange(ranks), 1)
        self.seconds, self.bytes, self.messages = 0.0, 0, 0

    def shift(self, now: np.ndarray, size: int) -> np.ndarray:
        """Each rank sends to the next at its time `now`; when each has sent, and has received."""
        begin = np.maximum(self._busy, np.maximum(now, now[self._next]))
        self._busy = begin + self._count(size, 1, self._link)
        return np.maximum(self._busy, self._busy[self._previous])

    def collective(self, now: np.ndarray, size: int, others: int) -> np.ndarray:
        """All ranks together: each sends `size` bytes to each of `others`."""
        return self._together(now, size, others, self._link)

    def within_rows(self, now: np.ndarray, size: int, others: int) -> np.ndarray:
        """The same among the ranks of a row."""
        return self._together(now, size, others, self._row)

    def _together(self, now: np.ndarray, size: int, others: int, link: Link) -> np.ndarray:
        start = max(now.max(), self._busy.max())
        self._busy = np.full_like(now, start + self._count(size * others, others, link))
        return self._busy

    def _count(self, size: int, messages: int, link: Link) -> float:
        seconds = link.seconds(size, messages)
        self.seconds += seconds
        self.bytes += size
        self.messages += messages
        return seconds


Schedule = Callable[[Shape, _Tiles, _Moves, np.ndarray, bool], np.ndarray]


def _run(schedule: Schedule, shape: Shape, tiles: _Tiles, machine: Machine, overlap: bool) -> Pass:
    ranks = len(tiles.seconds)
    moves = _Moves(machine.link, ranks, machine.row or machine.link)
    done = schedule(shape, tiles, moves, np.full(ranks, tiles.start), overlap)
    return Pass(
        compute=float(tiles.start + tiles.seconds.sum(1).max()),
        transfer=moves.seconds,
        total=float(done.max()),
        sent=Sent(moves.bytes, moves.messages),
    )


# Each schedule takes the times `now` at which the ranks start, and whether it overlaps, and gives
# the times at which they are done. They follow the loops of `cpref.strategies` line by line.


def _ring_forward(
    shape: Shape, tiles: _Tiles, moves: _Moves, now: np.ndarray, overlap: bool
) -> np.ndarray:
    *before_last, last = tiles.at().T
    for seconds in before_last:
        arriving = moves.shift(now, shape.kv * shape.bytes_each)
        now = np.maximum((now if overlap else arriving) + seconds, arriving)
    return now + last


def _ring_backward(
    shape: Shape, tiles: _Tiles, moves: _Moves, now: np.ndarray, overlap: bool
) -> np.ndarray:
    own, *away = tiles.at().T
    block, grads, behind = shape.kv * shape.bytes_each, shape.kv * shape.sum_bytes, now
    if away:
        arriving = moves.shift(now, block)
    for following, seconds in enumerate(away, start=1):
        now = np.maximum(now, arriving)
        if following < len(away):
            arriving = moves.shift(now, block)
            now = now if overlap else arriving
        now = np.maximum(now + seconds, behind)
        behind = moves.shift(now, grads)
        now = now if overlap else behind
    return np.maximum(now + own, behind)


def _all_gather_forward(
    shape: Shape, tiles: _Tiles, moves: _Moves, now: np.ndarray, overlap: bool
) -> np.ndarray:
    arrived = moves.collective(now, shape.kv * shape.bytes_each, shape.ranks - 1)
    return _own_meanwhile(tiles, now, arrived, overlap)


def _all_gather_backward(
    shape: Shape, tiles: _Tiles, moves: _Moves, now: np.ndarray, overlap: bool
) -> np.ndarray:
    now = _all_gather_forward(shape, tiles, moves, now, overlap)
    return moves.collective(now, shape.kv * shape.sum_bytes, shape.ranks - 1)


def _reduce_scatter_forward(
    shape: Shape, tiles: _Tiles, moves: _Moves, now: np.ndarray, overlap: bool
) -> np.ndarray:
    e, a, others = shape.bytes_each, shape.sum_bytes, shape.ranks - 1
    arrived = moves.collective(now, shape.q * e, others)
    now = _own_meanwhile(tiles, now, arrived, overlap)
    now = moves.collective(now, shape.lse * shape.ranks * a, others)
    return moves.collective(now, shape.out * a, others)


def _reduce_scatter_backward(
    shape: Shape, tiles: _Tiles, moves: _Moves, now: np.ndarray, overlap: bool
) -> np.ndarray:
    e, a, others = shape.bytes_each, shape.sum_bytes, shape.ranks - 1
    moves.collective(now, (shape.q + shape.out) * e, others)
    arrived = moves.collective(now, 2 * shape.lse * a, others)
    now = _own_meanwhile(tiles, now, arrived, overlap)
    return moves.collective(now, shape.q * a, others)


def _own_meanwhile(
    tiles: _Tiles, now: np.ndarray, arrived: np.ndarray, overlap: bool
) -> np.ndarray:
    """The tile of a rank's own shard while the others' shards are under way, then the rest."""
    now = np.maximum(now + tiles.own, arrived) if overlap else arrived + tiles.own
    return now + tiles.others


def _row(forward: bool, ring: Schedule) -> Schedule:
    """All-to-all among the ranks of a row, the ring among rows, all-to-all back.

    The ranks of a row all have the same to do, so there is one entry for each row. Under ulysses
    there is one row, and a ring of one rank moves nothing.
    """

    def schedule(
        shape: Shape, tiles: _Tiles, moves: _Moves, now: np.ndarray, overlap: bool
    ) -> np.ndarray:
        row = shape.ranks // len(tiles.seconds)
        copies = row // math.gcd(shape.kv_heads, row)
        inputs = shape.q + shape.kv * copies
        wire = shape.bytes_each if forward or copies == 1 else shape.sum_bytes
        before, after = (inputs, shape.out) if forward else (shape.out, inputs)
        now = moves.within_rows(now, before * shape.bytes_each // row, row - 1)
        within = replace(shape, kv_heads=shape.kv_heads * copies)
        now = ring(within, tiles, moves, now, overlap)
        return moves.within_rows(now, after * wire // row, row - 1)

    return schedule


_FORWARD: dict[str, Schedule] = {
    "ring": _ring_forward,
    "all_gather": _all_gather_forward,
    "reduce_scatter": _reduce_scatter_forward,
    "ulysses": _row(True, _ring_forward),
    "hybrid": _row(True, _ring_forward),
}
_BACKWARD: dict[str, Schedule] = {
    "ring": _ring_backward,
    "all_gather": _all_gather_backward,
    "reduce_scatter": _reduce_scatter_backward,
    "ulysses": _row(False, _ring_backward),
    "hybrid": _row(False, _ring_backward),
}
