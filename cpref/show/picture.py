"""A figure together with the words for those who do not see it.

As the last line of a cell, a `Picture` is a PNG on a white ground, readable in light and dark
themes; its alternative text stands in the output's metadata, where JupyterLab and nbconvert look
for it, and as the plain text of the output, for viewers without images.
"""

import base64
import io
from dataclasses import dataclass
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
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110, facecolor="white")
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.png())

    def _repr_mimebundle_(self, include=None, exclude=None):
        image = base64.b64encode(self.png()).decode()
        return {"image/png": image, "text/plain": self.alt}, {"image/png": {"alt": self.alt}}


def blank(width: float = 7.2, height: float = 3.2, **grid: object):
    """A figure of page width and its axes: matplotlib's `subplots`, without pyplot's state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)
