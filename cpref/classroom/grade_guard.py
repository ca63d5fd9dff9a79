"""What a test relies on, remembered before the answer runs and compared afterwards.

The answer and its test share one Python, so an answer can reach everything that the test uses. The
guard finds what is done in a line or two: another `expect.same`, `torch.equal` that is always true,
a changed helper of the exercise, a tracer. It does not find an answer that is built to deceive it,
such as one that undoes its changes in time.
"""

import builtins
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .. import comm, local
from . import expect

_TORCH = str(Path(torch.__file__).parent)
_Seen = tuple[object, ...]


class Guard:
    """helpers: the names that the exercise's own cells have defined; kernel: that runs the test."""

    def __init__(self, helpers: Mapping[str, object], kernel: object = None):
        self._helpers = helpers
        self._names = [name for name, value in helpers.items() if _watched(name, value)]
        self._kernel = kernel
        self._before = self._look()

    def changed(self) -> str | None:
        """The name of something that is not as it was; None if all is."""
        now = self._look()
        for name, seen in self._before.items():
            if not _alike(now.get(name, (None,)), seen):
                return name
        for name, seen in now.items():  # why: what a method of a base class is hidden by
            if name.startswith("Tensor.") and name not in self._before and not _of_torch(seen[0]):
                return name
        return None

    def _look(self) -> dict[str, _Seen]:
        owners = {
            "expect": expect,
            "comm": comm,
            "local": local,
            "torch": torch,
            "Tensor": torch.Tensor,
            "builtins": builtins,
        }
        if self._kernel is not None:
            owners |= {"kernel": type(self._kernel), "session": type(self._kernel.session)}
        seen = {
            f"{owner}.{name}": _kept(value)
            for owner, thing in owners.items()
            for name, value in tuple(vars(thing).items())
            if callable(value) or owner == "expect"
        }
        for name in self._names:
            seen[name] = _kept(self._helpers.get(name))
        seen["sys.settrace"] = (sys.gettrace(), threading.gettrace())
        seen["sys.setprofile"] = (sys.getprofile(), threading.getprofile())
        seen["a mode of torch's"] = (
            *_get_current_function_mode_stack(),
            *_get_current_dispatch_mode_stack(),
        )
        if self._kernel is not None:
            for name in ("do_execute", "execute_request", "dispatch_shell"):
                seen[f"kernel.{name}"] = _kept(_function(getattr(self._kernel, name)))
            seen["session.send"] = _kept(_function(self._kernel.session.send))
        return seen


def seal(module: types.ModuleType) -> None:
    """From now on setting an attribute of the module is an error, in words."""
    module.__class__ = _Sealed


class _Sealed(types.ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self.__name__}.{name} belongs to the tests; leave it as it is")

    def __delattr__(self, name: str) -> None:
        setattr(self, name, None)


def _watched(name: str, value: object) -> bool:
    return not name.startswith("_") and (callable(value) or isinstance(value, types.ModuleType))


def _function(method: object) -> object:
    return getattr(method, "__func__", method)


def _kept(value: object) -> _Seen:
    """The value and what makes a function do what it does."""
    if isinstance(value, types.FunctionType):
        return value, value.__code__, value.__defaults__, value.__kwdefaults__
    return (value,)


def _alike(now: _Seen, before: _Seen) -> bool:
    if len(now) == len(before) and all(x is y for x, y in zip(now, before, strict=True)):
        return True
    # why: some modules of torch's, when imported, wrap functions such as torch.manual_seed
    return bool(now) and _of_torch(now[0]) and getattr(now[0], "__wrapped__", None) is before[0]


def _of_torch(value: object) -> bool:
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)
