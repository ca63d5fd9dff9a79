"""The figure of the memory wall with sliders."""

import ipywidgets as widgets

from ..measure.shapes import MODELS
from . import memory
from .widgets import Explorer


def wall() -> Explorer:
    """Where the activations of a big model fill a device: model, ranks, and its gigabytes."""
    return Explorer(
        memory.wall,
        model=widgets.Dropdown(options=list(MODELS), value="8b", description="model"),
        ranks=widgets.SelectionSlider(
            options=[2**n for n in range(11)], value=8, description="ranks"
        ),
        gigabytes=widgets.SelectionSlider(
            options=[24, 40, 80, 141, 192], value=80, description="GB"
        ),
    )
