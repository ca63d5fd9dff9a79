"""Real long inputs without a download: the Python language reference, as bytes.

Every Python brings the text of its reference along, for `help()`: one document of several hundred
thousand characters. A token is a byte, so the vocabulary has 256 entries and any text file can take
its place.
"""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor

VOCAB = 256


def document(path: str | Path | None = None) -> Tensor:
    """A whole document as byte tokens, (S,) int64. None: the reference of the running Python.

    Raises ValueError if the file cannot be read or is empty.
    """
    if path is None:
        text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    else:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"document {path}: {error.strerror or error}") from error
    if not text:
        raise ValueError(f"document {path} is empty; it must have at least 2 bytes")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


def sequences(tokens: Tensor, seq_len: int, *, batch: int = 1, seed: int = 0) -> Iterator[Tensor]:
    """Endless batches (B, S) int64, each row a run of the document from a random place.

    The same seed gives the same batches on every rank and in every run.
    Raises ValueError if the document is shorter than seq_len, or seq_len is below 2.
    """
    if not 2 <= seq_len <= len(tokens):
        raise ValueError(
            f"seq_len is {seq_len}; it must be from 2 to the {len(tokens)} tokens of the document"
        )
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - seq_len + 1, (batch,), generator=draw)
        yield torch.stack([tokens[start : start + seq_len] for start in starts.tolist()])
