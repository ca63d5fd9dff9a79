import base64

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from cpref.show import figures
from cpref.show.picture import PALETTE, Picture

ALONE, TOGETHER = [5.5, 4.0, 3.0], [5.5, 4.0, 3.003]
MIB = 2**20

pytestmark = pytest.mark.slow  # drawing takes a third of a second


def demo_pictures() -> dict[str, Picture]:
    return {
        "losses": figures.losses(ALONE, TOGETHER, 4),
        "saved": figures.saved_activations(80 * MIB, {"ring": 20 * MIB, "ulysses": 22 * MIB}, 4),
    }


def test_the_losses_are_drawn_as_they_are():
    (axes,) = demo_pictures()["losses"].figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn == {"1 rank": ALONE, "4 ranks": TOGETHER}


def test_the_title_of_the_losses_says_how_far_they_are_apart():
    picture = demo_pictures()["losses"]
    assert "differ by 1e-03" in picture.figure.axes[0].get_title()
    assert "at most 1e-03 of the loss apart" in picture.alt
    assert "5.50 at the first step to 3.00 at the last" in picture.alt


def test_the_bars_are_mib_of_each_strategy_and_the_title_judges_by_the_largest():
    picture = demo_pictures()["saved"]
    (axes,) = picture.figure.axes
    assert [bar.get_height() for bar in axes.patches] == [80, 20, 22]
    assert "at most 28% of what one rank saves" in axes.get_title()
    assert "80.0 MiB on one rank, at most 22.0 MiB on each of 4 ranks" in picture.alt


@pytest.mark.parametrize("name", ["losses", "saved"])
def test_axes_are_labelled_and_colours_told_apart_by_everyone(name):
    (axes,) = demo_pictures()[name].figure.axes
    assert "(" in axes.get_ylabel(), "no unit"
    bars = [patch.get_facecolor() for patch in axes.patches]
    colours = {line.get_color() for line in axes.lines} | set(map(_hex, bars))
    assert len(colours) == 2
    assert colours <= set(PALETTE)


def _hex(colour: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(255 * part):02X}" for part in colour[:3])


@pytest.mark.parametrize(
    ("seq_len", "world_size", "contiguous", "zigzag"),
    [(16, 4, "5.8", "1.0"), (6, 4, "2.0", "9.0"), (2, 4, "0.0", "0.0"), (1, 1, "1.0", "1.0")],
)
def test_the_title_of_the_layouts_compares_the_last_rank_with_the_first(
    seq_len, world_size, contiguous, zigzag
):
    title = figures.layouts(seq_len, world_size).figure.get_suptitle()
    assert f"the last rank {contiguous} times the work of the first, zigzag {zigzag}" in title


@pytest.mark.parametrize("seq_len", [16, 17, 3])
def test_the_layouts_show_every_token_once_and_the_pairs_of_each_rank(seq_len):
    picture = figures.layouts(seq_len, 4)
    owners, work = picture.figure.axes
    cells = [cells.get_paths()[0].get_extents() for cells in owners.collections]
    assert sorted((round(box.y0 + 0.4), box.x0) for box in cells) == [
        (row, position) for row in range(3) for position in range(seq_len)
    ]
    bars = [bar.get_width() for bar in work.patches]
    in_total = [sum(bars[row * 4 : row * 4 + 4]) for row in range(3)]
    assert in_total == [seq_len * (seq_len + 1) / 2] * 3
    for name in ("contiguous", "zigzag", "striped"):
        assert f"{name}: rank 0 holds" in picture.alt


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("seq_len", "world_size"), [(16, 4), (17, 5), (1, 3), (5, 1)])
def test_the_area_of_each_rank_is_its_share_of_the_work(layout, seq_len, world_size):
    matrix, shares = figures.work(seq_len, world_size, layout).figure.axes
    drawn = matrix.images[0].get_array()
    even = seq_len * (seq_len + 1) / 2 / world_size
    for rank, bar in enumerate(shares.patches):
        area = np.isclose(drawn, to_rgb(PALETTE[rank])).all(-1).sum()
        assert bar.get_width() == pytest.approx(area / even)


def test_the_title_names_the_busiest_rank_s_share():
    assert "1.71 times an even share" in figures.work(16, 4, "contiguous").figure.get_suptitle()
    assert "1.00 times an even share" in figures.work(16, 4, "zigzag").figure.get_suptitle()


def test_only_scores_that_a_causal_mask_leaves_are_counted_as_wrong():
    across = np.arange(4)[:, None] // 2 != np.arange(4) // 2
    picture = figures.wrong_scores({"halves": across, "all": np.ones((4, 4), bool)})
    assert picture.figure.get_suptitle().endswith("40% of the scores under halves, 100% under all")
    drawn = picture.figure.axes[0].images[0].get_array()
    assert (drawn[np.triu_indices(4, 1)] == 1).all()


def test_recall_is_judged_on_each_side_of_the_cut():
    picture = figures.recall({"a": [0.0, 0.5, 1.0, 0.8], "b": [1.0] * 4}, cut=2, chance=0.1)
    (axes,) = picture.figure.axes
    assert "25% with a, 100% with b" in axes.get_title()
    assert "after it: 90% with a, 100% with b" in picture.alt
    assert list(axes.lines[0].get_ydata()) == [0.0, 0.5, 1.0, 0.8]


def test_learning_is_drawn_against_its_level():
    (axes,) = figures.learning({"a": [2.0, 1.0]}, 1.5, "guessing", "A falls").figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines == {"a": [2.0, 1.0], "guessing": [1.5, 1.5]}


def test_a_picture_carries_its_words_to_the_notebook(tmp_path):
    picture = demo_pictures()["losses"]
    data, metadata = picture._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == metadata["image/png"]["alt"] == picture.alt
    picture.save(tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_cell_shows_a_picture_and_below_it_the_words(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **how: shown.append((data, how)))
    Picture(figures.learning({"a": [1]}, 1, "b", "c").figure, "1 < 2")._ipython_display_()
    (image, image_how), (words, _) = shown
    assert image_how["metadata"]["image/png"]["alt"] == image["text/plain"] == "1 < 2"
    assert words == {"text/html": "<details><summary>in words</summary>1 &lt; 2</details>"}
