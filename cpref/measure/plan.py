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
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .division import Division, Memory, Request, memory
from .hardware import ACHIEVED, gpu_named, network_named
from .shapes import ModelShape
from .step import Time, least_time, model_flops, time

STRATEGIES = ("ring", "all_gather", "reduce_scatter", "ulysses", "hybrid")
DEGREES = ("cp", "tp", "pp", "dp")
BATCH_TOKENS = 4 * 2**20  # of a step, where nothing else is asked for: as Llama 3 began with
SAME = 0.03
LARGEST_CP = 1024  # why: the model of an attention looks at every pair of ranks
ENOUGH_AT_ONCE = 16384  # tokens: more of them, in more sequences, save no time to speak of
_MICRO = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Fixed:
    """What the search may not choose."""

    cp: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    strategy: str | None = None


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
        raise ValueError(_nothing_left(request, fixed))
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


def check_fixed(request: Request, fixed: Fixed) -> None:
    """ValueError that names what cannot be, and what it must be."""
    model, heads = request.model, request.model.heads // (fixed.tp or 1)
    limits = {
        "cp": (
            min(request.seq_len, LARGEST_CP),
            "the ranks of a sequence, which need a token each",
        ),
        "tp": (model.kv_heads, f"the {model.kv_heads} K,V heads of {model.name}"),
        "pp": (model.layers, f"the {model.layers} layers of {model.name}"),
        "dp": (request.batch, f"the {request.batch} sequences of the batch"),
    }
    for name, (limit, what) in limits.items():
        degree = getattr(fixed, name)
        if degree is None:
            continue
        if degree < 1 or request.gpus % degree:
            raise ValueError(f"{name} is {degree}; it must divide the {request.gpus} GPUs")
        if degree > limit:
            raise ValueError(f"{name} is {degree}; it must be at most {limit}: {what}")
    if fixed.tp and model.kv_heads % fixed.tp:
        raise ValueError(f"tp is {fixed.tp}; it must divide the {model.kv_heads} K,V heads")
    if fixed.strategy is not None and fixed.strategy not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ValueError(f"strategy is {fixed.strategy!r}; it must be one of {known}")
    if fixed.strategy == "ulysses" and fixed.cp and heads % fixed.cp:
        raise ValueError(
            f"{model.name} has {heads} heads for each TP part, which {fixed.cp} ranks cannot share "
            "under strategy='ulysses'; use 'ring' or 'hybrid', or fewer ranks"
        )


def _nothing_left(request: Request, fixed: Fixed) -> str:
    asked = ", ".join(f"{name} {value}" for name, value in vars(fixed).items() if value is not None)
    return (
        f"no division of {request.gpus} GPUs has {asked or 'these numbers'}: CP x TP x PP x DP "
        f"must be {request.gpus}, TP must divide {request.model.kv_heads} K,V heads, PP is at most "
        f"{request.model.layers}, and DP must divide {request.batch} sequences"
    )


def divisions(request: Request, fixed: Fixed) -> Iterator[Division]:
    """All that the numbers of heads, layers and sequences allow, one sequence at a time, nothing
    recomputed and parameters not sharded. `variants` has the rest."""
    for cp, tp, pp, dp in _degrees(request, fixed):
        for strategy, row in _strategies(request, tp, cp, fixed.strategy):
            yield Division(cp, tp, pp, dp, strategy, row)


def variants(request: Request, way: Division) -> Iterator[Division]:
    """Those of a division that fit, without what another one does in less time."""
    per_rank, local = request.batch // way.dp, way.tokens(request)
    for micro in (count for count in _MICRO if per_rank % count == 0):
        if micro > 1 and micro * local > ENOUGH_AT_ONCE:
            return
        tried = replace(way, micro=micro)
        if not _fits(request, lightest(tried)):
            return
        for interleave in _interleaves(request, tried):
            one = replace(tried, interleave=interleave)
            if _fits(request, one):
                yield one  # why: recomputing and sharding only take time
            else:
                yield from (lighter for lighter in _lighter(one) if _fits(request, lighter))


def _interleaves(request: Request, way: Division) -> set[int]:
    """One run of layers for each stage, or each layer for itself where micro-batches allow it."""
    if way.pp == 1 or way.micro_batches(request) % way.pp:
        return {1}
    return {1, way.layers(request)}


def _lighter(way: Division) -> Iterator[Division]:
    """The same with less memory: one thing done for it, or both."""
    yield replace(way, recompute=True)
    if way.cp * way.dp > 1:
        yield replace(way, shard_all=True)
        yield lightest(way)


def lightest(way: Division) -> Division:
    return replace(way, recompute=True, shard_all=way.cp * way.dp > 1)


def _degrees(request: Request, fixed: Fixed) -> Iterator[tuple[int, int, int, int]]:
    model, gpus = request.model, request.gpus
    for tp in _divisors(gpus, fixed.tp):
        if model.kv_heads % tp:
            continue
        for pp in _divisors(gpus // tp, fixed.pp):
            if pp > model.layers:
                continue
            for dp in _divisors(gpus // tp // pp, fixed.dp):
                cp = gpus // tp // pp // dp
                if request.batch % dp or cp > min(request.seq_len, LARGEST_CP):
                    continue
                if fixed.cp in (None, cp):
                    yield cp, tp, pp, dp


@lru_cache(maxsize=1024)
def _divisors(number: int, fixed: int | None) -> tuple[int, ...]:
    degrees = range(1, number + 1) if fixed is None else (fixed,)
    return tuple(degree for degree in degrees if number % degree == 0)


def _strategies(request: Request, tp: int, cp: int, fixed: str | None) -> Iterator[tuple[str, int]]:
    """Those that so many ranks can use for their heads, with the ranks of a row for hybrid."""
    heads, network = request.model.heads // tp, request.network
    if cp == 1:
        yield fixed or "ring", 1
        return
    for name in STRATEGIES if fixed is None else (fixed,):
        if name == "hybrid":  # why: a row is for the faster link, if there is one
            rows = (row for row in _divisors(cp, None) if 1 < row < cp and heads % row == 0)
            near = network.link(1)
            yield from ((name, row) for row in rows if network.link(tp * row) == near)
        elif name != "ulysses" or heads % cp == 0:
            yield name, 1


def _fits(request: Request, way: Division) -> bool:
    return memory(request, way).total <= request.room


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
        if any(_fits(more, lightest(way)) for way in divisions(more, fixed)):
            return more.gpus
        factor *= 2
    return None
