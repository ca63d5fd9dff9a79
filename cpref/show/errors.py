"""Figures of what rounding costs."""

from collections.abc import Mapping

from ..exactness import Errors
from .picture import BLACK, BLUE, ORANGE, Picture, blank

_COLORS = {"fp32": ORANGE, "exact": BLUE}
_MEANING = {"fp32": "tiles in the inputs' dtype", "exact": "tiles in float32"}


def growth(by_ranks: Mapping[str, Mapping[int, Errors]], plain: Errors, dtype: str) -> Picture:
    """Errors of out and of dk against the number of ranks, for each way to accumulate.

    by_ranks: for "fp32" and "exact", the errors by P; plain: of attention on one process.
    """
    figure, panels = blank(ncols=2, sharey=True)
    said = []
    for axes, name in zip(panels, ("out", "dk"), strict=True):
        for how, measured in by_ranks.items():
            ranks, errors = list(measured), [getattr(each, name) for each in measured.values()]
            label = f'accumulate="{how}": {_MEANING[how]}'
            axes.plot(ranks, errors, marker="o", color=_COLORS[how], label=label)
            said.append(
                f"{name}, {how}: {errors[0]:.2e} on {ranks[0]} ranks, {errors[-1]:.2e} on "
                f"{ranks[-1]}"
            )
        alone = getattr(plain, name)
        axes.axhline(alone, color=BLACK, linestyle="--", linewidth=0.8, label="one process, SDPA")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(count) for count in ranks])
        axes.set_xlabel("ranks P")
        axes.set_title(name, fontsize=10)
    panels[0].set_ylabel("relative L2 error against float64")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize=7, loc="lower left")
    exact = by_ranks["exact"]
    first, last = (exact[p].dk for p in (min(exact), max(exact)))
    figure.suptitle(
        f'With accumulate="exact" the error on {max(exact)} ranks is {last / first:.2f} times that '
        f"on {min(exact)}",
        fontsize=11,
    )
    kind = dtype.removeprefix("torch.")
    return Picture(figure, f"Errors in {kind} against the number of ranks. {'; '.join(said)}.")
