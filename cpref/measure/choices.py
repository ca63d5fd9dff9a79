"""The divisions that a job could have: what heads, layers, sequences and memory allow.

A division writes GPUs = CP · TP · PP · DP and names a strategy for CP. Its variants compute more or
fewer sequences at once, interleave the pipeline, recompute layers, and shard parameters and
gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .division import Division, Request, memory

STRATEGIES = ("ring", "all_gather", "reduce_scatter", "ulysses", "hybrid")
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
    if fixed.strategy == "hybrid" and fixed.cp in (1, 2, 3):
        raise ValueError(
            f"cp is {fixed.cp}; hybrid needs at least 2 rows of at least 2 ranks: 4 or more"
        )
    if fixed.strategy == "ulysses" and fixed.cp and heads % fixed.cp:
        raise ValueError(
            f"{model.name} has {heads} heads for each TP part, which {fixed.cp} ranks cannot share "
            "under strategy='ulysses'; use 'ring' or 'hybrid', or fewer ranks"
        )


def nothing_left(request: Request, fixed: Fixed) -> str:
    asked = ", ".join(f"{name} {value}" for name, value in vars(fixed).items() if value is not None)
    return (
        f"no division of {request.gpus} GPUs has {asked or 'these numbers'}: CP x TP x PP x DP "
        f"must be {request.gpus}, TP must divide {request.model.kv_heads} K,V heads, PP is at most "
        f"{request.model.layers}, DP must divide {request.batch} sequences, and the ranks "
        "must be able to share the heads"
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
        if not fits(request, lightest(tried)):
            return
        for interleave in _interleaves(request, tried):
            one = replace(tried, interleave=interleave)
            if fits(request, one):
                yield one  # why: recomputing and sharding only take time
            else:
                yield from (lighter for lighter in _lighter(one) if fits(request, lighter))


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


def fits(request: Request, way: Division) -> bool:
    return memory(request, way).total <= request.room
