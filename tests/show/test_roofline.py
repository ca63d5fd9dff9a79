"""The roofline of a ring step bends where a tile takes as long as its block."""

import pytest

from cpref.measure.hardware import ACHIEVED, gpu_named, network_named
from cpref.show.roofline import roofline


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 32), (8, 1)])
def test_it_bends_where_a_tile_takes_as_long_as_its_block(heads, kv_heads):
    figure = roofline(heads=heads, kv_heads=kv_heads, links=("nvlink4",)).figure
    (knee,) = figure.axes[0].lines[1].get_xdata()
    gpu = gpu_named("h100-80gb")
    tile = 4 * heads * knee**2 * 128 / (ACHIEVED.attention_forward * gpu.flops)
    block = 2 * kv_heads * knee * 128 * 2 / network_named("nvlink4", gpu).inside.bandwidth
    assert tile == pytest.approx(block)


def test_a_slower_link_needs_longer_blocks_and_the_words_say_so():
    picture = roofline()
    knees = [
        line.get_xdata()[0] for line in picture.figure.axes[0].lines if len(line.get_xdata()) == 1
    ]
    assert knees == sorted(knees) and len(knees) == 3
    assert "infiniband-ndr from L = " in picture.alt and "Modelled" in picture.alt


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="h100-80gb"):
        roofline("abacus")
    with pytest.raises(ValueError, match="pcie5"):
        roofline(links=("string",))
