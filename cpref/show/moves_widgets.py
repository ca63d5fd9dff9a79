"""The figures of `moves` with sliders."""

import ipywidgets as widgets

from . import moves
from .widgets import Explorer


def by_hops() -> Explorer:
    """A move as it is built out of hops: which move, ranks, and the hops that are done."""
    return Explorer(
        moves.by_hops,
        move=widgets.Dropdown(options=moves.MOVES, value="all_gather", description="move"),
        ranks=widgets.IntSlider(4, 2, 6, description="ranks"),
        hops=widgets.IntSlider(1, 0, 5, description="hops"),
    )
