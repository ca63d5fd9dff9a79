"""The figures of `softmax` with sliders."""

import ipywidgets as widgets

from . import softmax
from .widgets import Explorer


def weights() -> Explorer:
    """What each of three pieces weighs: two cuts, and a number added to the first scores."""
    return Explorer(
        softmax.weights,
        first=widgets.IntSlider(4, 0, 16, description="cut"),
        second=widgets.IntSlider(10, 0, 16, description="cut"),
        raised=widgets.FloatSlider(0.0, min=-8, max=8, step=0.5, description="raise"),
    )
