"""The ring: which block is where at which step, what is computed there, and what it costs."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle

from ..layout import LAYOUTS, place
from ..mask import Causal
from ..tiles import Job, Tile
from .picture import BLACK, BLUE, GREEN, ORANGE, PALETTE, VERMILLION, Picture, blank

_ROWS = 8  # tokens of a rank in a drawing
_STYLE = ((ORANGE, "s"), (BLUE, "o"), (VERMILLION, "^"), (GREEN, "D"))


def source(rank: int, step: int, ranks: int) -> int:
    """The rank whose block is at `rank` after `step` hops, each to the next rank."""
    return (rank - step) % ranks


def kinds(ranks: int, layout: str, seq_len: int | None = None) -> list[list[str]]:
    """What each rank (row) computes at each step of the ring (column), under a causal mask."""
    placement = place(seq_len or _ROWS * ranks, ranks, layout)
    job = Job(placement, placement, Causal(), 1.0, 1, torch.float32)

    def kind(rank: int, step: int) -> str:
        at = source(rank, step, ranks)
        return _kind(job.tiles(rank, at), placement.length(rank), placement.length(at))

    return [[kind(rank, step) for step in range(ranks)] for rank in range(ranks)]


def _kind(tiles: Sequence[Tile], rows: int, keys: int) -> str:
    if not tiles:
        return "nothing"
    if len(tiles) > 1 or tiles[0].kind == "masked":
        return "masked"
    (tile,) = tiles
    all_rows = tile.rows.stop - tile.rows.start == rows
    all_keys = tile.keys.stop - tile.keys.start == keys
    if tile.kind == "causal":
        return "causal" if all_rows else "strictly causal"
    return "full" if all_rows and all_keys else "half the keys" if all_rows else "half the queries"


def holders(ranks: int) -> Picture:
    """Each rank's queries, and the K,V block that it holds at each step."""
    figure, axes = blank(7.2, 1.2 + 0.36 * ranks)
    for rank in range(ranks):
        _field(axes, -1.4, rank, PALETTE[rank % len(PALETTE)], f"Q {rank}")
        for step in range(ranks):
            block = source(rank, step, ranks)
            _field(axes, step, rank, PALETTE[block % len(PALETTE)], f"K,V {block}")
    for step in range(ranks - 1):
        for rank in range(ranks - 1):
            start, end = (step + 0.36, rank + 0.2), (step + 0.64, rank + 0.8)
            axes.add_patch(FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=9))
    axes.axvline(-0.7, color=BLACK, linewidth=0.8)
    axes.set(xlim=(-1.95, ranks - 0.5), ylim=(ranks - 0.5, -0.5))
    axes.set_xticks([-1.4, *range(ranks)], ["stays", *(f"step {i}" for i in range(ranks))])
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_title(f"After {ranks} steps every query has met every key", fontsize=11)
    rows = "; ".join(
        f"rank {r} keeps Q {r} and holds K,V "
        + ", ".join(str(source(r, i, ranks)) for i in range(ranks))
        for r in range(ranks)
    )
    alt = (
        f"A table of {ranks} ranks by {ranks} steps. {rows}. Arrows lead from each block to the "
        "next rank at the next step; from the last rank a block goes on to the first."
    )
    return Picture(figure, alt)


def tiles(ranks: int) -> Picture:
    """The pairs of each (rank, step) under a causal mask, as small matrices, for all layouts."""
    figure, panels = blank(7.2, 1.7 + 0.36 * ranks, ncols=len(LAYOUTS), squeeze=False, sharey=True)
    side, said, empty = _ROWS + 2, [], {}
    for axes, name in zip(panels[0], LAYOUTS, strict=True):
        placement = place(_ROWS * ranks, ranks, name)
        image = np.ones((side * ranks, side * ranks, 3))
        for rank, step in np.ndindex(ranks, ranks):
            block = source(rank, step, ranks)
            seen = placement.positions(rank)[:, None] >= placement.positions(block)
            color = np.array(to_rgb(PALETTE[block % len(PALETTE)]))
            cell = np.where(seen[..., None], color, 0.88)
            row, column = side * rank + 1, side * step + 1
            image[row : row + _ROWS, column : column + _ROWS] = cell
        axes.imshow(image, extent=(-0.5, ranks - 0.5, ranks - 0.5, -0.5))
        axes.set_xticks(range(ranks))
        axes.set_xlabel("step")
        table = kinds(ranks, name)
        empty[name] = sum(row.count("nothing") for row in table)
        axes.set_title(f"{name}: {empty[name]} of {ranks**2} tiles empty", fontsize=9)
        rows = "; ".join(f"rank {r} {', '.join(row)}" for r, row in enumerate(table))
        said.append(f"{name}: {rows}")
    panels[0, 0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    figure.suptitle("The positions decide what a tile is, not the ranks", fontsize=11)
    alt = (
        f"Tiles of {ranks} ranks at {ranks} steps under a causal mask, each a small matrix of "
        f"queries by keys. {'. '.join(said)}."
    )
    return Picture(figure, alt)


def moment(ranks: int, step: int, layout: str) -> Picture:
    """One step: the ring with its blocks, and the pairs that are computed now, were, or will be.

    A step beyond the last is the last.
    """
    step = min(step, ranks - 1)
    figure, (left, right) = blank(7.2, 3.6, ncols=2)
    table = kinds(ranks, layout)
    blocks = [source(rank, step, ranks) for rank in range(ranks)]
    _circle(left, [f"rank {r}\nK,V {b}" for r, b in enumerate(blocks)], blocks)
    placement = place(_ROWS * ranks, ranks, layout)
    owner = np.empty(placement.seq_len, dtype=int)
    for rank in range(ranks):
        owner[placement.positions(rank)] = rank
    query, key = np.mgrid[: placement.seq_len, : placement.seq_len]
    when, seen = source(owner[query], owner[key], ranks), key <= query
    colors = np.array([to_rgb(PALETTE[block % len(PALETTE)]) for block in range(ranks)])
    image = np.full((*when.shape, 3), 1.0)
    image[seen & (when < step)], image[seen & (when > step)] = 0.72, 0.92
    now = seen & (when == step)
    image[now] = colors[owner[key]][now]
    right.imshow(image)
    right.set_xlabel("key position")
    right.set_ylabel("query position")
    right.set_title("colour: now; dark grey: done; light: to come", fontsize=9)
    done = (seen & (when <= step)).sum() / seen.sum()
    figure.suptitle(
        f"{layout}: after step {step} of 0 to {ranks - 1}, {done:.0%} of the pairs are done",
        fontsize=11,
    )
    rows = "; ".join(f"rank {r} holds K,V {b}: {table[r][step]}" for r, b in enumerate(blocks))
    alt = (
        f"A ring of {ranks} ranks at step {step}, {layout}, causal. {rows}. After this step "
        f"{done:.0%} of the pairs of queries and keys are done."
    )
    return Picture(figure, alt)


def memory(peaks: Mapping[str, Mapping[int, int]], block: int) -> Picture:
    """Measured peaks in units of one K,V block against P, with as many tokens on each rank."""
    figure, axes = blank(7.2, 3.0)
    drawn = {
        name: {p: size / block for p, size in by_ranks.items()} for name, by_ranks in peaks.items()
    }
    _lines(axes, drawn)
    axes.set_ylim(0)
    axes.set_ylabel("peak of new memory\n(K,V blocks, measured)")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    first, last = min(drawn["ring"]), max(drawn["ring"])
    axes.set_title(
        f"P from {first} to {last}: the ring's peak stays at {drawn['ring'][last]:.1f} blocks, "
        f"all_gather's reaches {drawn['all_gather'][last]:.1f}",
        fontsize=11,
    )
    return Picture(figure, f"Measured peak in blocks by number of ranks: {_said(drawn, '.2f')}.")


def sums(ranks: int) -> Picture:
    """Which tiles add up to which gradient: rows to dQ, columns to dK,dV."""
    figure, axes = blank(7.2, 1.4 + 0.42 * ranks)
    for rank, block in np.ndindex(ranks, ranks):
        step = source(rank, block, ranks)
        color = PALETTE[step % len(PALETTE)]
        _field(axes, block, rank, color, f"step {step}")
    for i in range(ranks):
        axes.text(ranks - 0.3, i, f"→ dQ {i}, stays", va="center", fontsize=9)
        axes.text(i, ranks - 0.3, f"↓\ndK,dV {i}", ha="center", va="top", fontsize=9)
    axes.set(xlim=(-0.5, ranks + 0.9), ylim=(ranks + 0.5, -0.5))
    axes.set_xticks(range(ranks), [f"K,V {block}" for block in range(ranks)])
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.xaxis.tick_top()
    axes.spines[:].set_visible(False)
    axes.set_title("A row of tiles is one rank's own; a column is everybody's", fontsize=11)
    alt = (
        f"A table of tiles, {ranks} ranks with their queries by {ranks} K,V blocks, each with the "
        "step of the ring at which it is computed. The tiles of a row add up to the dQ of that "
        "rank, which stays there. The tiles of a column, computed on all ranks at different steps, "
        "add up to the dK,dV of that block."
    )
    return Picture(figure, alt)


def ways_home(ranks: int, step: int | None = None) -> Picture:
    """Two schedules of the backward, each with the tiles whose dK,dV have been added up so far.

    step: the columns up to it are drawn in colour, the later ones are pale; None: all in colour.
    """
    last = ranks if step is None else min(step, ranks)
    figure, panels = blank(7.2, 1.7 + 0.36 * ranks, ncols=2, sharey=True)
    middle = [f"step {hop}" for hop in range(1, ranks)]
    schedules = [
        (f"own tile first: {ranks} hops", [*range(ranks), 0], ["own", *middle, "home"]),
        (f"own tile last: {ranks - 1} hops", [*range(1, ranks), 0], [*middle, "own"]),
    ]
    for axes, (title, hops, names) in zip(panels, schedules, strict=True):
        for rank, column in np.ndindex(ranks, len(hops)):
            block = source(rank, hops[column], ranks)
            color = PALETTE[block % len(PALETTE)] if column <= last else "#E6E6E6"
            _field(axes, column, rank, color, f"{block}: {min(column + 1, ranks)}")
        axes.set_xticks(range(len(hops)), names, fontsize=8)
        axes.set(xlim=(-0.5, len(hops) - 0.5), ylim=(ranks - 0.5, -0.5))
        axes.set_title(title, fontsize=10)
    panels[0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    figure.suptitle("A rank that computes its own tile last saves dK,dV one hop", fontsize=11)
    alt = (
        f"Two schedules of {ranks} ranks. A field says which block is here and to how many tiles' "
        f"gradients its dK,dV have grown. Own tile first: {ranks} steps, then a last hop brings "
        f"all {ranks} home, {ranks} hops in all. Own tile last: the block sets out at once, "
        f"{ranks - 1} steps elsewhere, and the hop home happens during the own tile: {ranks - 1} "
        f"hops. In colour: the first {last + 1} columns."
    )
    return Picture(figure, alt)


def wrong(errors: Mapping[str, Sequence[float]]) -> Picture:
    """Relative errors of dq, dk, dv for the right version of a backward and for wrong ones."""
    figure, axes = blank(7.2, 3.0)
    width = 0.8 / len(errors)
    for i, (name, values) in enumerate(errors.items()):
        where = [n + (i - (len(errors) - 1) / 2) * width for n in range(3)]
        bars = axes.bar(
            where, values, width * 0.92, color=(BLUE, ORANGE, VERMILLION)[i], label=name
        )
        axes.bar_label(bars, fmt="%.2g", fontsize=8)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(3), ["dq", "dk", "dv"])
    axes.set_ylabel("relative L2 error\nagainst float64")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    least = min(min(values) for values in list(errors.values())[1:])
    axes.set_title(f"The wrong versions run, and are off by {least:.0%} or more", fontsize=11)
    said = "; ".join(f"{n}: {', '.join(f'{x:.1e}' for x in xs)}" for n, xs in errors.items())
    return Picture(figure, f"Relative errors of dq, dk and dv against float64. {said}.")


def accumulation(errors: Mapping[str, Mapping[int, float]]) -> Picture:
    """Relative error of dk against P, for each dtype that dK,dV travel in. Measured."""
    figure, axes = blank(7.2, 3.0)
    _lines(axes, errors)
    axes.set_xscale("log", base=2)
    ranks = list(next(iter(errors.values())))
    axes.set_xticks(ranks, [str(p) for p in ranks])
    axes.set_ylim(0)
    axes.set_ylabel("relative L2 error of dk\nagainst float64 (measured)")
    axes.legend(title="dK,dV travel in")
    growth = {name: by_ranks[ranks[-1]] / by_ranks[ranks[0]] for name, by_ranks in errors.items()}
    found = ", ".join(f"{times:.1f} times in {name}" for name, times in growth.items())
    axes.set_title(f"P from {ranks[0]} to {ranks[-1]}: the error grows {found}", fontsize=11)
    return Picture(figure, f"Relative error of dk by number of ranks: {_said(errors, '.2e')}.")


def _circle(axes, labels: Sequence[str], blocks: Sequence[int]) -> None:
    """Ranks on a circle, clockwise from the top, each in the colour of its block, with arrows."""
    ranks = len(labels)
    angles = np.pi / 2 - 2 * np.pi * np.arange(ranks) / ranks
    points = np.stack([np.cos(angles), np.sin(angles)], 1)
    for rank in range(ranks if ranks > 1 else 0):
        start, end = points[rank], points[(rank + 1) % ranks]
        style = {"arrowstyle": "->", "mutation_scale": 12, "connectionstyle": "arc3,rad=-0.2"}
        axes.add_patch(FancyArrowPatch(start, end, shrinkA=24, shrinkB=24, **style))
    for (x, y), label, block in zip(points, labels, blocks, strict=True):
        color = PALETTE[block % len(PALETTE)]
        box = {"boxstyle": "round", "facecolor": color, "edgecolor": "none"}
        axes.text(x, y, label, ha="center", va="center", fontsize=8, color=_ink(color), bbox=box)
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.35, 1.35), aspect="equal")
    axes.set_axis_off()


def _field(axes, x: float, y: float, color: str, text: str) -> None:
    axes.add_patch(Rectangle((x - 0.4, y - 0.4), 0.8, 0.8, color=color))
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=_ink(color))


def _lines(axes, by_name: Mapping[str, Mapping[int, float]]) -> None:
    for (name, by_ranks), (color, marker) in zip(by_name.items(), _STYLE, strict=False):
        xs, ys = list(by_ranks), list(by_ranks.values())
        axes.plot(xs, ys, color=color, marker=marker, linewidth=2, label=name)
    axes.set_xticks(sorted({p for by_ranks in by_name.values() for p in by_ranks}))
    axes.set_xlabel("ranks P")


def _said(by_name: Mapping[str, Mapping[int, float]], form: str) -> str:
    return "; ".join(
        f"{name} {', '.join(f'{p}: {x:{form}}' for p, x in by_ranks.items())}"
        for name, by_ranks in by_name.items()
    )


def _ink(ground: str) -> str:
    """Black or white, whichever is read more easily on `ground`."""
    red, green, blue = to_rgb(ground)
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
