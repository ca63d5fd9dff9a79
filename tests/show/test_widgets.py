"""Sliders draw the picture anew, and a viewer without a kernel still sees one."""

import pytest

from cpref.show import figures

pytestmark = pytest.mark.slow

widgets = pytest.importorskip("cpref.show.widgets")
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("name", ["attention_matrix", "work"])
def test_moving_a_slider_draws_the_picture_of_its_values(name):
    explorer = getattr(widgets, name)()
    tokens, ranks, layout = explorer.children[0].children
    image, words = explorer.children[1:]
    for tokens.value, ranks.value, layout.value in [(17, 5, "striped"), (2, 8, "zigzag")]:
        expected = getattr(figures, name)(tokens.value, ranks.value, layout.value)
        assert image.value == expected.png()
        assert expected.alt in words.value


def test_the_output_holds_the_widget_and_its_static_twin():
    explorer = widgets.work()
    data, metadata = explorer._repr_mimebundle_()
    twin, alt = figures.work(16, 4, "zigzag")._repr_mimebundle_()
    assert VIEW in data
    assert {kind: data[kind] for kind in twin} == twin
    assert metadata == alt
