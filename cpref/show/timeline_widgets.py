"""The figures of `timeline` with sliders."""

import ipywidgets as widgets

from . import timeline
from .widgets import Explorer


def crossing() -> Explorer:
    """From which block on a tile covers its transfer: heads, achieved TFLOP/s, GB/s, mask."""
    powers = [1, 2, 4, 8, 16, 32, 64]
    return Explorer(
        timeline.crossing,
        heads=widgets.SelectionSlider(options=powers, value=32, description="H"),
        kv_heads=widgets.SelectionSlider(options=powers, value=8, description="Hkv"),
        tflops=widgets.IntSlider(400, 50, 1000, step=50, description="TFLOP/s"),
        gigabytes=widgets.Dropdown(
            options={"NVLink 4, 450 GB/s": 450, "PCIe 5, 64 GB/s": 64, "InfiniBand, 50 GB/s": 50},
            value=50,
            description="link",
        ),
        causal=widgets.Checkbox(value=True, description="causal, zigzag"),
    )
