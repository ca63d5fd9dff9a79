"""Who may attend to whom."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpref import Causal, Documents, Full, MaskMod, SlidingWindow
from cpref.mask import as_mask

inners = st.one_of(st.just(Causal()), st.just(Full()), st.builds(SlidingWindow, st.integers(1, 12)))
documents = st.builds(Documents, st.lists(st.integers(1, 9), min_size=1, max_size=8), inners)


def table(mask, seq_len, kv_seq_len=None):
    """The whole mask as a (S, Skv) bool tensor."""
    keys = torch.arange(seq_len if kv_seq_len is None else kv_seq_len)
    return mask.allowed(torch.arange(seq_len)[:, None], keys[None, :])


def picture(mask, seq_len):
    return ["".join(".x"[int(seen)] for seen in row) for row in table(mask, seq_len)]


@pytest.mark.parametrize(
    ("mask", "drawn"),
    [
        (Full(), ["xxxx", "xxxx", "xxxx", "xxxx"]),
        (Causal(), ["x...", "xx..", "xxx.", "xxxx"]),
        (SlidingWindow(2), ["x...", "xx..", ".xx.", "..xx"]),
        (SlidingWindow(1), ["x...", ".x..", "..x.", "...x"]),
        (SlidingWindow(9), ["x...", "xx..", "xxx.", "xxxx"]),
        (Documents([1, 3]), ["x...", ".x..", ".xx.", ".xxx"]),
        (Documents([2, 2], Full()), ["xx..", "xx..", "..xx", "..xx"]),
        (Documents([1, 3], SlidingWindow(2)), ["x...", ".x..", ".xx.", "..xx"]),
        (Documents([1, 1, 1, 1]), ["x...", ".x..", "..x.", "...x"]),
        (MaskMod(lambda q, kv: (q + kv) % 2 == 0), ["x.x.", ".x.x", "x.x.", ".x.x"]),
    ],
)
def test_a_mask_is_what_it_says(mask, drawn):
    assert picture(mask, 4) == drawn


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    mask=st.one_of(inners, documents),
    seq_len=st.integers(1, 60),
    every=st.integers(1, 5),
)
def test_the_interval_of_a_band_is_what_it_allows(mask, seq_len, every):
    if isinstance(mask, Documents):
        seq_len = sum(mask.lengths)
    positions = np.arange(0, seq_len, every)
    first, last = mask.interval(positions, seq_len)
    keys = np.arange(seq_len)
    by_interval = (first[:, None] <= keys) & (keys < last[:, None])
    assert (by_interval == table(mask, seq_len).numpy()[positions]).all()
    assert (np.diff(first) >= 0).all()
    assert (np.diff(last) >= 0).all()


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(3), Documents([8])])
def test_a_mask_that_compares_positions_needs_as_many_keys_as_queries(mask):
    mask.require_lengths(8, 8)
    with pytest.raises(ValueError, match="seq_len is 8 and kv_seq_len 5; use Full"):
        mask.require_lengths(8, 5)


def test_full_and_a_mask_mod_take_any_lengths():
    Full().require_lengths(8, 5)
    MaskMod(lambda q, kv: q >= kv).require_lengths(8, 5)


def test_documents_must_fill_the_sequence():
    with pytest.raises(ValueError, match="add up to 7 tokens, but seq_len is 8"):
        Documents([3, 4]).require_lengths(8, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(0), "SlidingWindow size is 0; it must be at least 1"),
        (lambda: SlidingWindow(2.0), "SlidingWindow size is 2.0"),
        (lambda: Documents([]), "at least 1 token"),
        (lambda: Documents([3, 0]), r"\(3, 0\); each must be at least 1 token"),
        (lambda: Documents([3], inner=Documents([3])), "inner is Documents"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_masks_are_equal_and_say_the_same():
    assert Documents([3, 5]) == Documents((3, 5))
    assert hash(Documents([3, 5])) == hash(Documents(torch.tensor([3, 5]).tolist()))
    assert str(Documents([3, 5])) == str(Documents((3, 5)))
    assert Documents([3, 5]) != Documents([5, 3])


def test_a_window_is_the_same_by_whatever_number_it_is_given():
    assert repr(SlidingWindow(np.int64(3))) == repr(SlidingWindow(3))


def test_a_function_becomes_a_mask_mod():
    def past(q_index, kv_index):
        return kv_index <= q_index

    assert torch.equal(table(as_mask(past), 6), table(Causal(), 6))
    assert "past" in str(as_mask(past))
    assert as_mask(Causal()) == Causal()


@pytest.mark.parametrize("what", [None, True, Causal, torch.ones(4, 4, dtype=torch.bool), "causal"])
def test_what_is_no_mask_is_refused(what):
    with pytest.raises(TypeError, match="it must be Full"):
        as_mask(what)


def test_a_mask_mod_of_flex_attention_is_told_how_to_drop_batch_and_head():
    with pytest.raises(TypeError, match=r"takes \(q_index, kv_index\) and nothing else"):
        as_mask(lambda batch, head, q, kv: q >= kv)


def test_a_mask_mod_must_return_bool():
    with pytest.raises(TypeError, match=r"must return bool; it returned torch.int64"):
        table(as_mask(lambda q, kv: q - kv), 4)


def test_a_mask_mod_may_look_at_one_index_only():
    assert picture(as_mask(lambda q, kv: kv < 2), 3) == ["xx.", "xx.", "xx."]
    assert picture(as_mask(lambda q, kv: q > 0), 3) == ["...", "xxx", "xxx"]
