"""Peak memory and sent bytes of any code, counted below it: where torch dispatches operations.

Works for other people's code as well as for ours, since it sees every tensor that comes into being
and every communication call. What it counts is what was asked for, not what an allocator rounds it
up to.
"""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as live:` then live.peak_bytes and live.live_bytes of what ran inside.

    peak_bytes: the most bytes alive at once in storages that came into being inside; those
    from before do not count. A storage is counted once, however many views it has.
    Only the operations of the thread that entered it are seen, with the backward it runs itself;
    and not what a kernel holds for itself while it runs.
    """

    def __init__(self):
        super().__init__()
        self.peak_bytes = self.live_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # why: a DTensor first becomes operations on what it holds
        if func.namespace == "prim":  # why: fake tensors ask so for their device, all the time
            return func(*args, **(kwargs or {}))
        self._see_all((args, kwargs), counted=False)
        result = func(*args, **(kwargs or {}))
        self._see_all(result, counted=True)
        return result

    def _see_all(self, tree: object, *, counted: bool) -> None:
        if isinstance(tree, Tensor):
            self._see(tree.untyped_storage(), counted=counted)
        elif isinstance(tree, (list, tuple)):
            for branch in tree:
                self._see_all(branch, counted=counted)
        elif isinstance(tree, dict):
            self._see_all(tuple(tree.values()), counted=counted)

    def _see(self, storage: torch.UntypedStorage, *, counted: bool) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0
        if counted:
            self._resize(key, storage.nbytes())
        weakref.finalize(storage, self._forget, key)

    def _resize(self, key: int, size: int) -> None:
        self.live_bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


class PeakMemory(LiveBytes):
    """`LiveBytes` that also counts what is sent.

    sent_bytes: payload that this rank handed to torch.distributed, in the counting of
    `cpref.comm.Traffic`: what goes to other ranks, for each of them.
    """

    def __init__(self):
        super().__init__()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        operation = func.__name__.partition(".")[0]
        if func.namespace == "c10d":
            self.sent_bytes += _sent(operation, args)
        elif func.namespace == "_c10d_functional":
            self.sent_bytes += _sent_functional(operation, args)
        return result


def _sent(operation: str, args: tuple) -> int:
    """Bytes that one communication call hands over for other ranks. Receiving sends nothing."""
    group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
    others = group.size() - 1
    if operation == "send":
        return sum(_bytes(x) for x in args[0])
    if operation == "_allgather_base_":
        return others * _bytes(args[1])
    if operation == "allgather_":
        return others * sum(_bytes(x) for x in args[1])
    if operation == "_reduce_scatter_base_":
        return others * _bytes(args[0])
    if operation == "alltoall_base_":
        sent, splits = args[1], args[4]
        rows = sent.shape[0]
        to_itself = splits[group.rank()] if splits else rows // group.size()
        return _bytes(sent) * (rows - to_itself) // max(rows, 1)
    if operation == "alltoall_":
        return sum(_bytes(x) for rank, x in enumerate(args[1]) if rank != group.rank())
    if operation in ("recv_", "barrier"):
        return 0
    raise NotImplementedError(f"PeakMemory does not know what c10d.{operation} sends")


def _sent_functional(operation: str, args: tuple) -> int:
    """The same for the functional collectives, which torch uses in its own parallelisms."""
    if operation == "all_to_all_single":
        sent, _, splits, name = args
        group = dist.distributed_c10d._resolve_process_group(name)
        rows = sent.shape[0]
        to_itself = splits[group.rank()] if splits else rows // group.size()
        return _bytes(sent) * (rows - to_itself) // max(rows, 1)
    if operation in ("all_gather_into_tensor", "all_gather_single"):
        return (args[1] - 1) * _bytes(args[0])
    if operation in ("reduce_scatter_tensor", "reduce_scatter_single"):
        return (args[2] - 1) * _bytes(args[0]) // args[2]
    if operation in ("wait_tensor", "_wrap_tensor_autograd"):
        return 0
    raise NotImplementedError(f"PeakMemory does not know what functional {operation} sends")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
