"""Which cases are looked at."""

import math

import pytest

from cpref import matrix
from cpref.matrix import OPTIONS, case, covering, document_lengths, groups_of, parts, product


@pytest.mark.parametrize("together", [(), (("strategy", "dtype", "seq_len"),)], ids=str)
def test_every_pair_of_options_is_covered(together):
    groups = groups_of(OPTIONS, *together)
    covered = set().union(*(parts(choice, groups) for choice in covering(OPTIONS, *together)))
    for group in groups:
        for choice in product({name: OPTIONS[name] for name in group}):
            assert parts(choice, [group]) <= covered


def test_the_cover_is_small_and_the_same_every_time():
    cover = covering(OPTIONS)
    assert cover == covering(OPTIONS)
    largest, second = sorted(map(len, OPTIONS.values()))[:-3:-1]
    assert largest * second <= len(cover) <= 1.25 * largest * second
    assert all(choice.keys() == OPTIONS.keys() for choice in cover)


def test_the_product_has_every_choice_once():
    choices = [tuple(choice.values()) for choice in product(OPTIONS)]
    assert len(choices) == len(set(choices)) == math.prod(map(len, OPTIONS.values()))


def test_everything_is_the_product_without_what_gives_the_same_bits():
    choices = list(matrix.everything(strategy="ring"))
    assert len(choices) == 3 * 8 * (2 * 2 + 2) * 3 * 4 * 2
    assert {choice["strategy"] for choice in choices} == {"ring"}
    assert len({tuple(choice.values()) for choice in choices}) == len(choices)


@pytest.mark.parametrize("seq_len", [1, 7, 64, 257])
def test_documents_fill_the_sequence(seq_len):
    assert sum(document_lengths(seq_len)) == seq_len


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8])
def test_every_case_can_be_shared_by_its_ranks(ranks):
    for choice in covering(OPTIONS):
        made = case(choice, ranks)
        assert made.heads == made.kv_heads * choice["heads_per_kv_head"]
        assert ranks % made.neighbours == 0
        if made.strategy == "ulysses":
            assert made.heads % ranks == 0
        if made.strategy == "hybrid":
            assert made.heads % made.neighbours == 0


def test_the_masks_of_the_matrix_are_of_every_kind():
    kinds = {type(make(64)[0]).__name__ for make in matrix.MASKS.values()}
    assert kinds == {"Full", "Causal", "SlidingWindow", "Documents", "MaskMod"}
