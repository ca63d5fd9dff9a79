"""Figures of a plan: what a GPU holds, and how long a step takes, for each degree of CP."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from ..measure.plan import Option, Plan
from ..measure.reasons import NAMES, degrees
from .picture import BLACK, PALETTE, VERMILLION, Picture, blank


def memory_by_part(plan: Plan) -> Picture:
    """Modelled GB on a GPU by part, stacked, for the fastest division of each CP degree that fits,
    with the line up to which a job may fill the memory."""
    options, room = _options(plan), plan.request.room / 1e9
    figure, axes = blank(7.2, 3.6)
    _stack(axes, options, lambda one: {k: v / 1e9 for k, v in vars(one.memory).items()}, {})
    axes.axhline(room, color=VERMILLION, linewidth=1.4, linestyle="--")
    axes.text(-0.45, room, f"limit {room:.1f} GB", color=VERMILLION, fontsize=8, va="bottom")
    axes.set_ylim(0, 1.15 * room)
    axes.set_ylabel("GB on a GPU (modelled)")
    _frame(axes, plan, options)
    best = plan.best.memory.total / 1e9
    axes.set_title(f"The plan fills {best:.1f} of the {room:.1f} GB that a job may", fontsize=11)
    said = "; ".join(f"{degrees(one.way)}: {one.memory.total / 1e9:.1f} GB" for one in options)
    return Picture(figure, f"Modelled memory of a GPU by part, limit {room:.1f} GB. {said}.")


def time_by_degree(plan: Plan) -> Picture:
    """Modelled seconds of a step by part, stacked, for the same divisions."""
    options = _options(plan)
    figure, axes = blank(7.2, 3.6)
    totals = [one.time.total for one in options]
    _stack(axes, options, lambda one: vars(one.time), NAMES)
    top = max(totals)
    for at, total in enumerate(totals):
        axes.text(at, total + 0.01 * top, f"{total:.3g}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.12 * top)
    axes.set_ylabel("seconds of a step (modelled)")
    _frame(axes, plan, options)
    axes.set_title(_finding(plan), fontsize=11)
    said = "; ".join(f"{degrees(one.way)}: {one.time.total:.3g} s" for one in options)
    return Picture(figure, f"Modelled time of a step by part, for each degree of CP. {said}.")


def _options(plan: Plan) -> list[Option]:
    """The fastest of each CP degree, and the plan itself in the place of its own, which may be a
    simpler one that is as fast."""
    return list((plan.by_cp | {plan.best.way.cp: plan.best}).values())


def _finding(plan: Plan) -> str:
    alone, best = plan.by_cp.get(1), plan.best
    if best.way.cp == 1:
        return "To divide sequences gains nothing here"
    if alone is None:
        return f"Without CP nothing fits; CP = {best.way.cp} is proposed"
    return (
        f"CP = {best.way.cp} takes {best.time.total / alone.time.total:.0%} of the time without CP"
    )


def _stack(
    axes: Axes,
    options: Sequence[Option],
    parts: Callable[[Option], dict[str, float]],
    names: dict[str, str],
) -> None:
    """A bar for each option, with the parts that any of them has."""
    table = [parts(one) for one in options]
    largest = max(sum(row.values()) for row in table)
    bottom = np.zeros(len(options))
    for color, part in zip(PALETTE, table[0], strict=False):
        heights = np.array([row[part] for row in table])
        if heights.max() > 0.002 * largest:
            label = names.get(part, part)
            axes.bar(np.arange(len(options)), heights, 0.7, bottom, color=color, label=label)
        bottom += heights


def _frame(axes: Axes, plan: Plan, options: Sequence[Option]) -> None:
    """Ticks with the degrees below each bar, the proposed one marked; the parts beside the axes."""
    labels = []
    for one in options:
        way = one.way
        labels.append(f"{way.cp}\nTP {way.tp}\nPP {way.pp}\nDP {way.dp}")
    axes.set_xticks(np.arange(len(options)), labels, fontsize=8)
    axes.set_xlim(-0.6, len(options) - 0.4)
    axes.set_xlabel("degree of CP, with the others that are fastest; bold: the plan")
    for one, tick in zip(options, axes.get_xticklabels(), strict=True):
        if one.way.cp == plan.best.way.cp:
            tick.set_fontweight("bold")
            tick.set_color(BLACK)
    axes.get_figure().legend(loc="outside right upper", fontsize=8)
