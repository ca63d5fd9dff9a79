"""Who computes how much, and when: the ring's steps, the waits, and what a layout changes."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.patches import Patch

from ..layout import LAYOUTS, place
from ..mask import Causal, Documents, Full, Mask, SlidingWindow
from ..tiles import Job
from .picture import BLACK, BLUE, ORANGE, PALETTE, Picture, blank

_WORK = LinearSegmentedColormap.from_list("work", ["white", BLUE])
MASKS = {
    "causal": lambda seq_len: Causal(),
    "full": lambda seq_len: Full(),
    "window": lambda seq_len: SlidingWindow(max(1, seq_len // 8)),
    "documents": lambda seq_len: Documents(_documents(seq_len)),
}


def pairs(seq_len: int, ranks: int, layout: str, mask: Mask | None = None) -> np.ndarray:
    """(P, P) int: the pairs that attend at each rank (row) and step of the ring (column)."""
    placement = place(seq_len, ranks, layout)
    job = Job(placement, placement, mask or Causal(), 1.0, 1, torch.float32)
    table = np.zeros((ranks, ranks), dtype=np.int64)
    for rank, step in np.ndindex(ranks, ranks):
        table[rank, step] = sum(tile.pairs for tile in job.tiles(rank, (rank - step) % ranks))
    return table


def steps(seq_len: int, ranks: int, layout: str = "", mask: str = "causal") -> Picture:
    """How much each rank computes at each step of the ring, for one layout or for all three."""
    layouts = (layout,) if layout else LAYOUTS
    tables = {name: pairs(seq_len, ranks, name, MASKS[mask](seq_len)) for name in layouts}
    tile = (seq_len / ranks) ** 2
    figure, panels = blank(7.2, 1.5 + 0.27 * ranks, ncols=len(layouts), squeeze=False)
    for axes, (name, table) in zip(panels[0], tables.items(), strict=True):
        _grid(axes, table / tile)
        share = table.sum(1).max() * ranks / table.sum()
        axes.set_title(f"{name}: busiest rank {share:.2f} ×", fontsize=9)
    panels[0, 0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    worst = {name: table.sum(1).max() * ranks / table.sum() for name, table in tables.items()}
    heavy = max(worst, key=worst.__getitem__)
    figure.suptitle(
        f"Under {heavy} the busiest rank does {worst[heavy]:.2f} times an even share", fontsize=11
    )
    said = "; ".join(
        f"{name}: " + ", ".join(f"rank {r} {row}" for r, row in enumerate(_rounded(table / tile)))
        for name, table in tables.items()
    )
    alt = (
        f"Ranks by steps of the ring, {seq_len} tokens on {ranks} ranks, mask {mask}. Pairs at "
        f"each step in units of a whole tile: {said}."
    )
    return Picture(figure, alt)


def matrix_by_step(seq_len: int, ranks: int, mask: str = "causal") -> Picture:
    """At which step of the ring each (query, key) pair is computed, under each layout."""
    figure, panels = blank(7.2, 3.3, ncols=len(LAYOUTS), squeeze=False, sharey=True)
    colors = np.array([to_rgb(PALETTE[step % len(PALETTE)]) for step in range(ranks)])
    query, key = np.mgrid[:seq_len, :seq_len]
    first, last = MASKS[mask](seq_len).interval(np.arange(seq_len), seq_len)
    seen, used = (first[query] <= key) & (key < last[query]), {}
    for axes, name in zip(panels[0], LAYOUTS, strict=True):
        placement, owner = place(seq_len, ranks, name), np.empty(seq_len, dtype=int)
        for rank in range(ranks):
            owner[placement.positions(rank)] = rank
        step = (owner[query] - owner[key]) % ranks
        used[name] = np.unique(step[seen]).tolist()
        image = colors[step]
        image[~seen] = 1
        axes.imshow(image, extent=(-0.5, seq_len - 0.5, seq_len - 0.5, -0.5))
        if name != "striped":
            edges = np.flatnonzero(np.diff(owner)) + 0.5
            axes.hlines(edges, -0.5, seq_len - 0.5, color=BLACK, linewidth=0.5)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("key position")
    panels[0, 0].set_ylabel("query position")
    patches = [Patch(color=colors[step], label=f"step {step}") for step in range(ranks)]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(ranks, 8), fontsize=8)
    figure.suptitle("The layout decides at which step of the ring a pair is computed", fontsize=11)
    said = "; ".join(f"{name} at steps {steps}" for name, steps in used.items())
    alt = (
        f"Attention of {seq_len} tokens on {ranks} ranks, mask {mask}, as matrices of queries by "
        "keys, coloured by the step of the ring at which a pair is computed. Contiguous: blocks of "
        "a whole tile in diagonals. Zigzag: smaller blocks, each step in several places. Striped: "
        f"all steps everywhere. Computed: {said}."
    )
    return Picture(figure, alt)


def timelines(
    spans: Mapping[str, Sequence[Sequence[tuple[float, float]]]], unit: str = "s"
) -> Picture:
    """When each rank computed. spans: by name, for each rank the (begin, end) of each step."""
    ranks = len(next(iter(spans.values())))
    figure, panels = blank(7.2, 0.7 + len(spans) * (0.5 + 0.24 * ranks), nrows=len(spans))
    ends = {name: max(end for row in rows for _, end in row) for name, rows in spans.items()}
    idle = {
        name: [1 - sum(b - a for a, b in row) / ends[name] for row in rows]
        for name, rows in spans.items()
    }
    for axes, (name, rows) in zip(np.atleast_1d(panels), spans.items(), strict=True):
        for rank, row in enumerate(rows):
            for step, (begin, end) in enumerate(row):
                color = PALETTE[step % len(PALETTE)]
                axes.broken_barh([(begin, end - begin)], (rank - 0.4, 0.8), color=color)
        axes.set(xlim=(0, max(ends.values()) * 1.02), ylim=(ranks - 0.5, -0.5))
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
        axes.axvline(ends[name], color=BLACK, linewidth=0.8, linestyle="--")
        axes.set_title(f"{name}: rank 0 is idle {idle[name][0]:.0%} of the time", fontsize=9)
    np.atleast_1d(panels)[-1].set_xlabel(f"time ({unit}; colour: step of the ring; white: idle)")
    first, *others = ends
    said = ", ".join(f"{name} {ends[name] / ends[first]:.2f}" for name in others)
    figure.suptitle(f"Time in units of that of {first}: {said}", fontsize=11)
    parts = "; ".join(
        f"{name} ends after {ends[name]:.3f} {unit}, idle shares by rank "
        + ", ".join(f"{share:.0%}" for share in shares)
        for name, shares in idle.items()
    )
    return Picture(figure, f"Bars of computing time for each of {ranks} ranks: {parts}.")


def idle(shares: Mapping[str, Sequence[float]]) -> Picture:
    """Measured idle share of each rank, by layout."""
    figure, axes = blank(7.2, 2.8)
    ranks, width = len(next(iter(shares.values()))), 0.8 / len(shares)
    for i, (name, idle_of) in enumerate(shares.items()):
        where = [rank + (i - (len(shares) - 1) / 2) * width for rank in range(ranks)]
        percent = [100 * share for share in idle_of]
        bars = axes.bar(where, percent, width * 0.92, color=(ORANGE, BLUE)[i % 2], label=name)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylabel("idle (% of the time, measured)")
    axes.set_ylim(0, 100)
    axes.legend()
    first = ", ".join(f"{100 * idle_of[0]:.0f} % under {name}" for name, idle_of in shares.items())
    axes.set_title(f"Rank 0 idles {first}", fontsize=11)
    said = "; ".join(
        f"{name} " + ", ".join(f"rank {r} {100 * s:.0f} %" for r, s in enumerate(idle_of))
        for name, idle_of in shares.items()
    )
    return Picture(figure, f"Measured idle share of the time by rank: {said}.")


def busiest(seq_len: int, ranks: int) -> Picture:
    """The busiest rank's work over an even share, for each mask under each layout."""
    figure, axes = blank(7.2, 3.0)
    shares = {
        layout: [_busiest(pairs(seq_len, ranks, layout, mask(seq_len))) for mask in MASKS.values()]
        for layout in LAYOUTS
    }
    for i, (layout, of_masks) in enumerate(shares.items()):
        where = [mask + (i - 1) * 0.27 for mask in range(len(MASKS))]
        bars = axes.bar(where, of_masks, 0.25, color=PALETTE[i], label=layout)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color=BLACK, linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(MASKS)), MASKS)
    axes.set_ylabel("busiest rank / even share (counted)")
    axes.set_ylim(0, max(max(s) for s in shares.values()) * 1.3)
    axes.legend(loc="upper center", ncols=3)
    axes.set_title("Which layout is even depends on the mask", fontsize=11)
    said = "; ".join(
        f"{layout} " + ", ".join(f"{m} {s:.2f}" for m, s in zip(MASKS, of, strict=True))
        for layout, of in shares.items()
    )
    return Picture(figure, f"{seq_len} tokens on {ranks} ranks, the busiest rank: {said}.")


def _documents(seq_len: int) -> list[int]:
    """A long document after short ones: the kind of packing that defeats a fixed layout."""
    short = max(1, seq_len // 16)
    count = min(8, (seq_len - 1) // short)
    return [short] * count + [seq_len - short * count]


def _busiest(table: np.ndarray) -> float:
    return table.sum(1).max() * len(table) / table.sum()


def _grid(axes, shares: np.ndarray) -> None:
    axes.imshow(shares, cmap=_WORK, vmin=0, vmax=1.2, aspect="auto")
    ranks = len(shares)
    if ranks <= 5:  # why: more numbers take longer to draw than a slider may wait
        for (rank, step), share in np.ndenumerate(shares):
            where = {"ha": "center", "va": "center", "fontsize": 8}
            color = "white" if share > 0.6 else BLACK
            axes.text(step, rank, _short(share), color=color, **where)
    axes.set_xticks(range(ranks))
    axes.set_yticks([])
    axes.set_xlabel("step (number: share of a tile)", fontsize=8)


def _short(share: float) -> str:
    return "idle" if share == 0 else f"{share:.2f}".rstrip("0").rstrip(".")


def _rounded(table: np.ndarray) -> list[list[float]]:
    return np.round(table, 2).tolist()
