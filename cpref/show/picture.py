"""A figure together with the words for those who do not see it.

As the last line of a cell, a `Picture` is a PNG on a white ground, readable in light and dark
themes, with its words in four places, since no single one is read everywhere:

- the alternative text of the image, in the output's metadata, for what honours it: nbconvert's
  classic template does; its lab template (as of 7.17) and JupyterLab (as of 4.6) do not;
- a line "in words" below the image, that unfolds. All of them show it, also JupyterLab in a
  notebook that is not trusted yet, where it would strip an image out of HTML;
- the plain text of the output, for viewers without images;
- a sentence in the lesson's prose on what was seen, which is the author's part.
"""

import base64
import html
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from matplotlib.figure import Figure

# Okabe and Ito, Color Universal Design (2008): told apart by readers of any colour vision.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
PALETTE = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, BLACK)


@dataclass(frozen=True)
class Picture:
    """figure: matplotlib's; alt: what it shows, in a sentence or two."""

    figure: Figure
    alt: str

    def png(self) -> bytes:
        return self._png

    @cached_property  # why: drawn a second time, a constrained layout moves by a pixel
    def _png(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110, facecolor="white")
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.png())

    def _repr_mimebundle_(self, include=None, exclude=None):
        image = base64.b64encode(self.png()).decode()
        return {"image/png": image, "text/plain": self.alt}, {"image/png": {"alt": self.alt}}

    def _ipython_display_(self) -> None:
        show(*self._repr_mimebundle_(), self.alt)


def show(data: dict, metadata: dict, words: str, *, label: str = "in words") -> None:
    """The output of a cell, and below it the words for those who do not see it, folded."""
    from IPython.display import display  # why: not needed outside of notebooks

    display(data, metadata=metadata, raw=True)
    folded = f"<details><summary>{label}</summary>{html.escape(words)}</details>"
    display({"text/html": folded}, raw=True)


def blank(width: float = 7.2, height: float = 3.2, **grid: object):
    """A figure of page width and its axes: matplotlib's `subplots`, without pyplot's state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)
