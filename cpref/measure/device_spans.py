"""Spans on a GPU: the kernels' own times, NCCL's among them, from torch.profiler.

Written against the documented form of the profiler's events, and tested on made-up ones: it has
not run on a GPU yet.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from .span import Span, without

_ORIGIN = "cpref origin"


class Event(Protocol):
    """What is used of a torch.autograd.profiler_util.FunctionEvent; its times are microseconds."""

    name: str
    device_type: DeviceType
    time_range: object
    is_user_annotation: bool


class DeviceSpans:
    """`with DeviceSpans(now) as device: ...`, then `device.spans(rank)`.

    now: the clock whose seconds the spans are given in.
    """

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def __enter__(self) -> "DeviceSpans":
        self._profile.__enter__()
        self._origin = self._now()
        with record_function(_ORIGIN):
            return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()  # why: what is still in a stream belongs to the timeline
        self._profile.__exit__(*error)

    def spans(self, rank: int) -> list[Span]:
        return spans_of(self._profile.events(), rank, self._origin)


def spans_of(events: Iterable[Event], rank: int, origin: float) -> list[Span]:
    """The device's spans among `events`; the event named "cpref origin" lies at `origin` seconds.

    NCCL's kernels are `send`, all others `compute`, and where only a send runs the rank waits. A
    kernel takes the label of the strategy that it ran under, if the profiler shows that.
    """
    events = list(events)
    zero = next(e.time_range.start for e in events if e.name == _ORIGIN)

    def seconds(event: Event) -> tuple[float, float]:
        times = event.time_range
        return origin + (times.start - zero) / 1e6, origin + (times.end - zero) / 1e6

    on_device = [e for e in events if e.device_type == DeviceType.CUDA]
    labels = [(e.name, *seconds(e)) for e in on_device if e.is_user_annotation]
    spans = []
    for event in on_device:
        if event.is_user_annotation or event.name.startswith(("Memcpy HtoD", "Memcpy DtoH")):
            continue
        begin, end = seconds(event)
        under = (name for name, a, b in labels if name.startswith("cpref") and a <= begin < b)
        kind = "send" if "nccl" in event.name.lower() else "compute"
        spans.append(Span(rank, kind, next(under, event.name).split(": ", 1)[-1], begin, end))
    sends, computes = (
        [(s.begin, s.end) for s in spans if s.kind == kind] for kind in ("send", "compute")
    )
    alone = without(sends, computes)
    return spans + [Span(rank, "wait", "a move", begin, end) for begin, end in alone]
