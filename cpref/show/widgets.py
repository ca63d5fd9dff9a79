"""The figures with sliders: the same pictures, drawn anew as a reader moves them.

Where no kernel runs, a widget shows nothing; so each stands beside its static twin in the lessons.
"""

from collections.abc import Callable

import ipywidgets as widgets

from ..layout import LAYOUTS
from . import figures
from .picture import Picture


def layouts() -> widgets.VBox:
    """Who holds which token: sliders for the number of tokens and of ranks."""
    return _explorer(
        figures.layouts,
        seq_len=widgets.IntSlider(16, 1, 48, description="tokens"),
        world_size=widgets.IntSlider(4, 1, 8, description="ranks"),
    )


def attention_matrix() -> widgets.VBox:
    """Who computes which pair: tokens, ranks and layout."""
    return _explorer(
        figures.attention_matrix,
        seq_len=widgets.IntSlider(16, 2, 64, description="tokens"),
        world_size=widgets.IntSlider(4, 1, 8, description="ranks"),
        layout=widgets.Dropdown(options=LAYOUTS, value="contiguous", description="layout"),
    )


def balance() -> widgets.VBox:
    """The work of each rank under a causal mask: sliders for tokens and ranks."""
    return _explorer(
        figures.balance,
        seq_len=widgets.IntSlider(4096, 64, 8192, 64, description="tokens"),
        world_size=widgets.IntSlider(4, 2, 16, description="ranks"),
    )


def _explorer(draw: Callable[..., Picture], **controls: widgets.ValueWidget) -> widgets.VBox:
    """A picture under its controls; the words for those who do not see it below."""
    image, words = widgets.Image(format="png"), widgets.HTML()
    image.layout.max_width = "100%"

    def redraw(change=None) -> None:
        picture = draw(**{name: control.value for name, control in controls.items()})
        image.value = picture.png()
        words.value = f"<small>{picture.alt}</small>"

    for control in controls.values():
        control.style.description_width = "60px"
        control.observe(redraw, "value")
    redraw()
    return widgets.VBox([widgets.HBox(list(controls.values())), image, words])
