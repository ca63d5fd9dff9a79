"""The figures of lesson 11 show the numbers that they were given, or the planner's."""

import pytest

from cpref.measure.division import Division, memory
from cpref.measure.plan import request
from cpref.measure.shapes import model_shape
from cpref.show import savings

pytestmark = pytest.mark.slow  # drawing takes a third of a second


def title(picture):
    return picture.figure.axes[0].get_title()


def test_ranks_save_less_and_hold_the_same():
    saved, peak = {1: 80 * 2**20, 4: 20 * 2**20}, {1: 90 * 2**20, 4: 23 * 2**20}
    picture = savings.against_ranks(6 * 2**20, saved, peak)
    assert "saves 1/4" in title(picture)
    ends = [bar.get_x() + bar.get_width() for bar in picture.figure.axes[0].patches]
    assert max(ends) == 96 and picture.alt.endswith("6.0 held by each.")
    assert "4 ranks: 20.0 saved, 3.0 in passing" in picture.alt


def test_a_peak_is_compared_with_its_share_of_one_rank():
    picture = savings.peaks({"ring": {1: 800, 8: 100}, "all_gather": {1: 800, 8: 150}})
    assert "ring 1.00, all_gather 1.50" in title(picture)


@pytest.mark.parametrize("gigabytes, fit", [(80, 1), (141, 2), (10, 0)])
def test_jobs_that_fit_are_counted(gigabytes, fit):
    picture = savings.jobs({"ring": int(20e9), "all_gather": int(100e9)}, gigabytes)
    assert f"{fit} of 2 ways fit {gigabytes} GB" in title(picture)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_fewest_ranks_are_those_of_the_planner(recompute):
    model, tokens = model_shape("8b"), 2**20

    def needs(ranks):
        way = Division(ranks, 1, 1, 1, "ring", recompute=recompute, shard_all=True)
        return memory(request(model, tokens, ranks), way).total

    fewest = next(P for P in (2**n for n in range(11)) if needs(P) <= 80e9)
    assert f"fewest ranks: ring {fewest}," in title(savings.fewest_ranks(recompute=recompute))


def test_where_nothing_fits_it_says_so():
    picture = savings.fewest_ranks("405b", shard_all=False)
    assert "ring none, all_gather none, ulysses none" in title(picture)


def test_the_fewest_ranks_have_controls():
    widgets = pytest.importorskip("cpref.show.savings_widgets")
    explorer = widgets.fewest_ranks()
    before = explorer._image.value
    explorer._controls["recompute"].value = False
    assert explorer._image.value != before
