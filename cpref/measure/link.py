"""An emulated link: moves take as long as a slow link would need, on one machine.

Within a laptop a transfer takes less than a tenth of its tile, so nobody sees whether it was
hidden. `with emulated_link(group, latency=..., bandwidth=...)` makes it slow: the real transfer
goes on as before, and a wait returns no sooner than the link allows, counted from the post.

    post          ride begins        last byte leaves        there
     |---- queue ----|---- bytes / bandwidth ----|---- latency ----|

Each rank has a link of its own for what it sends, which carries one message after the other. What
a rank receives is taken to be as long, and posted at the same time, as what it sends: so it
is in a ring whose ranks are in step. A late neighbour is waited for, but its ride is not put off.

The CPU's moves only: a wait on CUDA does not hold up the host, and so cannot be prolonged there.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real

from ..comm import GroupLike, resolve
from .span import Span
from .timeline import Timeline


@dataclass(frozen=True)
class Clock:
    """now: seconds, from any origin; sleep: for so many seconds."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


def own_core() -> Clock:
    """The clock of a rank that has a core to itself, however busy the machine is.

    It counts the processor time of the calling thread, and the sleep it is asked for, in which
    nobody sleeps. So it holds for a rank that computes in one thread (torch.set_num_threads(1)) and
    has equally busy neighbours: what it waits for a late one is not counted.
    """
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    return Clock(now=lambda: time.thread_time() + slept, sleep=sleep)


@dataclass
class EmulatedLink:
    """latency: seconds; bandwidth: bytes per second; free_at: when the last byte will have left."""

    latency: float
    bandwidth: float
    clock: Clock
    free_at: float = -math.inf

    def send(self, size: int) -> tuple[float, float]:
        """A message of `size` bytes sets out now: when its ride begins, and when it ends."""
        begin = max(self.clock.now(), self.free_at)
        self.free_at = begin + size / self.bandwidth
        return begin, self.free_at + self.latency

    def wait_until(self, time: float) -> None:
        while (left := time - self.clock.now()) > 0:
            self.clock.sleep(left)


@contextmanager
def emulated_link(
    group: GroupLike = None,
    *,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    clock: Clock = Clock(),
) -> Iterator[EmulatedLink]:
    """Inside, every move of this rank in `group` takes latency + bytes / bandwidth at least.

    latency: seconds, from 0; bandwidth: bytes per second, over 0. Every rank enters it.
    Raises ValueError for other values, and if the group has an emulated link already.
    """
    _require("latency", latency, "a number of seconds, at least 0", lambda x: 0 <= x < math.inf)
    _require("bandwidth", bandwidth, "bytes per second, more than 0", lambda x: x > 0)
    watch = resolve(group).watch
    if watch.link is not None:
        raise ValueError("group has an emulated link already; leave it first")
    watch.link = EmulatedLink(latency, bandwidth, clock)
    try:
        yield watch.link
    finally:
        watch.link = None


def ring_seconds(ranks: int, tile: float, transfer: float, *, overlap: bool) -> float:
    """How long a ring takes, with `ranks` tiles and one transfer less, in seconds.

    One after the other, a step takes tile + transfer; overlapped, the longer of the two. The last
    tile has no transfer beside it.
    """
    step = max(tile, transfer) if overlap else tile + transfer
    return (ranks - 1) * step + tile


def ring_timeline(ranks: int, tile: float, transfer: float, *, overlap: bool) -> Timeline:
    """The same as a timeline: modelled, not recorded. All ranks are in step."""
    spans, now = [], 0.0
    for step in range(ranks):
        passes = step < ranks - 1
        arrives = now + transfer if passes else now
        begin = now if overlap else arrives
        end = begin + tile
        now = max(end, arrives)
        times = {"compute": (begin, end)}
        if passes:
            times |= {"send": (arrives - transfer, arrives)}
            times |= {"wait": (end if overlap else arrives - transfer, arrives)}
        spans += [
            Span(rank, kind, f"step {step}", *when)
            for rank in range(ranks)
            for kind, when in times.items()
            if when[0] < when[1]
        ]
    return Timeline(ranks, spans)


def _require(name: str, value: float, rule: str, fine: Callable[[float], bool]) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not fine(value):
        raise ValueError(f"{name} is {value!r}; it must be {rule}")
