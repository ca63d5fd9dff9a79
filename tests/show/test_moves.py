"""The figures of the four moves show what the moves do, and say what they show."""

import numpy as np
import pytest
import torch

import cpref
from cpref.show import moves

pytestmark = pytest.mark.slow

widgets = pytest.importorskip("cpref.show.moves_widgets")


def brought(group, move):
    """What a move of numbered parts brings to this rank. A contribution is a power of ten."""
    rank, ranks = group.rank, group.size
    if move == "shift":
        return [group.shift(torch.tensor([rank])).wait().item()]
    if move == "all_gather":
        return [part.item() for part in group.all_gather(torch.tensor([rank])).wait()]
    if move == "reduce_scatter":
        parts = [torch.tensor([10**rank * (part + 1)]) for part in range(ranks)]
        return [group.reduce_scatter(parts).wait().item()]
    parts = [torch.tensor([100 * rank + to]) for to in range(ranks)]
    return [part.item() for part in group.all_to_all(parts, [(1,)] * ranks).wait()]


def number(text, ranks):
    """The number that stands for what a field says."""
    if text.startswith("Σ"):
        return sum(10**rank * (int(text[1:]) + 1) for rank in range(ranks))
    if "→" in text:
        source, to = text.split("→")
        return 100 * int(source) + int(to)
    return int(text)


@pytest.mark.parametrize("move", moves.MOVES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_after_the_last_hop_a_rank_holds_what_the_move_brings(move, ranks):
    held = moves.holding(move, ranks, moves.hops_of(move, ranks)).got
    for rank, expected in enumerate(cpref.run_local(brought, ranks, move)):
        slots = sorted(slot for at, slot in held if at == rank)
        assert [number(held[rank, slot][0], ranks) for slot in slots] == expected


@pytest.mark.parametrize("move", moves.MOVES)
def test_before_the_first_hop_nothing_has_come(move):
    before = moves.holding(move, 4, 0)
    assert not before.got
    assert len(before.left) == (16 if move in ("reduce_scatter", "all_to_all") else 4)


@pytest.mark.parametrize("move", ["reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_each_hop_takes_one_part_from_what_is_left(move, hops):
    now = moves.holding(move, 5, hops)
    assert len(now.left) == 5 * (4 - hops)
    assert len(now.got) == (5 if move == "reduce_scatter" else 5 * (hops + 1))


def test_the_overview_shows_four_moves_before_and_after():
    picture = moves.overview(3)
    assert [len(panel.patches) for panel in picture.figure.axes] == [3, 3, 9, 9, 3, 9, 3, 9]
    assert "reduce_scatter: 3 contributions each" in picture.alt


@pytest.mark.parametrize(("hops", "said"), [(0, "0 of 3"), (2, "2 of 3"), (9, "3 of 3")])
def test_a_move_under_way_says_how_far_it_is(hops, said):
    assert f"after {said} hops" in moves.by_hops("all_to_all", 4, hops).alt


def test_the_fit_is_drawn_through_what_was_measured():
    times = {2**n: 2e-4 + 2**n / 1e9 for n in range(10, 25)}
    picture = moves.fitted(times, 2e-4, 1e9)
    measured, line, knee = picture.figure.axes[0].lines
    assert list(measured.get_ydata()) == pytest.approx([1e3 * t for t in times.values()])
    assert np.interp(2**20, line.get_xdata(), line.get_ydata()) == pytest.approx(
        1e3 * times[2**20], rel=0.01
    )
    assert knee.get_xdata()[0] == pytest.approx(2e5)
    assert "0.20 ms to begin, then 1.0 GB/s" in picture.alt
    assert "equal at 195 KiB" in picture.alt


@pytest.mark.parametrize(
    ("pairs", "finding"),
    [
        ([(0, 3), (1, 0), (2, 1), (3, 2)], "closes a circle"),
        ([(0, 1), (1, 2)], "has an end"),
        ([(0, 1), (2, 3), (3, 2)], "closes a circle"),
    ],
)
def test_waiting_in_a_circle_is_told_from_waiting_in_a_row(pairs, finding):
    picture = moves.waits(pairs, 4)
    assert finding in picture.alt
    assert len(picture.figure.axes[0].patches) == len(pairs)


def test_moving_a_slider_draws_the_picture_of_its_values():
    explorer = widgets.by_hops()
    explorer._controls["hops"].value = 3
    explorer._controls["move"].value = "reduce_scatter"
    _, image, words = explorer.children
    expected = moves.by_hops("reduce_scatter", 4, 3)
    assert image.value == expected.png()
    assert expected.alt in words.value
