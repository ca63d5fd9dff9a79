"""What a long sequence costs: bytes saved for backward, against its length and against the rest."""

from collections.abc import Mapping

import numpy as np

from ..measure.shapes import model_shape
from .picture import BLACK, BLUE, GREEN, ORANGE, PALETTE, VERMILLION, Picture, blank

_MIB = 2**20


def growth(saved: Mapping[int, int], held: int) -> Picture:
    """Saved bytes against the length, and what the model holds whatever the length is.

    saved: bytes by tokens, measured; held: bytes of parameters, gradients and optimizer state.
    """
    figure, axes = blank(7.2, 3.2)
    tokens, sizes = list(saved), [size / _MIB for size in saved.values()]
    axes.plot(tokens, sizes, "o-", color=BLUE, label="saved for backward")
    axes.axhline(held / _MIB, color=ORANGE, label="parameters, gradients, optimizer")
    crossing = float(np.interp(held / _MIB, sizes, tokens))
    axes.axvline(crossing, color=BLACK, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("MiB (measured)")
    axes.legend(fontsize=9)
    near = f"{crossing:,.0f}"
    axes.set_title(f"From about {near} tokens on, most of the memory is activations", fontsize=11)
    said = ", ".join(f"{n:,}: {size / _MIB:.1f}" for n, size in saved.items())
    alt = (
        f"MiB saved for backward by number of tokens: {said}; a straight line. Parameters, "
        f"gradients and optimizer hold {held / _MIB:.1f} MiB. The lines cross near {near} tokens."
    )
    return Picture(figure, alt)


def by_part(numbers: Mapping[str, float]) -> Picture:
    """What one block saves for each token, by the part of the block that saves it.

    numbers: how many float32 numbers for each token, by part, from the input to the output.
    """
    figure, axes = blank(7.2, 0.9 + 0.36 * len(numbers))
    names, counts = list(numbers), list(numbers.values())
    for at, count in enumerate(counts):
        axes.barh(at, count, color=PALETTE[at % len(PALETTE)], edgecolor=BLACK, linewidth=0.4)
        axes.text(count, at, f" {count:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(counts))
    axes.set_xlabel("numbers saved for each token (measured)")
    most, total = max(numbers, key=numbers.get), sum(counts)
    axes.set_title(
        f"The {most} keeps {numbers[most] / total:.0%} of what a block saves", fontsize=11
    )
    said = ", ".join(f"{name} {count:,.0f}" for name, count in numbers.items())
    return Picture(figure, f"Numbers that one block saves for each token, by part: {said}.")


def square(naive: Mapping[int, int], flash: Mapping[int, int]) -> Picture:
    """Bytes that attention saves against the length: with all scores in memory, and in tiles."""
    figure, axes = blank(7.2, 3.2)
    for name, sizes, color, marker in (
        ("all scores in memory", naive, VERMILLION, "s"),
        ("flash attention", flash, GREEN, "o"),
    ):
        values = [size / _MIB for size in sizes.values()]
        axes.plot(list(sizes), values, marker=marker, color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(naive), [f"{n:,}" for n in naive])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("MiB saved (measured)")
    axes.legend(fontsize=9)
    times = [list(sizes.values())[-1] / list(sizes.values())[-2] for sizes in (naive, flash)]
    axes.set_title(
        f"Twice the tokens: {times[0]:.1f} × the bytes with all scores, {times[1]:.1f} × in tiles",
        fontsize=11,
    )
    said = "; ".join(
        f"{name}: " + ", ".join(f"{n:,}: {size / _MIB:.2f}" for n, size in sizes.items())
        for name, sizes in (("all scores", naive), ("flash attention", flash))
    )
    return Picture(figure, f"MiB that attention saves by number of tokens. {said}.")


def devices(held: int, saved: Mapping[int, int], tokens: int) -> Picture:
    """What the fullest rank holds and saves, by the number of ranks that share the tokens."""
    figure, axes = blank(7.2, 1.5 + 0.4 * len(saved))
    rows = list(saved)
    axes.barh(range(len(rows)), held / _MIB, color=ORANGE, label="parameters, gradients, optimizer")
    sizes = [size / _MIB for size in saved.values()]
    axes.barh(range(len(rows)), sizes, left=held / _MIB, color=BLUE, label="saved for backward")
    for at, size in enumerate(sizes):
        axes.text(
            held / _MIB + size, at, f" {held / _MIB + size:,.0f} MiB", va="center", fontsize=9
        )
    axes.set_yticks(range(len(rows)), [f"{P} rank{'s' * (P > 1)}" for P in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * (held / _MIB + max(sizes)))
    axes.set_xlabel("MiB on one rank (measured)")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    first, last = rows[0], rows[-1]
    share = saved[first] / saved[last]
    axes.set_title(
        f"{tokens:,} tokens on {last} ranks: each saves 1/{share:.3g}, and holds the same model",
        fontsize=11,
    )
    said = "; ".join(f"{P}: {size / _MIB:.1f} saved" for P, size in saved.items())
    alt = f"MiB on one rank by ranks, {tokens:,} tokens: {said}; {held / _MIB:.1f} held by each."
    return Picture(figure, alt)


def saved_per_token(model: str, bytes_each: int = 2) -> int:
    """Bytes that all layers of a model save for each token, by the count of lesson 01.

    model: a name of `cpref.measure.shapes.MODELS`. The last norm, the logits and the rotary angles
    are left out; they belong to no layer.
    """
    shape = model_shape(model)
    kv_width = shape.kv_heads * shape.head_dim
    q_width = shape.heads * shape.head_dim
    norms = 2 * (2 * shape.dim + 1)
    mixer = shape.dim + q_width + 2 * kv_width + 2 * q_width + shape.heads
    return shape.layers * (norms + mixer + shape.dim + 4 * shape.ffn_dim) * bytes_each


def wall(model: str = "8b", ranks: int = 8, gigabytes: int = 80) -> Picture:
    """Saved activations of a big model against the length, on one rank and on several (modelled).

    gigabytes: 10⁹ bytes of a device, all of which activations may take here.
    """
    each, limit = saved_per_token(model), gigabytes * 10**9
    tokens = 2 ** np.arange(10, 24)
    figure, axes = blank(7.2, 3.3)
    for P, color in ((1, VERMILLION), (ranks, BLUE))[: 1 + (ranks > 1)]:
        label = f"on {P} rank{'s' * (P > 1)}"
        axes.plot(tokens, each * tokens / P / 1e9, color=color, label=label)
        axes.plot([limit * P / each], [gigabytes], "o", color=color)
    axes.axhline(gigabytes, color=BLACK, linestyle="--", linewidth=1)
    axes.text(tokens[0], 1.15 * gigabytes, f"{gigabytes} GB", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = tokens[::2]
    names = [f"{n // 1024}k" if n < 2**20 else f"{n // 2**20}M" for n in ticks]
    axes.set_xticks(ticks, names)
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("GB saved on each rank (modelled)")
    axes.legend(fontsize=9, loc="lower right")
    alone, shared = (int(limit * P / each) for P in (1, ranks))
    title = f"{model}: one device is full at {alone:,} tokens, {ranks} at {shared:,}"
    axes.set_title(title if ranks > 1 else f"{model}: one device is full at {alone:,} tokens")
    alt = (
        f"GB that each rank saves for backward against the length, a model of {model} in bfloat16 "
        f"without recomputation: {each / 1e6:.2f} MB a token. {gigabytes} GB are full at {alone:,} "
        f"tokens on one rank, at {shared:,} on {ranks}."
    )
    return Picture(figure, alt)
