"""Tensors that are replaced in place by their shards for a while, and are then whole again.

Autograd keeps what an operation needs for its backward: of a buffer, such as tokens or a rotary
table, the tensor itself and no copy. Were that tensor whole again by the time of the backward, the
gradient would be that of another operation. So every operation is given a stand-in: another tensor
with the memory of the shard, which is not restored and lives as long as somebody keeps it.

    tokens                 whole | shard ............. | whole
    its stand-in                 | shard ......................... for every backward, at any time
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor

# Operations that change what a tensor is, not what is in it: these are for the buffer itself.
_OF_THE_TENSOR = {"__set__", "__delete__", "requires_grad_", "resize_", "resize_as_", "set_"} | {
    f"{name}_" for name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze")
}
_versions = count(1 << 24)


class Buffers:
    """Some tensors and the shards that replace them: between tensors[i] and parts[i], any shape."""

    def __init__(self, tensors: Sequence[Tensor], parts: Sequence[Tensor]):
        self._tensors = list(tensors)
        self._stand_ins: list[Tensor | None] = list(parts)
        self._parts = list(parts)

    @contextmanager
    def sharded(self, kept: Sequence[Tensor] = ()) -> Iterator[None]:
        """Inside, the tensors are their shards; afterwards what they were, except those `kept`."""
        before = [(x.data, x._version) for x in self._tensors]
        for x, part in zip(self._tensors, self._parts, strict=True):
            x.data = part
            # why: what has kept x itself, past its stand-in, must find that it has changed since
            _set_version(x, next(_versions))
        try:
            yield
        finally:
            for x, (whole, version) in zip(self._tensors, before, strict=True):
                if not any(x is one for one in kept):
                    x.data = whole
                    _set_version(x, version)

    def call(self, function, args: tuple, kwargs: dict):
        """function(*args, **kwargs), given the stand-ins of the tensors among its arguments."""
        if not self._tensors:
            return function(*args, **kwargs)
        if getattr(function, "__name__", "") in _OF_THE_TENSOR:
            result = function(*args, **kwargs)
            self._renew()
            return result
        args = self.stand_ins(args)
        kwargs = {name: self._of(x) for name, x in kwargs.items()}
        return self._back(function(*args, **kwargs))

    def stand_ins(self, args: tuple) -> tuple:
        return tuple(self._of(x) for x in args)

    def _of(self, x: object) -> object:
        if isinstance(x, Tensor):
            for tensor, stand_in in zip(self._tensors, self._stand_ins, strict=True):
                if x is tensor and stand_in is not None:
                    return stand_in
        elif type(x) in (list, tuple):
            return type(x)(self._of(each) for each in x)
        return x

    def _back(self, result: object) -> object:
        """The buffer, where an operation in place returns its stand-in."""
        for tensor, stand_in in zip(self._tensors, self._stand_ins, strict=True):
            if result is stand_in and stand_in is not None:
                return tensor
        return result

    def _renew(self) -> None:
        for index, x in enumerate(self._tensors):
            stand_in = self._stand_ins[index]
            if x.requires_grad:  # why: its gradient is to reach it
                self._stand_ins[index] = None
            elif stand_in is None or _differ(x, stand_in):
                self._stand_ins[index] = x.data


def _differ(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.shape, x.stride()) != (y.data_ptr(), y.shape, y.stride())


def _set_version(x: Tensor, version: int) -> None:
    # why: raising it for good would spoil what autograd kept of the whole tensor before and after
    torch._C._autograd._unsafe_set_version_counter((x,), (version,))
