from cpref.show.cost import Compared, predicted_and_measured

ROWS = [
    Compared(length, strategy, 0.9 * length, 2.0 * length, 1.0 * length, 2.0 * length)
    for length in (2048, 4096)
    for strategy in ("ring", "all_gather")
]


def test_a_ratio_is_predicted_over_measured():
    assert ROWS[0].ratio == 2.9 / 3


def test_the_figure_says_how_far_the_prediction_is_off():
    picture = predicted_and_measured(ROWS, 2)
    assert "within 3% of what 2 CPU ranks" in picture.figure.get_suptitle()
    assert "4,096 tokens, all_gather" in picture.alt
    assert len(picture.figure.axes) == 2
    assert all(axes.get_title().endswith("tokens") for axes in picture.figure.axes)
    assert picture.png().startswith(b"\x89PNG")
