"""The matrix: every strategy, layout, mask, dtype, number of heads and length against the judge."""

import pytest

from cpref import matrix
from cpref.exactness import Case, bounds, errors

RANKS = (1, 2, 3, 4, 5, 8)
CHOICES = matrix.covering(matrix.OPTIONS)


def named(choice: matrix.Choice) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in choice.values())


def within_bounds(world, case: Case, ranks: int) -> None:
    measured = world(measure, ranks, case)
    assert all(each == measured[0] for each in measured)
    allowed = bounds(case)
    assert measured[0].within(allowed), f"{case}: {measured[0]}, bounds {allowed}"


@pytest.mark.parametrize("choice", CHOICES, ids=named)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 5))
def test_out_and_gradients_are_within_their_bounds(world, ranks, choice):
    within_bounds(world, matrix.case(choice, ranks), ranks)


@pytest.mark.parametrize("choice", CHOICES[::5], ids=named)
def test_eight_ranks_are_within_the_bounds(world, choice):
    within_bounds(world, matrix.case(choice, 8), 8)


def measure(group, case: Case):
    return errors(case, group)
