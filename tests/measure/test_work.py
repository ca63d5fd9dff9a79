from dataclasses import fields

import numpy as np
import pytest
import torch

import cpref
from cpref.layout import place
from cpref.measure.work import Work, attention_work, by_step, causal_zigzag, work

pytestmark = pytest.mark.slow

MASKS = [
    cpref.Full(),
    cpref.Causal(),
    cpref.SlidingWindow(40),
    cpref.Documents((50, 30, 48)),
    cpref.MaskMod(lambda q, kv: (q + kv) % 3 == 0),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_pairs_are_those_that_the_mask_allows(ranks, layout, mask):
    placement = place(128, ranks, layout)
    counted = work(placement, placement, mask)
    for rank, owner in np.ndindex(ranks, ranks):
        rows, keys = (torch.tensor(placement.positions(r)) for r in (rank, owner))
        allowed = mask.allowed(rows[:, None], keys[None, :])
        assert counted.pairs[rank, owner] == allowed.sum()
    assert (counted.computed >= counted.pairs).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_causal_zigzag_by_formula_is_what_is_counted(ranks):
    counted, formula = attention_work(96 * ranks, ranks), causal_zigzag(96 * ranks, ranks)
    for field in fields(Work):
        assert np.array_equal(getattr(counted, field.name), getattr(formula, field.name))


def test_the_formula_refuses_what_it_does_not_hold_for():
    with pytest.raises(ValueError, match="seq_len is 100; it must be divisible by 8"):
        causal_zigzag(100, 4)


def test_zigzag_gives_all_ranks_the_same_pairs_and_contiguous_does_not():
    zigzag, contiguous = attention_work(256, 4), attention_work(256, 4, "contiguous")
    assert set(zigzag.pairs.sum(1)) == {256 * 257 // 2 // 4}
    assert contiguous.pairs.sum() == 256 * 257 // 2
    assert contiguous.pairs.sum(1)[-1] > 6 * contiguous.pairs.sum(1)[0]


def test_joined_ranks_see_what_all_of_them_see():
    assert attention_work(256, 4, joined=4).pairs.tolist() == [[256 * 257 // 2]]
    assert attention_work(256, 4, joined=2).pairs.sum() == 256 * 257 // 2


def test_at_step_i_a_rank_has_the_keys_of_the_rank_i_before_it():
    table = np.arange(9).reshape(3, 3)
    assert by_step(table).tolist() == [[0, 2, 1], [4, 3, 5], [8, 7, 6]]
