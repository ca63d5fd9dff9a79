"""Which division of a training job is the fastest that fits: every one is tried.

A division is a way to write GPUs = CP · TP · PP · DP, a strategy for CP, how many sequences are
computed at once, and whether layers are recomputed and states are sharded over DP·CP. What does not
fit into the memory is dropped. Of the rest the fastest is searched, for each CP degree and strategy
by itself, in the order of a bound that no time can be below, so that few have to be modelled in
full. Times within SAME of the fastest are the same to a model like this: among those the simplest
is proposed, which means without CP where that is one of them.

Everything is modelled (`division`, `step`); nothing is measured.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

from .choices import Fixed, check_fixed, divisions, fits, lightest, nothing_left, variants
from .division import Division, Memory, Request, memory
from .hardware import ACHIEVED, gpu_named, network_named
from .shapes import ModelShape
from .step import Time, least_time, model_flops, time

BATCH_TOKENS = 4 * 2**20  # of a step, where nothing else is asked for: as Llama 3 began with
SAME = 0.03


@dataclass(frozen=True)
class Option:
    """One division and what it is modelled to need."""

    way: Division
    memory: Memory
    time: Time

    @property
    def choice(self) -> tuple:
        """What makes it another choice than a second one, and no mere variant of it."""
        way = self.way
        return way.cp, way.tp, way.pp, way.dp, way.strategy if way.cp > 1 else ""


@dataclass(frozen=True)
class Plan:
    """best: what is proposed; runner_up: the fastest of another choice; by_cp: the fastest of each
    CP degree that fits; by_strategy: the fastest of each at the proposed CP degree; least: what
    needs least memory of all, and without_cp: of those without CP, if there is one."""

    request: Request
    best: Option
    runner_up: Option | None
    by_cp: dict[int, Option]
    by_strategy: dict[str, Option]
    without_cp: Division | None

    def tflops(self, option: Option, *, full: bool = False) -> float:
        """Of model FLOPs, each GPU and second, in 10^12."""
        done = model_flops(self.request, full=full) / option.time.total
        return done / self.request.gpus / 1e12


class DoesNotFit(Exception):
    """No division fits. least: the one that needs least memory; enough: so many GPUs, a power of
    two times as many, would do, or None if even LARGEST times as many would not."""

    def __init__(self, request: Request, least: Division, enough: int | None):
        self.request, self.least, self.enough = request, least, enough
        self.memory = memory(request, least)
        super().__init__("no division fits into the memory")

    @property
    def missing(self) -> float:
        """Bytes on each GPU."""
        return self.memory.total - self.request.room


def request(
    model: ModelShape,
    seq_len: int,
    gpus: int,
    gpu: str = "h100-80gb",
    link: str = "nvlink+ib",
    batch_tokens: int | None = None,
    *,
    fp8: bool = False,
) -> Request:
    """Names and numbers as a request. batch_tokens: rounded down to whole sequences; None means
    BATCH_TOKENS, or one sequence if that is longer. ValueError for what cannot be."""
    for name, value in (
        ("seq_len", seq_len),
        ("gpus", gpus),
        ("global_batch_tokens", batch_tokens),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if batch_tokens is not None and batch_tokens < seq_len:
        raise ValueError(
            f"global_batch_tokens is {batch_tokens}; it must be at least one sequence, {seq_len}"
        )
    device = gpu_named(gpu)
    if fp8 and device.fp8_flops is None:
        raise ValueError(f"gpu is {gpu!r}, which has no float8 tensor cores; leave fp8 out")
    batch = max(1, (batch_tokens or BATCH_TOKENS) // seq_len)
    wanted = Request(
        model, seq_len, gpus, device, network_named(link, device), batch, ACHIEVED, fp8
    )
    if gpus > wanted.tokens:
        raise ValueError(
            f"gpus is {gpus}; there must be at least one token for each, and the batch has "
            f"{wanted.tokens} (seq_len {seq_len} x {batch})"
        )
    return wanted


def plan(request: Request, fixed: Fixed | None = None) -> Plan:
    """The fastest division that fits. Raises ValueError if what is fixed cannot be, DoesNotFit if
    it can and does not fit."""
    fixed = fixed or Fixed()
    check_fixed(request, fixed)
    every = list(divisions(request, fixed))
    if not every:
        raise ValueError(nothing_left(request, fixed))
    search = _Search(request, [one for way in every for one in variants(request, way)])
    if not search.bounded:
        raise DoesNotFit(request, _least_memory(request, every), _enough(request, fixed))
    search.fastest_of_each(lambda way: way.cp)
    limit = (1 + SAME) * search.least()
    search.up_to(limit)
    as_good = (one for one in search.found.values() if one.time.total <= limit)
    best = min(as_good, key=_simplicity)
    search.fastest_of_each(lambda way: way.strategy if way.cp == best.way.cp else None)

    found = list(search.found.values())
    others = [one for one in found if one.choice != best.choice]
    alike = [one for one in found if one.way.cp == best.way.cp]
    without = [way for way in every if way.cp == 1]
    return Plan(
        request,
        best,
        min(others, key=_seconds, default=None),
        _fastest_by(found, lambda one: one.way.cp),
        _fastest_by(alike, lambda one: one.way.strategy),
        _least_memory(request, without) if without else None,
    )


def _least_memory(request: Request, ways: Iterable[Division]) -> Division:
    return min(map(lightest, ways), key=lambda way: memory(request, way).total)


def option(request: Request, way: Division) -> Option:
    """What one division needs, whether it fits or not."""
    return Option(way, memory(request, way), time(request, way))


class _Search:
    """Divisions by a bound of their time, and the times of those that were modelled in full."""

    def __init__(self, request: Request, ways: Iterable[Division]):
        self._request = request
        bounded = [(least_time(request, way).total, way) for way in ways]
        self.bounded = sorted(bounded, key=lambda pair: pair[0])
        self.found: dict[Division, Option] = {}

    def fastest_of_each(self, key: Callable[[Division], Hashable]) -> None:
        """Model of each kind as many as it takes to be sure of its fastest."""
        least: dict[Hashable, float] = defaultdict(lambda: float("inf"))
        for bound, way in self.bounded:
            if bound < least[key(way)]:
                least[key(way)] = min(least[key(way)], self._model(way))

    def up_to(self, seconds: float) -> None:
        """Model all that might take so long, or less."""
        for bound, way in self.bounded:
            if bound <= seconds:
                self._model(way)

    def least(self) -> float:
        return min(option.time.total for option in self.found.values())

    def _model(self, way: Division) -> float:
        if way not in self.found:
            self.found[way] = option(self._request, way)
        return self.found[way].time.total


def _seconds(option: Option) -> float:
    return option.time.total


def _fastest_by(options: Iterable[Option], key: Callable[[Option], Hashable]) -> dict:
    fastest: dict = {}
    for one in sorted(options, key=_seconds):
        fastest.setdefault(key(one), one)
    return dict(sorted(fastest.items()))


def _simplicity(option: Option) -> tuple:
    """The less, the simpler: each of these asks more of the model's code than what follows it."""
    way = option.way
    parts = way.cp > 1, way.pp > 1, way.tp > 1, way.row > 1, way.recompute, way.shard_all
    return *parts, way.interleave > 1, way.cp, option.time.total


def _enough(request: Request, fixed: Fixed, times: int = 64) -> int | None:
    """GPUs that would do: so many times as many, or None."""
    factor = 2
    while factor <= times:
        more = replace(request, gpus=factor * request.gpus)
        if any(fits(more, lightest(way)) for way in divisions(more, fixed)):
            return more.gpus
        factor *= 2
    return None
