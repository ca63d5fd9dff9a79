"""The figures of `ring` with sliders."""

import ipywidgets as widgets

from ..layout import LAYOUTS
from . import ring
from .widgets import Explorer


def moment() -> Explorer:
    """The ring at one step, and the pairs that are done: step, ranks and layout."""
    return Explorer(
        ring.moment,
        step=widgets.IntSlider(1, 0, 7, description="step"),
        ranks=widgets.IntSlider(4, 1, 8, description="ranks"),
        layout=widgets.Dropdown(options=LAYOUTS, value="contiguous", description="layout"),
    )


def ways_home() -> Explorer:
    """The two ways of dK,dV: step and ranks."""
    return Explorer(
        ring.ways_home,
        step=widgets.IntSlider(4, 0, 6, description="column"),
        ranks=widgets.IntSlider(4, 2, 6, description="ranks"),
    )
