"""One timeline of all ranks: who computes, what is under way, who waits.

    with record_timeline(group) as timeline:        # on every rank
        cpref.context_parallel_attention(...)
    timeline.spans, timeline.idle_share(), timeline.overlap_share(), timeline.save("run.json")

Every rank notes its own spans by its own clock, through the labels of `watch.py`. At the end all
exchange them, with the clocks aligned, so that every rank holds the whole timeline. Its origin is
the first span's beginning.

A span's kind is one of

    compute     a tile, or several
    post        a move is being handed over
    send        a move is under way: from after its post until a wait for it returns; under an
                emulated link, for as long as the link carries it
    wait        the rank can only go on when a move is there

On the CPU nobody tells when a message arrived before anyone waited for it: without an emulated
link, a `send` is the longest that it can have been. On CUDA a wait only orders the stream, and the
host's times say little: there the spans are the kernels' and NCCL's own (see `device_spans.py`).
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from ..comm import Group, GroupLike, resolve
from ..local import LocalGroup
from .device_spans import DeviceSpans
from .span import KINDS, Span, both, length

_ROUNDS = 8  # exchanges that align the clocks: one of them will be quick


@dataclass
class Timeline:
    """spans: of all ranks, in the order of their beginnings; seconds from the first of them.

    clock_doubt: seconds by which this rank's clock may still differ from rank 0's.
    """

    ranks: int
    spans: list[Span] = field(default_factory=list)
    clock_doubt: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first span's beginning on any rank to the last one's end."""
        return max((span.end for span in self.spans), default=0.0)

    def of(self, kind: str, rank: int) -> list[tuple[float, float]]:
        """(begin, end) of each span of a kind on a rank."""
        return [(s.begin, s.end) for s in self.spans if (s.kind, s.rank) == (kind, rank)]

    def idle_share(self, rank: int | None = None) -> float:
        """The part of the time in which a rank does not compute; None: of all ranks together."""
        busy = sum(length(self.of("compute", r)) for r in self._chosen(rank))
        whole = self.seconds * len(self._chosen(rank))
        return 1 - busy / whole if whole else 0.0

    def overlap_share(self, rank: int | None = None) -> float:
        """The part of its sending time in which a rank computes as well; nan if nothing moves."""
        hidden = sending = 0.0
        for r in self._chosen(rank):
            sends = self.of("send", r)
            sending += length(sends)
            hidden += length(both(sends, self.of("compute", r)))
        return hidden / sending if sending else float("nan")

    def save(self, path: str | Path) -> None:
        """Write it for https://ui.perfetto.dev or chrome://tracing (Trace Event Format, JSON)."""
        Path(path).write_text(json.dumps({"traceEvents": list(self._events())}, indent=1))

    def _chosen(self, rank: int | None) -> Sequence[int]:
        if rank is None:
            return range(self.ranks)
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank is {rank}; it must be from 0 to {self.ranks - 1}, or None")
        return [rank]

    def _events(self) -> Iterator[dict]:
        for rank in range(self.ranks):
            named = {"name": "process_name", "args": {"name": f"rank {rank}"}}
            yield {"ph": "M", "pid": rank, "tid": 0, **named}
        for number, span in enumerate(self.spans):
            event = {"name": span.label, "cat": span.kind, "pid": span.rank, "tid": 0}
            if span.kind == "send":  # why: rides overlap, and spans of one row must not
                yield {**event, "ph": "b", "id": number, "ts": span.begin * 1e6}
                yield {**event, "ph": "e", "id": number, "ts": span.end * 1e6}
            else:
                took = span.end - span.begin
                yield {**event, "ph": "X", "ts": span.begin * 1e6, "dur": took * 1e6}


@contextmanager
def record_timeline(
    group: GroupLike = None, *, now: Callable[[], float] = time.perf_counter
) -> Iterator[Timeline]:
    """Record what this rank does in `group` until the block ends; then the Timeline is filled.

    Every rank of the group enters and leaves it, at the same place of the program.
    now: the clock, in seconds; that of an emulated link, if there is one.
    Raises ValueError if the group is being recorded already.
    """
    group = resolve(group)
    if group.watch.recorder is not None:
        raise ValueError("group is being recorded already; leave that record_timeline first")
    timeline = Timeline(group.size)
    ahead, timeline.clock_doubt = align(group, now)
    recorder = Recorder(group.rank, now)
    device = _device_spans(group, now)
    group.watch.recorder = recorder
    try:
        with device or nullcontext():
            yield timeline
    finally:
        group.watch.recorder = None
    mine = device.spans(group.rank) if device else recorder.spans
    mine = [replace(s, begin=s.begin - ahead, end=s.end - ahead) for s in mine]
    everyones = [span for spans in _exchange(group, mine) for span in spans]
    first = min((span.begin for span in everyones), default=0.0)
    shifted = (replace(s, begin=s.begin - first, end=s.end - first) for s in everyones)
    timeline.spans = sorted(shifted, key=lambda s: (s.begin, s.rank, KINDS.index(s.kind)))


class Recorder:
    """The spans of one rank, by its own clock."""

    def __init__(self, rank: int, now: Callable[[], float]):
        self._rank, self._now = rank, now
        self.spans: list[Span] = []

    @contextmanager
    def during(self, kind: str, label: str) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self.spans.append(Span(self._rank, kind, label, begin, self._now()))

    def under_way(self, label: str, ride: tuple[float, float] | None) -> Callable[[], None]:
        """A move has been posted; returns what to call when it is known to be there."""
        begin = self._now()

        def arrived() -> None:
            times = ride or (begin, self._now())
            self.spans.append(Span(self._rank, "send", label, *times))

        return arrived


# -- between ranks --------------------------------------------------------------------------------


def align(group: Group, now: Callable[[], float]) -> tuple[float, float]:
    """How far this rank's clock is ahead of rank 0's, and by how much that may be wrong; seconds.

    In each round all exchange their clocks' readings. Nothing is received before it was sent; so
    each round bounds the difference from both sides, and the quickest ones most closely.
    """
    readings = []
    for _ in range(_ROUNDS):
        before = _nanoseconds(now)
        group._exchange(torch.tensor([before]), "the alignment of clocks")
        readings.append([before, _nanoseconds(now)])
    everyones = group._exchange(torch.tensor(readings).flatten(), "the alignment of clocks")
    sent, received = everyones.view(group.size, _ROUNDS, 2).numpy().transpose(2, 1, 0) / 1e9
    low, high = offset_bounds(sent, received, group.rank)
    if low <= 0 <= high:  # why: it is the same clock, as far as one can tell
        return 0.0, max(-low, high)
    return (low + high) / 2, abs(high - low) / 2


def offset_bounds(sent: np.ndarray, received: np.ndarray, rank: int) -> tuple[float, float]:
    """The least and the most that the clock of `rank` can be ahead of that of rank 0.

    sent, received: (rounds, P), each rank's own readings when it sent its message to all, and when
    it had those of all.
    """
    to_zero, to_rank = sent[:, rank] - received[:, 0], received[:, rank] - sent[:, 0]
    return float(to_zero.max()), float(to_rank.min())


def _exchange(group: Group, spans: list[Span]) -> list[list[Span]]:
    """Every rank's spans."""
    label = "the exchange of timelines"
    text = json.dumps([asdict(span) for span in spans]).encode()
    lengths = group._exchange(torch.tensor([len(text)]), label).flatten().tolist()
    padded = np.frombuffer(text.ljust(max(lengths)), dtype=np.uint8).astype(np.int64)
    rows = group._exchange(torch.from_numpy(padded), label).numpy().astype(np.uint8)
    return [[Span(**entry) for entry in json.loads(row.tobytes())] for row in rows]


def _nanoseconds(now: Callable[[], float]) -> int:
    return round(now() * 1e9)


def _device_spans(group: Group, now: Callable[[], float]) -> DeviceSpans | None:
    """What reads the GPU's own times, where this process is one rank with a GPU in use."""
    if isinstance(group, LocalGroup) or not torch.cuda.is_initialized():
        return None
    return DeviceSpans(now)
