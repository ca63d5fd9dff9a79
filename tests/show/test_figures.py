import base64

import pytest

from cpref.show import figures
from cpref.show.picture import PALETTE, Picture

ALONE, TOGETHER = [5.5, 4.0, 3.0], [5.5, 4.0, 3.003]
MIB = 2**20


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


def test_a_picture_carries_its_words_to_the_notebook(tmp_path):
    picture = demo_pictures()["losses"]
    data, metadata = picture._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == metadata["image/png"]["alt"] == picture.alt
    picture.save(tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
