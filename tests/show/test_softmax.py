"""The figures of a softmax in pieces draw what they say, and say what they draw."""

import numpy as np
import pytest

from cpref.show import softmax

pytestmark = pytest.mark.slow

widgets = pytest.importorskip("cpref.show.softmax_widgets")


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


@pytest.mark.parametrize("cuts", [(4, 10), (1, 15), (0, 9), (7, 7), (16, 16)])
@pytest.mark.parametrize("raised", [0.0, 30.0, -2000.0, 2000.0])
def test_the_weights_of_the_pieces_are_those_of_their_keys_in_one_softmax(cuts, raised):
    scores = np.linspace(-1, 1, 16)
    scores[: cuts[0]] += raised
    whole = np.exp(scores - scores.max())
    whole /= whole.sum()
    picture = softmax.pieces(scores, cuts)
    drawn_scores, alone, share = picture.figure.axes
    parts = np.split(whole, cuts)
    assert heights(drawn_scores) == pytest.approx(scores)
    assert heights(share) == pytest.approx([part.sum() for part in parts])
    sums = [x.sum() for x in np.split(np.array(heights(alone)), cuts)]
    assert sums == pytest.approx([float(len(part) > 0) for part in parts])


def test_the_title_names_the_heaviest_piece():
    picture = softmax.pieces([0, 0, 0, np.log(2)], (3,))
    assert picture.figure.get_suptitle() == "Piece 0 has 3 of 4 keys, and 60% of the attention"
    picture = softmax.pieces([0, 0, 0, np.log(9)], (3,))
    assert picture.figure.get_suptitle() == "Piece 1 has 1 of 4 keys, and 75% of the attention"
    assert "piece 1: 1 keys, lse 2.20, weight 0.75" in picture.alt


@pytest.mark.parametrize(("first", "second"), [(4, 10), (10, 4), (0, 16), (16, 0), (5, 5)])
def test_cuts_may_come_in_any_order(first, second):
    a, b = softmax.weights(first, second), softmax.weights(second, first)
    assert a.alt == b.alt
    assert a.png().startswith(b"\x89PNG")


def test_a_table_of_outcomes_names_the_one_form_that_is_right_everywhere():
    results = {
        "shifted": {"scores of 1000": "right", "empty twice": "nan"},
        "safe": {"scores of 1000": "right", "empty twice": "right"},
    }
    picture = softmax.survival(results)
    assert picture.figure.get_suptitle() == "Only safe is right in all cases"
    assert "shifted: scores of 1000 right, empty twice nan" in picture.alt
    results["shifted"]["empty twice"] = "right"
    title = softmax.survival(results).figure.get_suptitle()
    assert title == "2 of 2 ways to join are right in all cases"


def test_the_price_is_that_of_the_worst_against_the_first():
    picture = softmax.price({"none": {2: 1e-3, 4: 1e-3}, "lse": {2: 2e-3, 4: 5e-3}})
    assert (
        picture.figure.axes[0].get_title() == "With 4 pieces, lse in bfloat16: 5.0 times the error"
    )
    assert "lse 2: 2.0e-03, 4: 5.0e-03" in picture.alt


def test_moving_a_slider_draws_the_picture_of_its_values():
    explorer = widgets.weights()
    first, second, raised = explorer.children[0].children
    first.value, second.value, raised.value = 2, 9, 3.5
    assert explorer.children[1].value == softmax.weights(2, 9, 3.5).png()
