"""A span of time on a rank, and the lengths of unions and intersections of spans."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("compute", "post", "send", "wait")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """What `rank` does from begin to end, in seconds; kind: one of KINDS."""

    rank: int
    kind: str
    label: str
    begin: float
    end: float

    @property
    def step(self) -> int | None:
        """The ring's step that the label names, if it does: for a move, the one it leaves."""
        named = re.search(r"step (\d+)", self.label)
        return int(named[1]) if named else None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not overlap, in order."""
    merged: list[list[float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]


def length(intervals: Iterable[Interval]) -> float:
    """Of their union."""
    return sum(end - begin for begin, end in union(intervals))


def both(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The times that lie in one of `left` and in one of `right`."""
    right = union(right)
    pairs = ((max(a, c), min(b, d)) for a, b in union(left) for c, d in right)
    return [(begin, end) for begin, end in pairs if begin < end]


def without(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The times that lie in one of `left` and in none of `right`."""
    rest = []
    right = union(right)
    for begin, end in union(left):
        for a, b in right:
            if a < end and b > begin:
                if a > begin:
                    rest.append((begin, a))
                begin = max(begin, b)
        if begin < end:
            rest.append((begin, end))
    return rest
