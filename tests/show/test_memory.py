import pytest
import torch

from cpref.measure.memory import measure_memory
from cpref.measure.shapes import MODELS
from cpref.model import Block, Config, causal_attention, rotary
from cpref.show import memory

pytestmark = pytest.mark.slow  # drawing takes a third of a second


def test_growth_says_where_the_lines_cross():
    picture = memory.growth({100: 2**20, 200: 2 * 2**20, 400: 4 * 2**20}, 3 * 2**20)
    assert "about 300 tokens" in picture.figure.axes[0].get_title()
    assert "cross near 300 tokens" in picture.alt


def test_the_largest_part_is_in_the_title():
    picture = memory.by_part({"norms": 100, "attention": 200, "feed-forward": 700})
    assert "feed-forward keeps 70%" in picture.figure.axes[0].get_title()


def test_the_square_is_a_square():
    lengths = (128, 256, 512)
    picture = memory.square({n: n * n * 4 for n in lengths}, {n: 40 * n for n in lengths})
    assert "4.0 × the bytes with all scores, 2.0" in picture.figure.axes[0].get_title()


def test_ranks_share_the_tokens_and_not_the_model():
    picture = memory.devices(10 * 2**20, {1: 40 * 2**20, 4: 10 * 2**20}, 32_000)
    assert "each saves 1/4" in picture.figure.axes[0].get_title()
    assert "10.0 held by each" in picture.alt


def test_saved_per_token_is_what_a_block_of_that_shape_saves():
    """Of the 1B model, in float32, one layer: measured on 16 tokens."""
    shape, tokens = MODELS["1b"], 16
    config: Config = shape.config
    block, rotation = Block(config), rotary(torch.arange(tokens), config.head_dim)
    x = torch.randn(1, tokens, config.width, requires_grad=True) * 1
    with measure_memory(block.parameters()) as measured:
        block(x, rotation, causal_attention)
    per_token = (measured.saved_bytes - rotation.nbytes) / tokens
    assert memory.saved_per_token("1b", 4) == shape.layers * per_token


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_wall_moves_with_the_ranks(ranks):
    picture = memory.wall("8b", ranks)
    alone = 80 * 10**9 // memory.saved_per_token("8b")
    assert f"{alone:,} tokens" in picture.figure.axes[0].get_title()
    assert len(picture.figure.axes[0].lines) == (3 if ranks == 1 else 5)


def test_the_wall_has_controls():
    widgets = pytest.importorskip("cpref.show.memory_widgets")
    explorer = widgets.wall()
    before = explorer._image.value
    explorer._controls["ranks"].value = 64
    assert explorer._image.value != before
