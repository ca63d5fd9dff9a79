"""The figures of `traffic` with sliders."""

import ipywidgets as widgets

from ..layout import LAYOUTS
from . import traffic
from .widgets import Explorer


def sent(heads: int = 32, kv_heads: int = 8) -> Explorer:
    """Bytes of each strategy against P: query heads and key heads."""
    return Explorer(
        traffic.sent,
        heads=_powers("heads", heads, 32),
        kv_heads=_powers("K,V heads", kv_heads, 32),
    )


def moved_queries() -> Explorer:
    """When moving the queries is cheaper: query heads, key heads, head dim."""
    return Explorer(
        traffic.moved_queries,
        heads=_powers("heads", 8, 32),
        kv_heads=_powers("K,V heads", 8, 8),
        head_dim=_powers("head dim", 128, 256),
    )


def exchange() -> Explorer:
    """Heads by tokens before and after the all-to-all: tokens, ranks and layout."""
    return Explorer(
        traffic.exchange,
        heads=widgets.IntSlider(4, 1, 8, description="heads"),
        seq_len=widgets.IntSlider(16, 8, 32, description="tokens"),
        ranks=widgets.IntSlider(4, 1, 8, description="ranks"),
        layout=widgets.Dropdown(options=LAYOUTS, value="contiguous", description="layout"),
    )


def _powers(name: str, value: int, most: int) -> widgets.SelectionSlider:
    powers = [2**n for n in range(most.bit_length())]
    return widgets.SelectionSlider(options=powers, value=value, description=name)
