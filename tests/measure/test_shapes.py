import pytest
from torch._subclasses import FakeTensorMode

from cpref.measure.shapes import MODELS, model_shape
from cpref.model import Decoder


@pytest.mark.parametrize("name", ["1b", "8b"])
def test_the_count_of_parameters_is_that_of_the_decoder(name):
    shape = MODELS[name]
    with FakeTensorMode():
        model = Decoder(shape.config)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    assert sum(p.numel() for p in model.blocks[0].parameters()) == shape.layer_parameters


@pytest.mark.parametrize(
    ("name", "billions"), [("1b", 1.5), ("8b", 8.0), ("70b", 70.6), ("405b", 405.9)]
)
def test_the_models_have_the_sizes_they_are_named_for(name, billions):
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_an_unknown_model_lists_the_known_ones():
    assert model_shape("8B") is MODELS["8b"]
    with pytest.raises(ValueError, match="model is '9b'; it must be one of 1b, 8b, 70b, 405b"):
        model_shape("9b")
