"""The four moves: who holds what before and after, what a message costs, and who waits for whom.

The moves are drawn as they are built out of hops: at hop h rank r sends to rank r + h, and receives
from rank r - h. After P - 1 hops everyone has met everyone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from .picture import BLACK, BLUE, PALETTE, VERMILLION, Picture, blank

MOVES = ("shift", "all_gather", "reduce_scatter", "all_to_all")
Table = dict[tuple[int, int], tuple[str, int]]  # (rank, slot) -> text, color


@dataclass(frozen=True)
class Holding:
    """What the ranks hold. left: their own, not yet sent; got: what is there to stay."""

    left: Table = field(default_factory=dict)
    got: Table = field(default_factory=dict)


def hops_of(move: str, ranks: int) -> int:
    """How many hops the move takes."""
    return 1 if move == "shift" else ranks - 1


def holding(move: str, ranks: int, hops: int) -> Holding:
    """The state of a move after some hops.

    A part is named by its number, and colored by the rank that it comes from; in reduce_scatter
    by the rank that it is for. A rank's own part moves over to `got` with the first hop.
    """
    return _HOLDING[move](ranks, hops)


def _shift(ranks: int, hops: int) -> Holding:
    if hops == 0:
        return Holding(left={(rank, 0): (str(rank), rank) for rank in range(ranks)})
    before = [(rank - 1) % ranks for rank in range(ranks)]
    return Holding(got={(rank, 0): (str(block), block) for rank, block in enumerate(before)})


def _all_gather(ranks: int, hops: int) -> Holding:
    own = {(rank, 0): (str(rank), rank) for rank in range(ranks)}
    got = {(rank, part): (str(part), part) for part, rank in _met(ranks, hops)}
    return Holding(own, got)


def _reduce_scatter(ranks: int, hops: int) -> Holding:
    left = {(rank, to): (f"+{to}", to) for rank, to in _to_meet(ranks, hops)}
    if hops == 0:
        return Holding(left)
    so_far = "Σ{}" if hops + 1 == ranks else f"{hops + 1}/{ranks}"
    return Holding(left, {(rank, 0): (so_far.format(rank), rank) for rank in range(ranks)})


def _all_to_all(ranks: int, hops: int) -> Holding:
    left = {(rank, to): (f"{rank}→{to}", rank) for rank, to in _to_meet(ranks, hops)}
    got = {(rank, source): (f"{source}→{rank}", source) for source, rank in _met(ranks, hops)}
    return Holding(left, got)


_HOLDING = {
    "shift": _shift,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _met(ranks: int, hops: int) -> list[tuple[int, int]]:
    """(sender, receiver) of the messages so far; from the first hop on with those to oneself."""
    near = range(hops + 1) if hops else ()
    return [(rank, (rank + far) % ranks) for rank in range(ranks) for far in near]


def _to_meet(ranks: int, hops: int) -> list[tuple[int, int]]:
    """(sender, receiver) of the messages still to come."""
    met = set(_met(ranks, hops))
    return [pair for pair in np.ndindex(ranks, ranks) if pair not in met]


def overview(ranks: int = 4) -> Picture:
    """The four moves, each before and after."""
    figure, panels = blank(7.2, 1.1 + 0.5 * ranks, nrows=2, ncols=len(MOVES), sharey=True)
    for move, (before, after) in zip(MOVES, panels.T, strict=True):
        _draw(before, holding(move, ranks, 0).left, ranks)
        _draw(after, holding(move, ranks, hops_of(move, ranks)).got, ranks)
        before.set_title(move, fontsize=10)
    for row, moment in zip(panels, ("before", "after"), strict=True):
        row[0].set_ylabel(moment)
        row[0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    finding = "Gathering makes copies, reducing makes sums, the other two only move"
    figure.suptitle(finding, fontsize=11)
    alt = (
        f"{ranks} ranks before and after each move. shift: one block each, then that of the rank "
        f"before. all_gather: one part each, then all {ranks} parts everywhere. reduce_scatter: "
        f"{ranks} contributions each, one for every rank, then one sum each. all_to_all: {ranks} "
        f"parts each, one for every rank, then one from every rank. {finding}."
    )
    return Picture(figure, alt)


def by_hops(move: str = "all_gather", ranks: int = 4, hops: int = 1) -> Picture:
    """A move under way: what is still to be sent, and what has been brought.

    hops: those done; more than the move takes are taken for all.
    """
    takes = hops_of(move, ranks)
    done = min(hops, takes)
    now = holding(move, ranks, done)
    figure, panels = blank(6.4, 1.2 + 0.3 * ranks, ncols=2, sharey=True)
    for panel, table, title in zip(
        panels, (now.left, now.got), ("own parts", "brought"), strict=True
    ):
        _draw(panel, table, ranks)
        panel.set_title(title, fontsize=10)
    panels[0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    parts = "1 part" if done == 1 else f"{done} parts"
    finding = f"{move}: after {done} of {takes} hops each rank has sent {parts}"
    figure.suptitle(finding, fontsize=11)
    held = len(now.got) // ranks
    alt = f"{ranks} ranks. {finding}, and holds {held} of what the move brings."
    return Picture(figure, alt)


def fitted(times: Mapping[int, float], alpha: float, beta: float) -> Picture:
    """Measured seconds of a message by its bytes, and the line alpha + bytes / beta.

    alpha: seconds; beta: bytes a second.
    """
    figure, axes = blank(7.2, 3.2)
    sizes = np.array(sorted(times))
    line = np.geomspace(sizes[0], sizes[-1], 100)
    axes.plot(sizes, [1e3 * times[n] for n in sizes], "o", color=BLUE, label="measured")
    axes.plot(line, 1e3 * (alpha + line / beta), color=VERMILLION, label="α + n/β, fitted")
    axes.axvline(alpha * beta, color=BLACK, linestyle="--", linewidth=0.8, label="n = α·β")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes[::2], [_bytes(n) for n in sizes[::2]])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes n of one message")
    axes.set_ylabel("time (ms, measured)")
    axes.legend()
    finding = f"{1e3 * alpha:.2f} ms to begin, then {beta / 1e9:.1f} GB/s"
    axes.set_title(f"One message: {finding}", fontsize=11)
    said = ", ".join(f"{_bytes(n)}: {1e3 * times[n]:.2f}" for n in sizes)
    alt = (
        f"Measured milliseconds of one message by its size: {said}. The fitted line says "
        f"{finding}; both halves are equal at {_bytes(alpha * beta)}."
    )
    return Picture(figure, alt)


def waits(pairs: Sequence[tuple[int, int]], ranks: int) -> Picture:
    """Ranks on a circle, with an arrow from each rank that waits to the rank that it waits for."""
    figure, axes = blank(3.6, 3.4)
    angle = np.pi / 2 - 2 * np.pi * np.arange(ranks) / ranks
    at = np.stack([np.cos(angle), np.sin(angle)], 1)
    for waiting, awaited in pairs:
        start, end = at[waiting], at[awaited]
        axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle="-|>", mutation_scale=16, shrinkA=24, shrinkB=24, color=BLACK
            )
        )
    for rank, (x, y) in enumerate(at):
        color = PALETTE[rank % len(PALETTE)]
        axes.plot(x, y, "o", markersize=34, color=color)
        axes.text(x, y, f"rank {rank}", ha="center", va="center", fontsize=8, color=_ink(color))
    axes.set(xlim=(-1.4, 1.4), ylim=(-1.3, 1.3), aspect="equal")
    axes.set_axis_off()
    closed = _closed(dict(pairs))
    finding = "The waiting closes a circle" if closed else "The waiting has an end"
    axes.set_title(finding, fontsize=11)
    said = ", ".join(f"rank {waiting} for rank {awaited}" for waiting, awaited in pairs)
    return Picture(figure, f"{ranks} ranks on a circle; who waits for whom: {said}. {finding}.")


def _closed(awaited: Mapping[int, int]) -> bool:
    """Whether somebody waits, over others, for itself."""
    for start in awaited:
        rank = awaited.get(start)
        for _ in awaited:
            if rank == start:
                return True
            rank = awaited.get(rank)
    return False


def _draw(panel, table: Table, ranks: int) -> None:
    for (rank, slot), (text, owner) in table.items():
        color = PALETTE[owner % len(PALETTE)]
        panel.add_patch(Rectangle((slot - 0.46, rank - 0.46), 0.92, 0.92, color=color))
        where = {"ha": "center", "va": "center", "fontsize": 7, "color": _ink(color)}
        panel.text(slot, rank, text, **where)
    panel.set(xlim=(-0.5, ranks - 0.5), ylim=(ranks - 0.5, -0.5))
    panel.set_xticks([])


def _bytes(size: float) -> str:
    """'16 KiB'."""
    for unit in ("bytes", "KiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.0f} MiB"


def _ink(ground: str) -> str:
    """Black or white, whichever is read more easily on `ground`."""
    red, green, blue = to_rgb(ground)
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
