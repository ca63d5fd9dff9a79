import itertools

import pytest
import torch

from cpref.data import VOCAB, document, sequences


def test_the_reference_of_python_is_a_long_document_of_bytes():
    tokens = document()
    assert len(tokens) > 300_000
    assert tokens.dtype == torch.int64
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB
    assert b"statement" in bytes(tokens.tolist())
    assert torch.equal(tokens, document())


def test_a_file_can_take_its_place(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("une séquence".encode())
    assert bytes(document(path).tolist()).decode() == "une séquence"


@pytest.mark.parametrize("content", [None, b""])
def test_an_unreadable_or_empty_file_is_named(tmp_path, content):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        document(path)


def test_the_same_seed_gives_the_same_sequences():
    tokens = torch.arange(100)
    first, again, other = (
        torch.stack(list(itertools.islice(sequences(tokens, 10, batch=3, seed=seed), 4)))
        for seed in (1, 1, 2)
    )
    assert first.shape == (4, 3, 10)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.diff(dim=-1), torch.ones(4, 3, 9, dtype=torch.int64))


@pytest.mark.parametrize("seq_len", [0, 1, 101])
def test_a_length_that_the_document_cannot_give_is_refused(seq_len):
    with pytest.raises(ValueError, match=f"seq_len is {seq_len}"):
        next(sequences(torch.arange(100), seq_len))


def test_the_whole_document_is_one_sequence():
    tokens = torch.arange(100)
    assert torch.equal(next(sequences(tokens, 100))[0], tokens)
