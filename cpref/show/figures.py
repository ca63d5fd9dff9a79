"""The figures of the command line and of the lessons, each from data to a `Picture`."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from ..layout import LAYOUTS, place
from ..mask import Causal
from .picture import BLACK, BLUE, ORANGE, PALETTE, VERMILLION, Picture, blank


def losses(alone: Sequence[float], together: Sequence[float], ranks: int) -> Picture:
    """Training losses of one rank and of several, step by step, on top of each other."""
    figure, axes = blank()
    steps = range(1, len(alone) + 1)
    axes.plot(steps, alone, color=ORANGE, linewidth=5, label="1 rank")
    axes.plot(steps, together, color=BLUE, linewidth=1.5, marker=".", label=f"{ranks} ranks")
    apart = max(abs(a - b) / abs(a) for a, b in zip(alone, together, strict=True))
    axes.set_title(f"The losses of {ranks} ranks and of one differ by {apart:.0e} at most")
    axes.set_xlabel("training step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    alt = (
        f"Loss against training step for 1 rank and for {ranks} ranks: two lines that are at most "
        f"{apart:.0e} of the loss apart, from {alone[0]:.2f} at the first step to {alone[-1]:.2f} "
        "at the last."
    )
    return Picture(figure, alt)


def saved_activations(alone: int, by_strategy: dict[str, int], ranks: int) -> Picture:
    """Bytes saved for backward on one rank, and on the rank that saves most under each strategy."""
    figure, axes = blank()
    names = ["1 rank", *(f"{name}\n{ranks} ranks" for name in by_strategy)]
    sizes = [alone, *by_strategy.values()]
    colors = [ORANGE, *[BLUE] * len(by_strategy)]
    bars = axes.bar(names, [size / 2**20 for size in sizes], color=colors)
    axes.bar_label(bars, fmt="%.1f")
    axes.margins(y=0.12)
    most = max(by_strategy.values())
    axes.set_title(f"Each of {ranks} ranks saves at most {most / alone:.0%} of what one rank saves")
    axes.set_ylabel("saved for backward (MiB per rank)")
    alt = (
        f"Bars of the memory that one forward saves for backward: {alone / 2**20:.1f} MiB on one "
        f"rank, at most {most / 2**20:.1f} MiB on each of {ranks} ranks."
    )
    return Picture(figure, alt)


def ratios(tables: Sequence[dict], ranks: int) -> Picture:
    """Times of the contenders of a benchmark, as ratios to one process, for each problem."""
    figure, axes = blank(7.2, 0.8 + 0.28 * sum(len(table["results"]) for table in tables))
    names, lengths, colors = [], [], []
    for table, color in zip(tables, PALETTE * len(tables), strict=False):
        for result in table["results"][1:]:
            names.append(f"{result['name']}  ({table['seq_len']:,}, {table['dtype']})")
            lengths.append(result["ratio"])
            colors.append(color)
    bars = axes.barh(names, lengths, color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.axvline(1, color=BLACK, linewidth=0.8, linestyle="--")
    axes.margins(x=0.12, y=0.01)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    best = min(range(len(names)), key=lengths.__getitem__)
    axes.set_title(f"Fastest on {ranks} ranks: {names[best].split('  ')[0]}", fontsize=11)
    axes.set_xlabel("time / time of one process (log scale)")
    shown = "; ".join(f"{n} {x:.2f}" for n, x in zip(names, lengths, strict=True))
    return Picture(figure, f"Times as ratios to one process: {shown}.")


def layouts(seq_len: int, world_size: int) -> Picture:
    """Who holds which token under each layout, and how many causal pairs that means for a rank."""
    figure, (owners, work) = blank(7.2, 3.4, ncols=2, width_ratios=[3, 2])
    pairs = {name: _causal_pairs(seq_len, world_size, name) for name in LAYOUTS}
    grid = np.full((len(LAYOUTS), seq_len), -1)
    for row, name in enumerate(LAYOUTS):
        placement = place(seq_len, world_size, name)
        for rank in range(world_size):
            grid[row, placement.positions(rank)] = rank
    for row, position in np.ndindex(grid.shape):
        rank = grid[row, position]
        owners.broken_barh([(position, 0.94)], (row - 0.4, 0.8), color=PALETTE[rank % len(PALETTE)])
        if seq_len <= 24:
            color = _ink(PALETTE[rank % len(PALETTE)])
            where = {"ha": "center", "va": "center", "fontsize": 8}
            owners.text(position + 0.47, row, rank, color=color, **where)
    owners.set(xlim=(0, seq_len), ylim=(len(LAYOUTS) - 0.5, -0.5))
    owners.set_yticks(range(len(LAYOUTS)), LAYOUTS)
    owners.set_xlabel("position in the sequence")
    owners.set_title("Colour and number: the rank that holds it", fontsize=10)
    for row, name in enumerate(LAYOUTS):
        heights = np.linspace(-0.3, 0.3, world_size)
        colors = [PALETTE[rank % len(PALETTE)] for rank in range(world_size)]
        work.barh(row + heights, pairs[name], height=0.55 / world_size, color=colors)
    work.set(ylim=(len(LAYOUTS) - 0.5, -0.5), yticks=[])
    work.set_xlabel("causal pairs of each rank")
    last_by_first = {name: p[-1] / p[0] for name, p in pairs.items()}
    figure.suptitle(
        f"Contiguous gives the last rank {last_by_first['contiguous']:.1f} times the work of the "
        f"first, zigzag {last_by_first['zigzag']:.1f}"
    )
    dealt = "; ".join(
        f"{name}: rank 0 holds {_shown(place(seq_len, world_size, name).positions(0))}"
        for name in LAYOUTS
    )
    work_said = "; ".join(f"{name} {list(map(int, p))}" for name, p in pairs.items())
    alt = f"{seq_len} tokens on {world_size} ranks. {dealt}. Causal pairs per rank: {work_said}."
    return Picture(figure, alt)


def attention_matrix(seq_len: int, world_size: int, layout: str) -> Picture:
    """Which rank computes which (query, key) pair of causal attention, and whose keys it needs."""
    figure, axes = blank(5.2, 4.4)
    placement, owner = place(seq_len, world_size, layout), _owners(seq_len, world_size, layout)
    query, key = np.mgrid[:seq_len, :seq_len]
    seen, own = key <= query, owner[query] == owner[key]
    image = _colored_rows(owner, world_size)
    image[~own] = 0.45 * image[~own] + 0.55  # paler: the key lives on another rank
    image[~seen] = 1
    axes.imshow(image, extent=(-0.5, seq_len - 0.5, seq_len - 0.5, -0.5))
    for rank in range(world_size):
        row = placement.positions(rank)
        if len(row):
            axes.text(seq_len, row[len(row) // 2], f"rank {rank}", va="center", fontsize=8)
    away = (seen & ~own).sum() / seen.sum()
    axes.set_title(f"{away:.0%} of the pairs need a key of another rank", fontsize=11)
    axes.set_xlabel("key position")
    axes.set_ylabel("query position (colour: its rank)")
    alt = (
        f"Causal attention of {seq_len} tokens on {world_size} ranks, {layout}, as a matrix of "
        f"queries by keys, each row in the colour of its rank. {away:.0%} of the pairs are pale: "
        "their key lives on another rank."
    )
    return Picture(figure, alt)


def work(seq_len: int, world_size: int, layout: str) -> Picture:
    """Which rank computes which pair of causal attention, and its share of an even split."""
    figure, (matrix, shares) = blank(7.2, 3.4, ncols=2, width_ratios=[1, 1])
    image = _colored_rows(_owners(seq_len, world_size, layout), world_size)
    image[np.triu_indices(seq_len, 1)] = 1
    matrix.imshow(image, extent=(-0.5, seq_len - 0.5, seq_len - 0.5, -0.5))
    matrix.set_xlabel("key position")
    matrix.set_ylabel("query position (colour: its rank)")
    even = seq_len * (seq_len + 1) / 2 / world_size
    share = [pairs / even for pairs in _causal_pairs(seq_len, world_size, layout)]
    names = [f"rank {rank}" for rank in range(world_size)]
    bars = shares.barh(names, share, color=[PALETTE[r % len(PALETTE)] for r in range(world_size)])
    shares.axvline(1, color=BLACK, linewidth=0.8, linestyle="--", zorder=0)
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    shares.bar_label(bars, fmt="%.2f", padding=4, bbox=ground)
    shares.invert_yaxis()
    shares.set_xlim(0, max(share) * 1.25)
    shares.set_xlabel("causal pairs / even share")
    figure.suptitle(f"{layout}: the busiest rank has {max(share):.2f} times an even share")
    said = ", ".join(f"{name} {part:.2f}" for name, part in zip(names, share, strict=True))
    alt = (
        f"Causal attention of {seq_len} tokens on {world_size} ranks, {layout}, as a matrix of "
        "queries by keys, each row in the colour of its rank. Each rank's area as a share of an "
        f"even split: {said}."
    )
    return Picture(figure, alt)


def wrong_scores(wrong: dict[str, np.ndarray]) -> Picture:
    """Which causal scores come out wrong. wrong: by layout, (S, S) bool, queries by keys."""
    figure, panels = blank(7.2, 3.6, ncols=len(wrong), squeeze=False)
    shares, colors = {}, np.array([to_rgb(BLUE), to_rgb(VERMILLION)])
    for axes, (name, marked) in zip(panels[0], wrong.items(), strict=True):
        marked = np.asarray(marked, dtype=bool)
        seq_len = len(marked)
        image = colors[marked.astype(int)]
        image[np.triu_indices(seq_len, 1)] = 1
        axes.imshow(image, extent=(-0.5, seq_len - 0.5, seq_len - 0.5, -0.5))
        shares[name] = marked[np.tril_indices(seq_len)].mean()
        axes.set_title(f"{name}: {shares[name]:.0%} wrong", fontsize=10)
        axes.set_xlabel("key position")
        axes.set_ylabel("query position")
    patches = [Patch(color=BLUE, label="right"), Patch(color=VERMILLION, label="wrong")]
    panels[0, -1].legend(handles=patches, loc="upper right")
    first, *others = (f"{share:.0%} under {name}" for name, share in shares.items())
    said = ", ".join([first.replace(" under", " of the scores under"), *others])
    figure.suptitle(f"Local numbers spoil {said}", fontsize=11)
    alt = f"Matrices of queries by keys, each causal score right or wrong. Wrong: {said}."
    return Picture(figure, alt)


def learning(
    curves: dict[str, Sequence[float]], level: float, level_name: str, title: str
) -> Picture:
    """Losses against training steps, with a level to compare them with."""
    figure, axes = blank(7.2, 3.0)
    for (name, losses_of), color in zip(curves.items(), PALETTE, strict=False):
        axes.plot(range(1, len(losses_of) + 1), losses_of, color=color, linewidth=2, label=name)
    axes.axhline(level, color=BLACK, linewidth=0.8, linestyle="--", label=level_name)
    axes.set_title(title)
    axes.set_xlabel("training step")
    axes.set_ylabel("loss (nats)")
    axes.set_ylim(bottom=0)
    axes.legend()
    ends = "; ".join(f"{name} ends at {losses_of[-1]:.2f}" for name, losses_of in curves.items())
    return Picture(figure, f"Loss against training step. {level_name}: {level:.2f}; {ends}.")


def recall(recalled: dict[str, Sequence[float]], cut: int, chance: float) -> Picture:
    """The share of right answers, by the place of what is asked for.

    cut: the first position on the rank that asks; chance: the share that guessing gets.
    """
    figure, axes = blank(7.2, 3.0)
    before = {}
    for (name, shares), color in zip(recalled.items(), PALETTE, strict=False):
        style = {"drawstyle": "steps-mid", "linewidth": 5 if not before else 2}
        axes.plot(range(len(shares)), shares, color=color, label=name, **style)
        before[name] = sum(shares[:cut]) / cut
    axes.axvline(cut - 0.5, color=BLACK, linewidth=0.8)
    axes.text(cut - 0.7, 0.5, "other rank", ha="right", va="center")
    axes.text(cut - 0.3, 0.5, "own rank", ha="left", va="center")
    axes.axhline(chance, color=BLACK, linewidth=0.8, linestyle="--", label="guessing")
    said = ", ".join(f"{share:.0%} with {name}" for name, share in before.items())
    axes.set_title(f"From before the cut: {said}", fontsize=11)
    axes.set_xlabel("position of the digit in the sequence")
    axes.set_ylabel("share recalled")
    axes.set_ylim(0, 1.05)
    axes.legend(loc="center right")
    after = {name: sum(s[cut:]) / len(s[cut:]) for name, s in recalled.items()}
    same = ", ".join(f"{share:.0%} with {name}" for name, share in after.items())
    alt = (
        f"Share of digits recalled against their position. Before the cut at {cut}: {said}; "
        f"after it: {same}. Guessing: {chance:.0%}."
    )
    return Picture(figure, alt)


def _owners(seq_len: int, world_size: int, layout: str) -> np.ndarray:
    """(S,) int: the rank that holds each position."""
    placement, owner = place(seq_len, world_size, layout), np.empty(seq_len, dtype=int)
    for rank in range(world_size):
        owner[placement.positions(rank)] = rank
    return owner


def _colored_rows(owner: np.ndarray, world_size: int) -> np.ndarray:
    """(S, S, 3): a matrix of queries by keys, each row in the colour of its rank."""
    colors = np.array([to_rgb(PALETTE[rank % len(PALETTE)]) for rank in range(world_size)])
    return np.repeat(colors[owner][:, None], len(owner), axis=1)


def _ink(ground: str) -> str:
    """Black or white, whichever is read more easily on `ground`."""
    red, green, blue = to_rgb(ground)
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _causal_pairs(seq_len: int, world_size: int, layout: str) -> list[int]:
    """Keys that the queries of each rank see, summed."""
    placement = place(seq_len, world_size, layout)
    spans = [Causal().interval(placement.positions(rank), seq_len) for rank in range(world_size)]
    return [int((last - first).sum()) for first, last in spans]


def _shown(positions: np.ndarray) -> str:
    shown = ", ".join(str(p) for p in positions[:8])
    return shown + (", ..." if len(positions) > 8 else "")
