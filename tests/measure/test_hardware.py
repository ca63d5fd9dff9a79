import pytest

from cpref.measure import hardware
from cpref.measure.cost import Shape, backward_flops, forward_flops
from cpref.measure.hardware import (
    ACHIEVED,
    GPUS,
    LINKS,
    attention_machine,
    gpu_named,
    network_named,
)
from cpref.measure.times import backward_pass, forward_pass
from cpref.measure.work import causal_zigzag


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("link", LINKS)
def test_all_that_is_named_is_in_the_docstring(name, link):
    assert gpu_named(name.upper()).name == name
    assert name in hardware.__doc__
    assert link.rstrip("345") in hardware.__doc__


def test_a_node_is_joined_by_nvlink_and_nodes_by_infiniband():
    network = network_named("nvlink+ib", gpu_named("h100-80gb"))
    assert network.link(8).bandwidth == ACHIEVED.link * 450e9
    assert network.link(16).bandwidth == ACHIEVED.link * 50e9
    assert network_named("nvlink+ib", gpu_named("b200")).link(8).bandwidth == ACHIEVED.link * 900e9
    assert network_named("infiniband-ndr", gpu_named("h200")).link(2).bandwidth < 50e9


def test_what_is_unknown_lists_what_is_known():
    with pytest.raises(ValueError, match="gpu is 'v100'; it must be one of a100-80gb, h100-80gb"):
        gpu_named("v100")
    with pytest.raises(ValueError, match=r"link is 'modem'; .*nvlink\+ib"):
        network_named("modem", gpu_named("h200"))


def test_a_long_attention_on_one_gpu_reaches_the_achieved_part_of_its_peak():
    gpu = gpu_named("h100-80gb")
    shape = Shape(1, 131_072, 32, 8, 128, 1, 2)
    work = causal_zigzag(131_072, 1)
    machine = attention_machine(gpu, network_named("nvlink4", gpu).link(1))
    pairs = int(work.pairs.sum())
    for modelled, flops, part in (
        (forward_pass("ring", shape, work, machine), forward_flops, ACHIEVED.attention_forward),
        (backward_pass("ring", shape, work, machine), backward_flops, ACHIEVED.attention_backward),
    ):
        reached = flops(shape, pairs) / modelled.total / gpu.flops
        assert part * 0.98 < reached < part
