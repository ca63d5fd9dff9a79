"""Figures of the model of time, held against what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .picture import BLACK, BLUE, ORANGE, SKY, YELLOW, Picture, blank


@dataclass(frozen=True)
class Compared:
    """Seconds of one attention: predicted by the model, and measured."""

    seq_len: int
    strategy: str
    predicted_forward: float
    predicted_backward: float
    measured_forward: float
    measured_backward: float

    @property
    def predicted(self) -> float:
        return self.predicted_forward + self.predicted_backward

    @property
    def measured(self) -> float:
        return self.measured_forward + self.measured_backward

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def predicted_and_measured(compared: Sequence[Compared], ranks: int) -> Picture:
    """Bars of measured and predicted seconds, forward and backward stacked, for each length and
    strategy; a panel for each length, with the ratio above the bars."""
    lengths = sorted({row.seq_len for row in compared})
    figure, panels = blank(8.4, 3.6, ncols=len(lengths), squeeze=False)
    for axes, seq_len in zip(panels[0], lengths, strict=True):
        rows = [row for row in compared if row.seq_len == seq_len]
        at = np.arange(len(rows))
        for offset, kind, colors in (
            (-0.2, "measured", (ORANGE, YELLOW)),
            (0.2, "predicted", (BLUE, SKY)),
        ):
            bottom = np.zeros(len(rows))
            for part, color in zip(("forward", "backward"), colors, strict=True):
                seconds = np.array([getattr(row, f"{kind}_{part}") for row in rows])
                axes.bar(at + offset, seconds, 0.38, bottom, color=color, label=f"{kind} {part}")
                bottom += seconds
        top = max(max(row.predicted, row.measured) for row in rows)
        for x, row in zip(at, rows, strict=True):
            height = max(row.predicted, row.measured) + 0.02 * top
            axes.text(x, height, f"{row.ratio:.2f}", ha="center", fontsize=8, color=BLACK)
        axes.set_ylim(0, 1.15 * top)
        axes.set_title(f"{seq_len:,} tokens", fontsize=10)
        labels = [row.strategy.replace("_", "-\n") for row in rows]
        axes.set_xticks(at, labels, fontsize=7, rotation=60)
    panels[0, 0].set_ylabel("seconds of one attention")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    worst = max(abs(row.ratio - 1) for row in compared)
    figure.suptitle(
        f"What the model predicts is within {worst:.0%} of what {ranks} CPU ranks take "
        "(number: predicted / measured)",
        fontsize=11,
    )
    said = "; ".join(
        f"{row.seq_len:,} tokens, {row.strategy}: measured {row.measured:.2f} s, predicted "
        f"{row.predicted:.2f} s"
        for row in compared
    )
    return Picture(figure, f"Times of causal attention on {ranks} CPU ranks. {said}.")
