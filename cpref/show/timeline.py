"""Who computes, sends and waits, and when; and which blocks are large enough to hide a transfer."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..measure.span import length
from ..measure.timeline import Timeline
from .picture import BLACK, BLUE, GREEN, ORANGE, VERMILLION, Picture, blank

_GREY = "#BBBBBB"
_LANES = {"wait": (0.0, _GREY), "compute": (0.0, BLUE), "send": (0.42, ORANGE)}
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def gantt(timelines: Mapping[str, Timeline], *, source: str = "measured") -> Picture:
    """Bars of what each rank does, one panel for each timeline, all on one scale.

    source: "measured" or "modelled", for the axis.
    """
    ranks = next(iter(timelines.values())).ranks
    longest = max(t.seconds for t in timelines.values())
    unit, size = next(u for u in _UNITS if longest >= 0.5 * u[1] or u is _UNITS[-1])
    rows = len(timelines)
    figure, panels = blank(7.2, 1.1 + rows * (0.4 + 0.34 * ranks), nrows=rows, squeeze=False)
    for axes, (name, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        for rank in range(ranks):
            _bars(axes, timeline, rank, size)
        axes.set(xlim=(0, longest / size * 1.02), ylim=(ranks - 0.1, -0.15))
        axes.set_yticks([r + 0.4 for r in range(ranks)], [f"rank {r}" for r in range(ranks)])
        axes.tick_params(labelsize=8)
        axes.axvline(timeline.seconds / size, color=BLACK, linewidth=0.8, linestyle="--")
        share = _percent(timeline.overlap_share())
        axes.set_title(f"{name}: {share} of the sending is hidden", fontsize=9)
    panels[-1, 0].set_xlabel(f"time ({unit}, {source})")
    handles = [panels[0, 0].bar(0, 0, color=color) for _, color in _LANES.values()]
    labels = ["waits", "computes", "a move is under way"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(_title(timelines), fontsize=11)
    said = "; ".join(_words(name, t, size, unit) for name, t in timelines.items())
    return Picture(figure, f"Bars of what each of {ranks} ranks does over time ({source}). {said}.")


def shares(
    lengths: Sequence[int],
    measured: Mapping[str, Sequence[float]],
    least: Mapping[str, float],
) -> Picture:
    """The hidden part of the transfers against the tokens of a block.

    measured: overlap shares by mask; least: the block that hides all, predicted, by mask.
    """
    figure, axes = blank(7.2, 3.2)
    fine = np.geomspace(min(lengths), max(lengths), 100)
    for (name, found), color, marker in zip(
        measured.items(), (BLUE, VERMILLION), "os", strict=False
    ):
        model = np.minimum(1, fine / least[name])
        axes.plot(fine, 100 * model, color=color, linewidth=1, linestyle="--")
        percent = [100 * share for share in found]
        axes.plot(lengths, percent, marker, color=color, label=f"{name}, measured")
        axes.axvline(least[name], color=color, linewidth=0.8, linestyle=":")
    axes.plot([], [], color=BLACK, linestyle="--", linewidth=1, label="predicted")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set(xlabel="tokens of a block, L", ylabel="hidden (% of the transfer)", ylim=(0, 108))
    axes.legend(loc="lower right", fontsize=8)
    points = ", ".join(f"{least[name]:,.0f} ({name})" for name in measured)
    axes.set_title(f"A block hides its transfer from L = {points} on", fontsize=11)
    said = "; ".join(
        f"{name} "
        + ", ".join(f"{_percent(share)} at {n}" for n, share in zip(lengths, found, strict=True))
        for name, found in measured.items()
    )
    alt = f"Measured hidden part of the transfers by tokens of a block: {said}. Predicted {points}."
    return Picture(figure, alt)


def least_block(
    flops: float, bandwidth: float, bytes_each: float, heads: int, kv_heads: int
) -> float:
    """Tokens of the block whose full tile takes as long as its transfer: e·Hkv·F / (2·H·W).

    flops: achieved, per second; bandwidth: bytes per second, one direction. Under a causal mask
    with zigzag a step does half of a tile, so the block has to be twice as long.
    """
    return bytes_each * kv_heads * flops / (2 * heads * bandwidth)


def least_blocks(blocks: Mapping[str, tuple[float, float]], what: str) -> Picture:
    """Modelled: the least block by link, (full, causal zigzag) tokens each. what: the machine."""
    figure, axes = blank(7.2, 0.9 + 0.6 * len(blocks))
    at = np.arange(len(blocks))
    for i, (label, color) in enumerate((("full tile", BLUE), ("causal, zigzag", ORANGE))):
        bars = axes.barh(at + 0.36 * i - 0.18, [b[i] for b in blocks.values()], 0.33, color=color)
        bars.set_label(label)
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.set_yticks(at, list(blocks))
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(pair) for pair in blocks.values()) * 1.15)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"tokens of a block, L (modelled: {what})", fontsize=8)
    axes.legend(fontsize=8)
    first, last = next(iter(blocks)), list(blocks)[-1]
    times = blocks[last][0] / blocks[first][0]
    axes.set_title(f"{last} asks for blocks {times:.0f} times as long as {first}", fontsize=11)
    said = "; ".join(f"{n} {full:,.0f}, causal {half:,.0f}" for n, (full, half) in blocks.items())
    return Picture(figure, f"Least tokens of a block that hides its transfer, {what}: {said}.")


def crossing(
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    tflops: float = 400,
    gigabytes: float = 50,
    causal: bool = True,
) -> Picture:
    """Modelled: seconds of a tile and of its transfer against the tokens of a block, bfloat16.

    tflops: achieved, 10^12 FLOP/s; gigabytes: 10^9 bytes per second in one direction.
    """
    kv_heads = min(kv_heads, heads)
    part = 0.5 if causal else 1.0
    least = least_block(tflops * 1e12, gigabytes * 1e9, 2, heads, kv_heads) / part
    tokens = np.geomspace(128, 131072, 60)
    tile = part * 4 * tokens**2 * heads * head_dim / (tflops * 1e12)
    transfer = 2 * tokens * kv_heads * head_dim * 2 / (gigabytes * 1e9)
    figure, axes = blank(7.2, 3.2)
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()  # why: they take most of the time of drawing, and a slider is moving
    axes.plot(tokens, 1e6 * tile, color=BLUE, label="tile: grows with L²")
    axes.plot(tokens, 1e6 * transfer, color=ORANGE, label="transfer: grows with L")
    exposed = np.maximum(transfer - tile, 0)
    axes.fill_between(tokens, 1e6 * tile, 1e6 * (tile + exposed), color=ORANGE, alpha=0.25)
    axes.axvline(least, color=BLACK, linewidth=0.8, linestyle="--")
    axes.set(xlabel="tokens of a block, L", ylabel="time of a step (µs, modelled)")
    axes.set_xlim(tokens[0], tokens[-1])
    ends = [1024, 4096, 16384, 65536]
    axes.set_xticks(ends, [f"{n:,}" for n in ends])
    axes.legend(fontsize=8)
    axes.set_title(f"The tile covers the transfer from L = {least:,.0f} on", fontsize=11)
    alt = (
        f"Modelled times of a tile and its transfer by tokens of a block: {heads} query heads, "
        f"{kv_heads} key heads of {head_dim}, {tflops:g} TFLOP/s achieved, {gigabytes:g} GB/s"
        f"{', causal with zigzag' if causal else ', full'}. They cross at {least:,.0f} tokens."
    )
    return Picture(figure, alt)


def against_one(lengths: Sequence[int], seconds: Mapping[str, Sequence[float]]) -> Picture:
    """Seconds by tokens of the sequence, of one device and of several; the first is the one."""
    figure, axes = blank(7.2, 3.2)
    (one, base), *others = seconds.items()
    axes.axhline(1, color=BLACK, linewidth=1, linestyle="--", label=one)
    for (name, found), color, marker in zip(others, (VERMILLION, GREEN), "os", strict=False):
        ratio = [x / y for x, y in zip(found, base, strict=True)]
        axes.plot(lengths, ratio, marker=marker, color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set(xlabel="tokens of the sequence, S", ylabel=f"time / that of {one} (measured)")
    axes.legend(fontsize=8)
    name, found = others[-1]
    loses = [x >= y for x, y in zip(found, base, strict=True)]
    wins = lengths[len(loses) - loses[::-1].index(True) :] if True in loses else lengths
    finding = f"pays from S = {wins[0]:,} on" if wins else "pays at none of these lengths"
    axes.set_title(f"{name[:1].upper()}{name[1:]}: it {finding}", fontsize=11)
    said = "; ".join(
        f"{name} "
        + ", ".join(f"{x / y:.2f} at {n}" for n, x, y in zip(lengths, xs, base, strict=True))
        for name, xs in others
    )
    return Picture(figure, f"Measured times over that of {one}, by tokens: {said}.")


def _bars(axes, timeline: Timeline, rank: int, size: float) -> None:
    for kind, (below, color) in _LANES.items():
        bars = [(begin / size, (end - begin) / size) for begin, end in timeline.of(kind, rank)]
        style = {"edgecolor": "white", "linewidth": 0.6}
        axes.broken_barh(bars, (rank + below, 0.38), color=color, **style)


def _title(timelines: Mapping[str, Timeline]) -> str:
    first, *others = timelines
    if not others:
        return f"{first}: ranks are idle {_percent(timelines[first].idle_share())} of the time"
    base = timelines[first].seconds
    said = ", ".join(f"“{name}” takes {timelines[name].seconds / base:.2f}" for name in others)
    return f"{said} of the time of “{first}”"


def _words(name: str, timeline: Timeline, size: float, unit: str) -> str:
    def total(kind: str) -> float:
        return sum(length(timeline.of(kind, r)) for r in range(timeline.ranks)) / timeline.ranks

    times = ", ".join(f"{kind} {total(kind) / size:.3g}" for kind in ("compute", "send", "wait"))
    return (
        f"{name}: {timeline.seconds / size:.3g} {unit} in all, of each rank on average {times}; "
        f"idle {_percent(timeline.idle_share())}, hidden {_percent(timeline.overlap_share())}"
    )


def _percent(share: float) -> str:
    return "none" if np.isnan(share) else f"{100 * share:.0f} %"
