"""The fit: from times that a known machine would need, its constants come back."""

import pytest
import torch

import cpref
from cpref.measure.fit import Problem, _least_squares, fit, probes
from cpref.measure.times import Link, Machine, Rates

KNOWN = Machine(
    Rates(pair=2e-10, edge=5e-8, number=1e-9, call=1e-4, start=2e-3),
    Rates(pair=6e-10, edge=9e-8, number=2e-9, call=3e-4, start=4e-3),
    Link(latency=5e-4, bandwidth=2e9),
)


def field(ranks):
    return cpref.run_local(lambda group: list(probes(Problem(), group)), ranks)[0]


def seconds(probe):
    if probe.kind == "block":
        return KNOWN.link.seconds(probe.parts[1])
    if probe.kind.startswith("start"):
        return getattr(KNOWN, probe.kind.removeprefix("start ")).start
    rates = getattr(KNOWN, probe.kind)
    constants = rates.pair, rates.edge, rates.number, rates.call
    return sum(p * c for p, c in zip(probe.parts, constants, strict=True))


@pytest.mark.slow
def test_the_constants_of_a_known_machine_come_back():
    probed = field(2)
    found = fit(probed, [seconds(probe) for probe in probed], 2)
    for name in ("forward", "backward"):
        expected, got = getattr(KNOWN, name), getattr(found.machine, name)
        for constant in ("pair", "edge", "number", "call", "start"):
            assert getattr(got, constant) == pytest.approx(getattr(expected, constant), rel=1e-6)
    assert found.machine.link.latency == pytest.approx(5e-4)
    assert found.machine.link.bandwidth == pytest.approx(2e9)
    assert max(found.worst.values()) < 1e-6


@pytest.mark.slow
def test_one_rank_has_no_link():
    probed = field(1)
    assert fit(probed, [seconds(probe) for probe in probed], 1).machine.link.latency == 0


def test_the_probes_do_what_they_are_named_after():
    def run(group):
        small = [p for p in probes(Problem(heads=2, kv_heads=1, head_dim=8), group)]
        for probe in small:
            if probe.kind.startswith("start") or (probe.kind == "block" and probe.parts[1] < 1e6):
                brought = probe.run(probe.prepare())
                assert brought is not None
        return {probe.kind for probe in small}

    kinds = {"forward", "backward", "block", "start forward", "start backward"}
    assert cpref.run_local(run, 2) == [kinds, kinds]


def test_no_constant_is_negative():
    samples = [((1.0, 1.0), 1.0), ((1.0, 10.0), 0.9)]  # a straight line would go down
    assert min(_least_squares(samples)) >= 0
    assert torch.tensor(_least_squares(samples)).sum() > 0
