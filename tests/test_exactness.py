"""The matrix: every strategy, layout, mask, dtype, number of heads and length against the judge."""

import math
from dataclasses import replace

import pytest
import torch

import cpref
from cpref import matrix
from cpref.exactness import Case, Errors, bounds, errors, exact, inputs, judge, relative_error
from cpref.strategies import ring

CHOICES = matrix.covering(matrix.OPTIONS)


def named(choice: matrix.Choice) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in choice.values())


def measure(group, case: Case) -> Errors:
    return errors(case, group)


def within_bounds(world, case: Case, ranks: int) -> None:
    measured = world(measure, ranks, case)
    assert all(each == measured[0] for each in measured)
    allowed = bounds(case)
    assert measured[0].within(allowed), f"{case}: {measured[0]}, bounds {allowed}"


@pytest.mark.parametrize("choice", CHOICES, ids=named)
@pytest.mark.parametrize(
    "ranks",
    [1, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3, 4, 5))],
)
def test_out_and_gradients_are_within_their_bounds(world, ranks, choice):
    within_bounds(world, matrix.case(choice, ranks), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES[::5], ids=named)
def test_eight_ranks_are_within_the_bounds(world, choice):
    within_bounds(world, matrix.case(choice, 8), 8)


@pytest.mark.full
@pytest.mark.parametrize("mask", matrix.MASKS)
@pytest.mark.parametrize("strategy", matrix.OPTIONS["strategy"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_the_full_product_is_within_its_bounds(ranks, strategy, mask):
    missed = []
    for choice in matrix.everything(strategy=strategy, mask=mask):
        case = matrix.case(choice, ranks)
        measured = cpref.run_local(measure, ranks, case)[0]
        if not measured.within(bounds(case)):
            missed.append(f"{case}: {measured}, bounds {bounds(case)}")
    assert not missed, "\n".join(missed)


# -- the measure itself ---------------------------------------------------------------------------


def test_a_slightly_wrong_kernel_misses_every_bound(monkeypatch):
    """A relative error of 1e-5 in the keys: invisible to a tolerance of 1e-3, not to the bounds."""
    right = ring.attend

    def wrong(total, q, k, v, tiles, job):
        right(total, q, k * (1 + 1e-5), v * (1 + 1e-5), tiles, job)

    monkeypatch.setattr(ring, "attend", wrong)
    for dtype in (torch.float32, torch.float64):
        measured = cpref.run_local(measure, 2, Case(dtype=dtype))[0]
        assert not measured.within(bounds(Case(dtype=dtype)))


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.001e-6])
def test_one_number_over_its_bound_is_a_miss(name, wrong):
    bound = Errors(1e-6, 1e-6, 1e-6, 1e-6)
    assert bound.within(bound)
    assert not replace(bound, **{name: wrong}).within(bound)


def test_the_bounds_are_those_of_the_design():
    assert bounds(Case(dtype=torch.float32)) == Errors(1e-6, 3e-6, 3e-6, 3e-6)
    same_roundings = bounds(Case(dtype=torch.float64))
    assert same_roundings.out == 1e-6 * 2**-29  # the ratio of the epsilons, 2^-52 to 2^-23
    half = Case(dtype=torch.bfloat16, seq_len=256)
    merged, in_float32 = bounds(half), bounds(replace(half, accumulate="exact"))
    assert merged.out / in_float32.out == pytest.approx(1.6 / 1.15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_attention_is_itself_the_bound_of_half_precision(dtype):
    """The bounds divided by their factor are what scaled_dot_product_attention gets wrong."""
    case = Case(dtype=dtype, seq_len=256)
    given = inputs(case)
    leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(out, leaves, given.grad_out)
    measured = [
        relative_error(x.detach(), right)
        for x, right in zip((out, *grads), exact(case).results, strict=True)
    ]
    allowed = bounds(case)
    expected = [1.6 * error for error in measured]
    assert [allowed.out, allowed.dq, allowed.dk, allowed.dv] == pytest.approx(expected)


def test_the_judge_is_what_autograd_makes_of_the_definition():
    case = Case(dtype=torch.float64, kv_heads=2, seq_len=20)
    given, judged = inputs(case), exact(case)
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    scores = q @ k.repeat_interleave(2, 1).mT / 4
    later = torch.ones(20, 20).triu(1).bool()
    out = scores.masked_fill(later, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    right = out.detach(), *torch.autograd.grad(out, [q, k, v], given.grad_out)
    for x, exactly in zip(judged.results, right, strict=True):
        assert relative_error(x, exactly) < 1e-14


def test_a_gradient_that_is_zero_is_measured_by_the_terms_that_cancel():
    """Each query sees one key: dq and dk are exactly 0, out is v."""
    given = inputs(Case(dtype=torch.float64, seq_len=5))
    tensors = given.q, given.k, given.v, given.grad_out
    judged = judge(*tensors, mask=cpref.SlidingWindow(1))
    delta = (given.grad_out * given.v).sum(-1, keepdim=True) / 4
    assert judged.results[1].norm() < 1e-12
    assert relative_error(judged.sizes[1], delta * given.k) < 1e-14
    assert relative_error(judged.sizes[2], delta * given.q) < 1e-14


def test_where_a_query_sees_many_keys_the_error_is_relative_to_the_gradient_itself():
    for mask in (cpref.Full(), cpref.Causal()):
        judged = exact(Case(mask=mask, seq_len=257))
        for result, size in zip(judged.results, judged.sizes, strict=True):
            assert size is result


def test_relative_error_of_what_is_to_be_zero():
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_error(zero, zero) == 0
    assert relative_error(one, zero) == math.inf
    assert relative_error(one * 1.5, one) == pytest.approx(0.5)
    assert math.isnan(relative_error(one * math.nan, one))
