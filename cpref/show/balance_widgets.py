"""The figures of `balance` with sliders."""

import ipywidgets as widgets

from ..layout import LAYOUTS
from . import balance
from .widgets import Explorer


def steps() -> Explorer:
    """Who computes how much at each step: tokens, ranks, layout and mask."""
    return Explorer(
        balance.steps,
        seq_len=widgets.IntSlider(64, 8, 512, description="tokens"),
        ranks=widgets.IntSlider(4, 1, 8, description="ranks"),
        layout=widgets.Dropdown(options=LAYOUTS, value="contiguous", description="layout"),
        mask=widgets.Dropdown(options=list(balance.MASKS), value="causal", description="mask"),
    )


def matrix_by_step() -> Explorer:
    """At which step each pair is computed, under each layout: tokens, ranks and mask."""
    return Explorer(
        balance.matrix_by_step,
        seq_len=widgets.IntSlider(32, 8, 64, description="tokens"),
        ranks=widgets.IntSlider(4, 1, 6, description="ranks"),
        mask=widgets.Dropdown(options=list(balance.MASKS), value="causal", description="mask"),
    )
