"""The figures with sliders: the same pictures, drawn anew as a reader moves them.

Where no kernel runs, a widget shows nothing. So each brings its static twin along: the output of
the cell holds the picture as it stood when the cell ran, with its words, and a viewer that cannot
show the widget shows that.
"""

from collections.abc import Callable

import ipywidgets as widgets

from ..layout import LAYOUTS
from . import figures
from .picture import Picture, show


def attention_matrix() -> "Explorer":
    """Who computes which pair, and which keys are elsewhere: tokens, ranks and layout."""
    return Explorer(figures.attention_matrix, **_sequence("contiguous"))


def work() -> "Explorer":
    """Who computes which pair, and whether that is even: tokens, ranks and layout."""
    return Explorer(figures.work, **_sequence("zigzag"))


def _sequence(layout: str) -> dict[str, widgets.ValueWidget]:
    return {
        "seq_len": widgets.IntSlider(16, 2, 64, description="tokens"),
        "world_size": widgets.IntSlider(4, 1, 8, description="ranks"),
        "layout": widgets.Dropdown(options=LAYOUTS, value=layout, description="layout"),
    }


class Explorer(widgets.VBox):
    """A picture under its controls, and below it the words for those who do not see it.

    draw: from the values of the controls, by name, to the picture.
    """

    def __init__(self, draw: Callable[..., Picture], **controls: widgets.ValueWidget):
        self._draw, self._controls = draw, controls
        self._image, self._words = widgets.Image(format="png"), widgets.HTML()
        self._image.layout.max_width = "100%"
        for control in controls.values():
            control.style.description_width = "60px"
            control.observe(self._redraw, "value")
        self._redraw()
        super().__init__([widgets.HBox(list(controls.values())), self._image, self._words])

    def _redraw(self, change: object = None) -> None:
        values = {name: control.value for name, control in self._controls.items()}
        self._picture = self._draw(**values)
        self._image.value = self._picture.png()
        self._words.value = f"<small>{self._picture.alt}</small>"

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        twin, metadata = self._picture._repr_mimebundle_()
        return super()._repr_mimebundle_(**kwargs) | twin, metadata

    def _ipython_display_(self) -> None:
        data, metadata = self._repr_mimebundle_()
        show(data, metadata, self._picture.alt, label="in words, before a slider is moved")
