"""What each rank holds, saves and needs in passing, against the number of ranks."""

from collections.abc import Mapping

from matplotlib.ticker import ScalarFormatter

from ..measure.division import Division, memory
from ..measure.plan import request
from ..measure.shapes import model_shape
from .picture import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILLION, Picture, blank

_MIB = 2**20
_RANKS = tuple(2**n for n in range(11))
_LOOKS = {"ring": (BLUE, "o"), "all_gather": (VERMILLION, "s"), "ulysses": (GREEN, "^")}


def against_ranks(held: int, saved: Mapping[int, int], peak: Mapping[int, int]) -> Picture:
    """Measured bytes of a training step on one rank by the number of ranks, in three parts.

    held: parameters, gradients and optimizer state, on each rank; saved: for backward; peak: the
    most that was alive at once of what the step made, saved included. By ranks, the least first.
    """
    figure, axes = blank(7.2, 1.2 + 0.4 * len(saved))
    rows, start = list(saved), [0.0] * len(saved)
    parts = {
        "held": (ORANGE, [held] * len(rows)),
        "saved for backward": (BLUE, list(saved.values())),
        "in passing": (SKY, [peak[P] - saved[P] for P in rows]),
    }
    for name, (color, sizes) in parts.items():
        widths = [size / _MIB for size in sizes]
        axes.barh(range(len(rows)), widths, left=start, color=color, label=name)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    for at, end in enumerate(start):
        axes.text(end, at, f" {end:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [_ranks(P) for P in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(start))
    axes.set_xlabel("MiB on one rank (measured)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    first, last = rows[0], rows[-1]
    axes.set_title(
        f"On {last} ranks each saves 1/{saved[first] / saved[last]:.3g}, and holds the same as one",
        fontsize=11,
    )
    said = "; ".join(
        f"{_ranks(P)}: {saved[P] / _MIB:.1f} saved, {(peak[P] - saved[P]) / _MIB:.1f} in passing"
        for P in rows
    )
    return Picture(figure, f"MiB on one rank: {said}; {held / _MIB:.1f} held by each.")


def peaks(by_strategy: Mapping[str, Mapping[int, int]]) -> Picture:
    """Measured peak bytes of a training step against P, with the line of one rank's divided by P.

    by_strategy: peak bytes by ranks, for each strategy; the first has one rank among them.
    """
    figure, axes = blank(7.2, 3.2)
    ranks = list(next(iter(by_strategy.values())))
    alone = next(iter(by_strategy.values()))[1] / _MIB
    axes.plot(ranks, [alone / P for P in ranks], "--", color=BLACK, linewidth=1, label="1/P")
    for name, by_ranks in by_strategy.items():
        color, marker = _LOOKS[name]
        sizes = [size / _MIB for size in by_ranks.values()]
        axes.plot(list(by_ranks), sizes, color=color, marker=marker, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, ranks)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("ranks P")
    axes.set_ylabel("MiB alive at the peak (measured)")
    axes.legend(fontsize=9)
    last = ranks[-1]
    above = {name: of[last] / _MIB * last / alone for name, of in by_strategy.items()}
    times = ", ".join(f"{name} {share:.2f}" for name, share in above.items())
    axes.set_title(
        f"Peak on {last} ranks, in units of 1/{last} of one rank's: {times}", fontsize=11
    )
    said = "; ".join(
        f"{name} {', '.join(f'{P}: {size / _MIB:.2f}' for P, size in of.items())}"
        for name, of in by_strategy.items()
    )
    return Picture(figure, f"Measured MiB alive at the peak of a step, by ranks: {said}.")


def jobs(bytes_by_job: Mapping[str, int], gigabytes: int = 80) -> Picture:
    """What a rank needs for each way of running a job (simulated), and the memory of a device.

    gigabytes: 10⁹ bytes of the device.
    """
    figure, axes = blank(7.2, 1.0 + 0.36 * len(bytes_by_job))
    sizes = [size / 1e9 for size in bytes_by_job.values()]
    for at, size in enumerate(sizes):
        axes.barh(at, size, color=BLUE if size <= gigabytes else VERMILLION)
        axes.text(size, at, f" {size:.1f}", va="center", fontsize=9)
    axes.axvline(gigabytes, color=BLACK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(sizes)), list(bytes_by_job))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(*sizes, gigabytes))
    axes.set_xlabel(f"GB at the peak on one rank (simulated; dashed: {gigabytes} GB)")
    fit = sum(size <= gigabytes for size in sizes)
    axes.set_title(f"{fit} of {len(sizes)} ways fit {gigabytes} GB", fontsize=11)
    said = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in bytes_by_job.items())
    return Picture(figure, f"Simulated GB at the peak on one rank: {said}.")


def fewest_ranks(
    model: str = "8b",
    seq_len: int = 2**20,
    recompute: bool = True,
    shard_all: bool = True,
    gigabytes: int = 80,
) -> Picture:
    """Modelled bytes of a rank against P for each strategy, as `cpref plan` counts them.

    shard_all: parameters and gradients are sharded over the ranks too. Drawn below the curves: what
    of it would be there for the shortest sequence.
    """
    shape, limit = model_shape(model), gigabytes * 1e9
    figure, axes = blank(7.2, 3.4)
    found, held = {}, []
    for name, (color, marker) in _LOOKS.items():
        ranks = [P for P in _RANKS if name != "ulysses" or shape.heads % P == 0]
        parts = [
            memory(
                request(shape, seq_len, P),
                Division(P, 1, 1, 1, name, recompute=recompute, shard_all=shard_all),
            )
            for P in ranks
        ]
        totals = [part.total / 1e9 for part in parts]
        if not held:
            held = [(part.total - part.activations - part.buffers) / 1e9 for part in parts]
        axes.plot(ranks, totals, color=color, marker=marker, markersize=4, label=name)
        found[name] = next(
            (P for P, of in zip(ranks, parts, strict=True) if of.total <= limit), None
        )
    low = 0.5 * min(held)
    axes.fill_between(_RANKS, low, held, color=ORANGE, alpha=0.3, label="held: the model's part")
    axes.axhline(gigabytes, color=BLACK, linestyle="--", linewidth=1)
    axes.text(_RANKS[0], 1.1 * gigabytes, f"{gigabytes} GB", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(_RANKS, _RANKS)
    axes.set_ylim(bottom=low)
    axes.set_xlabel("ranks P")
    axes.set_ylabel("GB on one rank (modelled)")
    axes.legend(fontsize=9)
    said = ", ".join(f"{name} {P or 'none'}" for name, P in found.items())
    axes.set_title(f"{seq_len:,} tokens in {gigabytes} GB, fewest ranks: {said}", fontsize=11)
    how = f"{'with' if recompute else 'without'} recomputation, parameters "
    how += "sharded" if shard_all else "whole on each rank"
    alt = (
        f"Modelled GB on one rank by ranks for a model of {model} at {seq_len:,} tokens, {how}. "
        f"Fewest ranks with {gigabytes} GB each: {said}."
    )
    return Picture(figure, alt)


def _ranks(P: int) -> str:
    return f"{P} rank{'s' * (P > 1)}"
