"""The figure of the fewest ranks with sliders."""

import ipywidgets as widgets

from ..measure.shapes import MODELS
from . import savings
from .widgets import Explorer


def fewest_ranks() -> Explorer:
    """On how many ranks a training job fits: model, length, recomputation, FSDP, and gigabytes."""
    lengths = [(f"{2**n // 1024:,}k", 2**n) for n in range(12, 24)]
    return Explorer(
        savings.fewest_ranks,
        model=widgets.Dropdown(options=list(MODELS), value="8b", description="model"),
        seq_len=widgets.SelectionSlider(options=lengths, value=2**20, description="tokens"),
        recompute=widgets.Checkbox(value=True, description="recompute"),
        shard_all=widgets.Checkbox(value=True, description="FSDP"),
        gigabytes=widgets.SelectionSlider(
            options=[24, 40, 80, 141, 192], value=80, description="GB"
        ),
    )
