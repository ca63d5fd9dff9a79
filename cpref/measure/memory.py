"""Where the memory of a training step goes, seen from one rank.

What autograd keeps for backward is what a long sequence costs. Parameters, their gradients and the
optimizer's state are there whatever the sequence; so they are counted apart. A storage is counted
once, however many operations save it or a view of it.

Sources: saved tensor hooks, https://pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc;
torch.cuda.max_memory_allocated for the allocator's own count.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn as nn
from torch import Tensor

from .peak import LiveBytes


class Memory:
    """What `measure_memory` has seen so far. All in bytes, of this rank alone.

    saved_by_module: what was saved for backward while a module ran, apart from parameters, by the
    name of the innermost one; "" is the model itself, or what ran outside of it.
    """

    def __init__(self, parameters: list[Tensor], optimizer: torch.optim.Optimizer | None):
        self._parameters, self._optimizer = parameters, optimizer
        self._counted = {p.untyped_storage()._cdata for p in map(_local, parameters)}
        self._live = _LiveByPass()
        self._running = [""]
        self._thread = threading.get_ident()
        self._on_cuda = torch.cuda.is_available()
        self.saved_by_module: dict[str, int] = {}

    @property
    def saved_bytes(self) -> int:
        """What the operations run inside keep for backward, apart from parameters."""
        return sum(self.saved_by_module.values())

    @property
    def forward_peak_bytes(self) -> int:
        """The most that was alive before the first backward, of what came into being inside."""
        return self._live.forward_peak_bytes

    @property
    def backward_peak_bytes(self) -> int:
        """The most that was alive while a backward ran, of what came into being inside."""
        return self._live.backward_peak_bytes

    @property
    def peak_bytes(self) -> int:
        """The same at any time, an optimizer's step included."""
        return self._live.peak_bytes

    @property
    def parameter_bytes(self) -> int:
        return bytes_held(self._parameters)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that the parameters have now."""
        return bytes_held(p.grad for p in self._parameters if p.grad is not None)

    @property
    def optimizer_bytes(self) -> int:
        """Of the state that the optimizer has now; 0 without one, or before its first step."""
        return 0 if self._optimizer is None else optimizer_bytes(self._optimizer)

    @property
    def allocator_peak_bytes(self) -> int | None:
        """On CUDA: the most that its allocator had handed out, what was there before included."""
        return torch.cuda.max_memory_allocated() if self._on_cuda else None

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._counted:
            self._counted.add(key)
            # why: a storage that is freed may lend its address to another one
            weakref.finalize(storage, self._counted.discard, key)
            module = self._running[-1]
            saved = self.saved_by_module.get(module, 0)
            self.saved_by_module[module] = saved + storage.nbytes()
        # why: an operation that saves its own result would hold itself, and never be freed
        return tensor if tensor.is_leaf else tensor.detach()

    def _enter(self, name: str) -> None:
        if threading.get_ident() == self._thread:  # why: local ranks may share a model
            self._running.append(name)

    def _leave(self) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()


@contextmanager
def measure_memory(
    model: nn.Module | Iterable[Tensor] = (), optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Memory]:
    """`with measure_memory(model, optimizer) as memory:` a step, then `memory.saved_bytes`, ...

    model: a module, or only its parameters; then what is saved is not told apart by module.
    Counts what happens while inside, in this thread, in any number of steps. What activation
    checkpointing makes again in backward counts as alive, not as saved.
    """
    whole = isinstance(model, nn.Module)
    memory = Memory(list(model.parameters() if whole else model), optimizer)
    with ExitStack() as stack:
        for name, module in model.named_modules() if whole else ():
            for handle in _follow(memory, name, module):
                stack.callback(handle.remove)
        if memory._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        hooks = torch.autograd.graph.saved_tensors_hooks(memory._pack, lambda tensor: tensor)
        stack.enter_context(hooks)
        stack.enter_context(memory._live)
        yield memory


def _follow(memory: Memory, name: str, module: nn.Module) -> list:
    """Let the memory know when the module begins and ends."""
    return [
        module.register_forward_pre_hook(lambda *_: memory._enter(name)),
        module.register_forward_hook(lambda *_: memory._leave(), always_call=True),
    ]


class _LiveByPass(LiveBytes):
    """`LiveBytes` with a peak for each pass."""

    def __init__(self):
        super().__init__()
        self.forward_peak_bytes = self.backward_peak_bytes = 0

    def _resize(self, key: int, size: int) -> None:
        super()._resize(key, size)
        if torch._C._current_graph_task_id() >= 0:  # why: there is no public way to ask
            self.backward_peak_bytes = max(self.backward_peak_bytes, self.live_bytes)
        elif not self.backward_peak_bytes:
            self.forward_peak_bytes = max(self.forward_peak_bytes, self.live_bytes)


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages on this rank, each storage once."""
    storages = (_local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state on this rank."""
    states = optimizer.state.values()
    return bytes_held(x for state in states for x in state.values() if isinstance(x, Tensor))


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that is sharded by torch."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
