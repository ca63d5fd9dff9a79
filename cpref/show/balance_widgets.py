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
