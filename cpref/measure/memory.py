"""What autograd keeps for the backward: the memory that a long sequence costs.

Parameters are there anyway, whatever the sequence; so they are counted apart. A storage is counted
once, however many operations save it or a view of it.

Source: saved tensor hooks, https://pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Memory:
    """What `measure_memory` has seen so far.

    saved_bytes: what the operations run inside keep for backward, apart from parameters.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._sizes: dict[int, int] = {}
        self._held: list[Tensor] = []  # why: a storage that is freed could lend its address again

    @property
    def saved_bytes(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._sizes[storage.data_ptr()] = storage.nbytes()
            self._held.append(tensor.detach())
        # why: an operation that saves its own result would hold itself, and never be freed
        return tensor if tensor.is_leaf else tensor.detach()


@contextmanager
def measure_memory(parameters: Iterable[Tensor] = ()) -> Iterator[Memory]:
    """`with measure_memory(model.parameters()) as memory: loss = ...`, then `memory.saved_bytes`.

    Counts what is saved while inside, in this thread, apart from the storages of `parameters`.
    It holds on to what it counts until the block ends; backward may follow inside or after.
    """
    memory = Memory(parameters)
    try:
        with torch.autograd.graph.saved_tensors_hooks(memory._pack, lambda tensor: tensor):
            yield memory
    finally:
        memory._held.clear()
