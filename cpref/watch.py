"""Who looks on while ranks compute, send and wait: usually nobody.

A strategy says what it computes, `with group.computing("ring forward, step 1"):`, and a group says
when it posts a move and when somebody waits for it. Under `torch.profiler` these are labels in its
trace, "cpref compute: ...". `measure.timeline` records them for all ranks, and `measure.link` lets
moves take as long as a slow link would need.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch.profiler import record_function

T = TypeVar("T")
_NOBODY = nullcontext()


class Recorder(Protocol):
    """Notes what happens between entering and leaving, and which moves are under way."""

    def during(self, kind: str, label: str) -> AbstractContextManager: ...

    def under_way(self, label: str, ride: tuple[float, float] | None) -> Callable[[], None]:
        """A move has been posted; returns what to call when it is known to be there."""


class Carrier(Protocol):
    """Says when a message would begin its ride and be there, and waits for that."""

    def send(self, size: int) -> tuple[float, float]:
        """A message of `size` bytes sets out now: when its ride begins, and when it ends."""

    def wait_until(self, time: float) -> None: ...


class Watch:
    """What looks on at one rank; the parts of a `Grid` share one."""

    recorder: Recorder | None = None
    link: Carrier | None = None

    def during(self, kind: str, label: str) -> AbstractContextManager:
        """kind: "compute", "post" or "wait"."""
        # why: entering record_function costs 15 µs even when nobody profiles, and asking 0.1
        if self.recorder is None and not torch.autograd._profiler_enabled():
            return _NOBODY
        return self._labelled(kind, label)

    @contextmanager
    def _labelled(self, kind: str, label: str) -> Iterator[None]:
        recorded = self.recorder.during(kind, label) if self.recorder else _NOBODY
        with record_function(f"cpref {kind}: {label}"), recorded:
            yield

    def follow(self, label: str, size: int, post: Callable[[], Callable[[], T]]) -> Callable[[], T]:
        """Post a move that sends `size` bytes. post returns what waits for it, and so does this."""
        with self.during("post", label):
            wait = post()
        link = self.link
        ride = link.send(size) if link else None
        arrived = self.recorder.under_way(label, ride) if self.recorder else None

        def finish() -> T:
            with self.during("wait", label):
                brought = wait()
                if ride:
                    link.wait_until(ride[1])
            if arrived:
                arrived()
            return brought

        return finish
