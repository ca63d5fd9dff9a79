"""The figures of a plan show its own numbers."""

import pytest

from cpref.measure.plan import plan, request
from cpref.measure.shapes import model_shape
from cpref.show.plan import memory_by_part, time_by_degree


@pytest.fixture(scope="module")
def found():
    return plan(request(model_shape("8b"), 2**17, 16))


def heights(picture):
    """The top of each stack."""
    (axes,) = picture.figure.axes
    tops = {}
    for bar in axes.patches:
        at = round(bar.get_x() + bar.get_width() / 2)
        tops[at] = tops.get(at, 0.0) + bar.get_height()
    return [tops[at] for at in sorted(tops)]


def shown(found):
    return list((found.by_cp | {found.best.way.cp: found.best}).values())


def test_each_stack_is_the_memory_of_a_degree_of_cp_below_the_limit(found):
    picture = memory_by_part(found)
    totals = [one.memory.total / 1e9 for one in shown(found)]
    assert heights(picture) == pytest.approx(totals, rel=0.02)
    (limit,) = picture.figure.axes[0].lines
    assert limit.get_ydata()[0] == found.request.room / 1e9 > max(totals)
    assert f"limit {found.request.room / 1e9:.1f} GB" in picture.alt


def test_each_stack_is_the_time_of_a_degree_of_cp_and_says_what_is_the_plan(found):
    picture = time_by_degree(found)
    assert heights(picture) == pytest.approx([one.time.total for one in shown(found)], rel=0.02)
    (axes,) = picture.figure.axes
    assert "modelled" in axes.get_ylabel() and "Modelled" in picture.alt
    (bold,) = [t for t in axes.get_xticklabels() if t.get_fontweight() == "bold"]
    assert bold.get_text().startswith(f"{found.best.way.cp}\n")
    share = found.best.time.total / found.by_cp[1].time.total
    assert f"CP = {found.best.way.cp} takes {share:.0%}" in axes.get_title()


def test_a_job_of_short_sequences_says_that_cp_gains_nothing():
    picture = time_by_degree(plan(request(model_shape("8b"), 4096, 8)))
    assert picture.figure.axes[0].get_title() == "To divide sequences gains nothing here"
