"""What travels between the ranks: who holds what when, and how many bytes each strategy sends."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from ..layout import place
from ..measure.cost import Shape, backward_sent, forward_sent
from .picture import BLACK, BLUE, GREEN, ORANGE, PALETTE, PURPLE, VERMILLION, Picture, blank

_COLOR = {
    "ring": BLUE,
    "all_gather": ORANGE,
    "reduce_scatter": GREEN,
    "ulysses": VERMILLION,
    "hybrid": PURPLE,
}
_MARKER = {"ring": "o", "all_gather": "s", "reduce_scatter": "^", "ulysses": "D", "hybrid": "v"}

# For each strategy: what is gathered, and what every rank then has for every other, to be added up.
_GATHERED = {
    "all_gather": ("K,V", "dK,dV"),
    "reduce_scatter": ("Q", "out"),
}


def holders(strategy: str, ranks: int) -> Picture:
    """Which blocks each rank holds before and after an all-gather and a reduce-scatter.

    strategy: "all_gather" (K,V come, dK,dV go back) or "reduce_scatter" (Q comes, outs go back).
    """
    comes, goes = _GATHERED[strategy]
    own, everything = np.eye(ranks, dtype=bool), np.ones((ranks, ranks), dtype=bool)
    figure, axes = blank(7.2, 1.5 + 0.27 * ranks, ncols=4, sharey=True, squeeze=False)
    moments = [
        (f"{comes}: own shard", own, ""),
        (f"{comes}: all-gather", everything, ""),
        (f"{goes}: computed", everything, "+"),
        (f"{goes}: reduce-scatter", own, "Σ"),
    ]
    for panel, (title, held, sign) in zip(axes[0], moments, strict=True):
        for rank, block in zip(*np.nonzero(held), strict=True):
            color = PALETTE[block % len(PALETTE)]
            panel.add_patch(Rectangle((block - 0.46, rank - 0.46), 0.92, 0.92, color=color))
            where = {"ha": "center", "va": "center", "fontsize": 8, "color": _ink(color)}
            panel.text(block, rank, f"{sign}{block}", **where)
        panel.set(xlim=(-0.5, ranks - 0.5), ylim=(ranks - 0.5, -0.5), aspect="equal")
        panel.set_xticks(range(ranks))
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("block", fontsize=9)
    axes[0, 0].set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    figure.suptitle(f"Between the two moves each rank holds {ranks} blocks, not 1", fontsize=11)
    alt = (
        f"{ranks} ranks by {ranks} blocks, at four moments. Each rank begins with its own block of "
        f"{comes}; after the all-gather it holds all {ranks}. It computes a contribution to {goes} "
        f"for all {ranks} blocks; after the reduce-scatter it holds the sum for its own block."
    )
    return Picture(figure, alt)


def sent(
    heads: int, kv_heads: int, head_dim: int = 128, seq_len: int = 32768, most: int = 64
) -> Picture:
    """Bytes that a rank sends in forward and backward against P, by the formulas of `cost.py`.

    bfloat16, batch 1. Ulysses ends where its ranks are more than the query heads.
    """
    if heads % kv_heads:
        return _impossible(heads, kv_heads)
    figure, axes = blank(7.2, 3.4)
    counts = [2**n for n in range(1, most.bit_length())]
    shown = {}
    for strategy in ("ring", "all_gather", "reduce_scatter", "ulysses"):
        fits = [p for p in counts if strategy != "ulysses" or heads % p == 0]
        shown[strategy] = {
            p: _both(strategy, Shape(1, seq_len, heads, kv_heads, head_dim, p, 2)) for p in fits
        }
    _draw_bytes(axes, shown)
    axes.set_ylabel("sent per rank (MiB, modelled)")
    ratio, last = heads // kv_heads, counts[2]
    ring, ulysses = shown["ring"][last], shown["ulysses"].get(last)
    finding = (
        f"P = {last} is more than the {heads} heads: no Ulysses"
        if ulysses is None
        else f"at P = {last} Ulysses sends {ulysses / ring:.2f} times the ring's bytes"
    )
    axes.set_title(f"H/Hkv = {ratio}: {finding}", fontsize=11)
    said = "; ".join(
        f"{name} {', '.join(f'{p}: {size / 2**20:.0f}' for p, size in by_p.items())}"
        for name, by_p in shown.items()
    )
    alt = (
        f"MiB that a rank sends in forward and backward of one attention of {seq_len:,} tokens, "
        f"{heads} query and {kv_heads} key heads of {head_dim}, bfloat16, by ranks: {said}."
    )
    return Picture(figure, alt)


def counted(by_strategy: Mapping[str, Mapping[int, int]], title: str) -> Picture:
    """Counted bytes per rank against P, for each strategy."""
    figure, axes = blank(7.2, 3.2)
    _draw_bytes(axes, by_strategy)
    axes.set_ylabel("sent per rank (MiB, counted)")
    axes.set_title(title, fontsize=11)
    said = "; ".join(
        f"{name} {', '.join(f'{p}: {size / 2**20:.2f}' for p, size in by_p.items())}"
        for name, by_p in by_strategy.items()
    )
    return Picture(figure, f"Counted MiB that a rank sends, by number of ranks: {said}.")


def held(by_strategy: Mapping[str, Mapping[int, int]], whole: int) -> Picture:
    """Measured peak bytes of one attention against P, with the size of all K,V as a line."""
    figure, axes = blank(7.2, 3.2)
    for name, by_ranks in by_strategy.items():
        sizes = [size / whole for size in by_ranks.values()]
        axes.plot(
            list(by_ranks), sizes, color=_COLOR[name], marker=_MARKER[name], label=name, linewidth=2
        )
    axes.axhline(1, color=BLACK, linestyle="--", linewidth=0.8, label="all of K,V")
    ranks = sorted({p for by_ranks in by_strategy.values() for p in by_ranks})
    axes.set_xticks(ranks)
    axes.set_ylim(0)
    most = ranks[-1]
    shares = {name: by_ranks[most] / whole for name, by_ranks in by_strategy.items()}
    said = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    axes.set_title(f"At P = {most} a rank's peak, in units of all K,V: {said}", fontsize=11)
    axes.set_xlabel("ranks P")
    axes.set_ylabel("peak of new memory per rank\n(1 = all of K,V)")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    points = "; ".join(
        f"{name} {', '.join(f'{p}: {size / whole:.2f}' for p, size in by_ranks.items())}"
        for name, by_ranks in by_strategy.items()
    )
    alt = f"Measured peak of new memory per rank over the size of all K,V, by ranks: {points}."
    return Picture(figure, alt)


def moved_queries(
    heads: int = 8, kv_heads: int = 8, head_dim: int = 128, ranks: int = 8, kv_len: int = 32768
) -> Picture:
    """Forward bytes of all_gather and reduce_scatter against the number of queries, bfloat16."""
    if heads % kv_heads:
        return _impossible(heads, kv_heads)
    lengths = [ranks * 2**n for n in range((kv_len // ranks).bit_length())]
    shapes = [Shape(1, length, heads, kv_heads, head_dim, ranks, 2) for length in lengths]
    memory = Shape(1, kv_len, heads, kv_heads, head_dim, ranks, 2)
    queries = [forward_sent("reduce_scatter", shape).bytes for shape in shapes]
    keys = [forward_sent("all_gather", memory).bytes] * len(lengths)
    picture = crossing(lengths, {"all_gather": keys, "reduce_scatter": queries}, kv_len)
    picture.figure.axes[0].set_ylabel("sent per rank, forward (MiB, modelled)")
    return picture


def crossing(
    queries: Sequence[int], by_strategy: Mapping[str, Sequence[int]], kv_len: int
) -> Picture:
    """Bytes of the two gathering strategies against the queries, over a memory of kv_len keys."""
    figure, axes = blank(7.2, 3.2)
    for name, sizes in by_strategy.items():
        mib = [size / 2**20 for size in sizes]
        axes.plot(queries, mib, color=_COLOR[name], marker=_MARKER[name], label=name, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(queries[::2], [f"{length:,}" for length in queries[::2]])
    _plain_numbers(axes)
    axes.set_xlabel(f"query tokens Sq (the keys are {kv_len:,})")
    axes.set_ylabel("sent per rank, forward (MiB, counted)")
    axes.legend()
    columns = zip(queries, by_strategy["reduce_scatter"], by_strategy["all_gather"], strict=True)
    cheaper = [n for n, moving_q, moving_kv in columns if moving_q < moving_kv]
    finding = (
        f"Moving the queries is cheaper up to Sq = {cheaper[-1]:,} of {kv_len:,}"
        if cheaper
        else "Moving the queries is never cheaper here"
    )
    axes.set_title(finding, fontsize=11)
    said = "; ".join(
        f"{name} from {sizes[0] / 2**20:.4f} to {sizes[-1] / 2**20:.4f} MiB"
        for name, sizes in by_strategy.items()
    )
    alt = f"Bytes sent against {queries[0]} to {queries[-1]} query tokens: {said}. {finding}."
    return Picture(figure, alt)


def exchange(heads: int, seq_len: int, ranks: int, layout: str) -> Picture:
    """Heads by tokens, each field in the colour of the rank that holds it, before and after.

    The all-to-all of Ulysses, which turns all heads of my tokens into my heads of all tokens.
    """
    owner = np.empty(seq_len, dtype=int)
    for rank in range(ranks):
        owner[place(seq_len, ranks, layout).positions(rank)] = rank
    before = np.broadcast_to(owner, (heads, seq_len))
    figure, panels = blank(7.2, 1.2 + 0.22 * heads, ncols=2, sharey=True)
    shared = heads % ranks == 0
    after = np.repeat(np.arange(ranks), heads // ranks)[:, None] if shared else np.full((1, 1), -1)
    after = np.broadcast_to(after, (heads, seq_len))
    titles = (f"before: dealt by token, {layout}", "after: dealt by head")
    for axes, table, title in zip(panels, (before, after), titles, strict=True):
        _owned(axes, table)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("token position")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("query head")
    panels[0].set_yticks(range(heads))
    stays = (before == after).mean()
    finding = (
        f"One of {ranks} parts stays ({stays:.0%}); the rest changes hands"
        if shared
        else f"{heads} heads cannot be dealt to {ranks} ranks"
    )
    figure.suptitle(finding, fontsize=11)
    alt = (
        f"{heads} heads by {seq_len} tokens on {ranks} ranks, {layout}. Before the exchange each "
        f"rank holds a set of columns, all heads of its tokens. {finding}."
    )
    if shared:
        alt += f" Afterwards it holds {heads // ranks} whole rows, its heads of all tokens."
    return Picture(figure, alt)


def table_of_ranks(rows: int, neighbours: int) -> Picture:
    """The ranks of a hybrid: each row exchanges heads, each column is a ring."""
    figure, axes = blank(4.6, 1.2 + 0.55 * rows)
    for row, column in np.ndindex(rows, neighbours):
        color = PALETTE[column % len(PALETTE)]
        axes.add_patch(Rectangle((column - 0.42, row - 0.36), 0.84, 0.72, color=color))
        where = {"ha": "center", "va": "center", "fontsize": 9, "color": _ink(color)}
        axes.text(column, row, f"rank {row * neighbours + column}", **where)
    axes.set(xlim=(-0.5, neighbours - 0.5), ylim=(rows - 0.5, -0.5))
    axes.set_xticks(range(neighbours), [f"heads {column}" for column in range(neighbours)])
    axes.set_yticks(range(rows), [f"tokens {row}" for row in range(rows)])
    axes.set_xlabel("a column is a ring: K,V blocks travel down it")
    axes.set_ylabel("a row swaps heads")
    finding = f"{rows * neighbours} ranks: {neighbours} share the heads, a ring has {rows}"
    axes.set_title(finding, fontsize=11)
    alt = (
        f"A table of {rows} rows by {neighbours} columns of ranks. A row holds one part of the "
        f"tokens and exchanges heads; a column holds one part of the heads and is a ring. {finding}"
    )
    return Picture(figure, f"{alt}.")


def _impossible(heads: int, kv_heads: int) -> Picture:
    """What a reader sees whose sliders ask for more key heads than query heads."""
    figure, axes = blank(7.2, 1.2)
    axes.set_axis_off()
    finding = f"{heads} query heads cannot share {kv_heads} key heads"
    axes.set_title(finding, fontsize=11)
    return Picture(figure, f"No curve: {finding}; move the sliders to a multiple.")


def _both(strategy: str, shape: Shape) -> int:
    return (forward_sent(strategy, shape) + backward_sent(strategy, shape)).bytes


def _draw_bytes(axes, by_strategy: Mapping[str, Mapping[int, int]]) -> None:
    for name, by_ranks in by_strategy.items():
        mib = [size / 2**20 for size in by_ranks.values()]
        dashed = "--" if name == "all_gather" else "-"  # why: in sum it sends what the ring sends
        style = {"color": _COLOR[name], "marker": _MARKER[name], "linestyle": dashed}
        axes.plot(list(by_ranks), mib, label=name, zorder=3 if dashed == "--" else 2, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ranks = sorted({p for by_ranks in by_strategy.values() for p in by_ranks})
    axes.set_xticks(ranks, [str(p) for p in ranks])
    _plain_numbers(axes)
    axes.set_xlabel("ranks P")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _plain_numbers(axes) -> None:
    """0.2 and not 2 x 10^-1 on a logarithmic axis of MiB."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}" if high < 50 * low else NullFormatter())


def _owned(axes, table: np.ndarray) -> None:
    """A table of owners as colours and, where there is room, numbers. -1 is nobody."""
    colors = np.array([to_rgb(PALETTE[i % len(PALETTE)]) for i in range(max(1, table.max() + 1))])
    image = np.ones((*table.shape, 3))
    image[table >= 0] = colors[table[table >= 0]]
    axes.imshow(image, aspect="auto")
    if table.shape[1] > 20:
        return
    for (row, column), rank in np.ndenumerate(table):
        if rank >= 0:
            where = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(column, row, rank, color=_ink(PALETTE[rank % len(PALETTE)]), **where)


def _ink(ground: str) -> str:
    """Black or white, whichever is read more easily on `ground`."""
    red, green, blue = to_rgb(ground)
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
