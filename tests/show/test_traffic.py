"""The figures of what travels draw what they say, and say what they draw."""

import numpy as np
import pytest

from cpref.measure.cost import Shape, backward_sent, forward_sent
from cpref.show import traffic

pytestmark = pytest.mark.slow

widgets = pytest.importorskip("cpref.show.traffic_widgets")
MIB = 2**20


def lines(picture):
    """Name -> (x, y) of each named line."""
    named = {line.get_label(): line for line in picture.figure.axes[0].lines}
    return {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in named.items()}


@pytest.mark.parametrize(("strategy", "comes"), [("all_gather", "K,V"), ("reduce_scatter", "Q")])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_everything_is_held_between_the_two_moves_and_one_block_outside(strategy, comes, ranks):
    picture = traffic.holders(strategy, ranks)
    held = [len(panel.patches) for panel in picture.figure.axes]
    assert held == [ranks, ranks**2, ranks**2, ranks]
    assert f"its own block of {comes}" in picture.alt


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 1), (4, 4)])
def test_the_curves_are_those_of_the_formulas(heads, kv_heads):
    for name, (counts, sizes) in lines(traffic.sent(heads, kv_heads)).items():
        for ranks, size in zip(counts, sizes, strict=True):
            shape = Shape(1, 32768, heads, kv_heads, 128, ranks, 2)
            both = forward_sent(name, shape) + backward_sent(name, shape)
            assert size * MIB == pytest.approx(both.bytes)


def test_ulysses_ends_where_the_heads_do():
    assert lines(traffic.sent(4, 4))["ulysses"][0] == [2, 4]
    title = traffic.sent(4, 4).figure.axes[0].get_title()
    assert title.endswith("P = 8 is more than the 4 heads: no Ulysses")


def test_counted_bytes_are_drawn_in_mib():
    picture = traffic.counted({"ring": {2: MIB, 4: 3 * MIB}}, "A title")
    assert lines(picture)["ring"] == ([2, 4], [1, 3])
    assert "ring 2: 1.00, 4: 3.00" in picture.alt


def test_held_memory_is_in_units_of_all_keys_and_values():
    picture = traffic.held({"ring": {1: 50, 4: 25}, "all_gather": {1: 60, 4: 110}}, whole=100)
    assert lines(picture)["ring"] == ([1, 4], [0.5, 0.25])
    title = picture.figure.axes[0].get_title()
    assert title.endswith("P = 4 a rank's peak, in units of all K,V: ring 0.25, all_gather 1.10")


@pytest.mark.parametrize(
    ("moving_q", "finding"),
    [([1, 2, 9], "is cheaper up to Sq = 8 of 64"), ([6, 7, 8], "is never cheaper here")],
)
def test_the_title_names_the_last_length_at_which_moving_queries_is_cheaper(moving_q, finding):
    sizes = {"all_gather": [5, 5, 5], "reduce_scatter": moving_q}
    picture = traffic.crossing([4, 8, 16], sizes, kv_len=64)
    assert picture.figure.axes[0].get_title().endswith(finding)
    assert finding in picture.alt


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("heads", "seq_len", "ranks"), [(4, 16, 4), (6, 9, 3), (4, 13, 2)])
def test_the_exchange_turns_columns_into_rows(layout, heads, seq_len, ranks):
    before, after = traffic.exchange(heads, seq_len, ranks, layout).figure.axes
    columns, rows = (np.asarray(panel.images[0].get_array()) for panel in (before, after))
    assert (columns == columns[:1]).all()
    assert (rows == rows[:, :1]).all()
    assert len(np.unique(rows[:, 0], axis=0)) == ranks


def test_heads_that_cannot_be_dealt_are_not():
    picture = traffic.exchange(4, 16, 3, "zigzag")
    assert "4 heads cannot be dealt to 3 ranks" in picture.alt
    assert "Afterwards" not in picture.alt


def test_each_rank_stands_once_in_the_table():
    picture = traffic.table_of_ranks(2, 3)
    said = [text.get_text() for text in picture.figure.axes[0].texts]
    assert said == [f"rank {rank}" for rank in range(6)]
    assert "6 ranks: 3 share the heads, a ring has 2" in picture.alt


@pytest.mark.parametrize("name", ["sent", "moved_queries", "exchange"])
def test_moving_a_slider_draws_the_picture_of_its_values(name):
    explorer = getattr(widgets, name)()
    controls, image, words = explorer.children
    controls.children[0].value = 2
    values = {key: control.value for key, control in explorer._controls.items()}
    expected = getattr(traffic, name)(**values)
    assert image.value == expected.png()
    assert "2" in words.value and expected.alt in words.value


def test_more_key_heads_than_query_heads_are_said_to_be_impossible():
    picture = traffic.sent(heads=2, kv_heads=8)
    assert "2 query heads cannot share 8 key heads" in picture.alt
    assert not picture.figure.axes[0].lines
