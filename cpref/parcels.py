"""Several tensors as one flat buffer: what moves is one message, in one order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = Sequence[int]


def pack(*tensors: Tensor) -> Tensor:
    """One flat contiguous buffer with the tensors one after the other."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unpack(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The views into `flat` that `pack` put there, each contiguous."""
    return [part.view(*s) for part, s in zip(flat.split(sizes_of(shapes)), shapes, strict=True)]


def sizes_of(shapes: Sequence[Shape]) -> list[int]:
    return [numel(shape) for shape in shapes]


def numel(shape: Shape) -> int:
    return math.prod(shape)


@dataclass(frozen=True)
class Parcels:
    """A part for each rank in one buffer of equal slots, as collectives want them.

    buffer: (P, slot) contiguous; parts[r]: the view of slot r in the shape of rank r's part, which
    may be smaller than the slot when the sequence is not divisible by P.
    """

    buffer: Tensor
    parts: list[Tensor]

    @staticmethod
    def empty(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> "Parcels":
        slot = max(numel(shape) for shape in shapes)
        buffer = torch.zeros(len(shapes), slot, dtype=dtype, device=device)
        parts = [row[: numel(s)].view(*s) for row, s in zip(buffer, shapes, strict=True)]
        return Parcels(buffer, parts)

    @staticmethod
    def of(parts: Sequence[Tensor]) -> "Parcels":
        parcels = Parcels.empty([p.shape for p in parts], parts[0].dtype, parts[0].device)
        for slot, part in zip(parcels.parts, parts, strict=True):
            slot.copy_(part)
        return parcels
