"""Constants of the time model, fitted to this machine: `cpref doctor --fit`.

Ranks compute single tiles of several sizes and kinds, and pass single blocks around, all at the
same time, as they do in a run. A time is that of the slowest rank, in the round that was disturbed
least. The constants are those that make the relative errors of the model least, none negative.

The times of whole attentions are not looked at: `cpref.bench.predicted` predicts those from what is
fitted here.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ..attention import context_parallel_attention
from ..block import attend, attend_backward, empty_partial, query_rows
from ..comm import Group, resolve
from ..layout import place
from ..mask import Causal, Full
from ..tiles import Job, Tile
from .times import Link, Machine, Rates

TILE_TOKENS = (256, 512, 1024, 2048)
BLOCK_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)


@dataclass(frozen=True)
class Problem:
    """The attention that the constants are for: B, H, Hkv, D, and its dtype's name."""

    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"

    def tensor(self, heads: int, tokens: int, grad: bool = False) -> torch.Tensor:
        shape = (self.batch, heads, tokens, self.head_dim)
        draw = torch.Generator().manual_seed(tokens)
        x = torch.randn(shape, generator=draw).to(getattr(torch, self.dtype)).to(self.device)
        return x.requires_grad_(grad)


@dataclass(frozen=True)
class Probe:
    """Something to time on all ranks at once.

    kind: "forward" or "backward" of a tile, "block" that is passed on, or what the caller adds.
    parts: how much of each constant is in it, in the order of `Rates` or of `Link` (with 1/beta).
    run: does it once; prepare: what goes before and is not timed, its result is handed to run.
    """

    kind: str
    parts: tuple[float, ...]
    run: Callable[[object], object]
    prepare: Callable[[], object] = lambda: None


def probes(problem: Problem, group: Group) -> Iterator[Probe]:
    """All that has to be timed to fit a `Machine`."""
    for tokens, kind in itertools.product(TILE_TOKENS, ("full", "causal")):
        yield from _tile_probes(problem, tokens, kind)
    for size in BLOCK_BYTES if group.size > 1 else ():
        block = torch.zeros(size, dtype=torch.uint8, device=problem.device)
        yield Probe("block", (1, size), lambda _, block=block: group.shift(block).wait())
    yield from _start_probes(problem, group)


def _tile_probes(problem: Problem, tokens: int, kind: str) -> Iterator[Probe]:
    q, grad_out, out = (problem.tensor(problem.heads, tokens) for _ in range(3))
    k, v = (problem.tensor(problem.kv_heads, tokens) for _ in range(2))
    placed = place(tokens, 1, "contiguous")
    scale = problem.head_dim**-0.5
    job = Job(placed, placed, Causal(), scale, problem.kv_heads, q.dtype)
    tiles = (Tile(slice(0, tokens), slice(0, tokens), kind),)
    total = empty_partial(q, v)
    rows = query_rows(q, grad_out, out, torch.full(q.shape[:-1], 9.0, device=q.device), None)
    dq, dk, dv = (torch.zeros_like(x, dtype=total.out.dtype) for x in (q, k, v))

    wide = problem.batch * problem.heads * problem.head_dim
    pairs, diagonal = wide * tiles[0].pairs, wide * tokens * (kind == "causal")
    yield Probe(
        "forward",
        (pairs, diagonal, q.numel(), 1),
        lambda _: attend(total, q, k, v, tiles, job),
    )
    yield Probe(
        "backward",
        (pairs, diagonal, q.numel() + k.numel() + v.numel(), 1),
        lambda _: attend_backward(rows, k, v, tiles, job, dq, dk, dv),
    )


def _start_probes(problem: Problem, group: Group) -> Iterator[Probe]:
    """A whole call on so few tokens that there is next to nothing to compute or to send."""
    tokens = 2
    leaves = [
        problem.tensor(heads, tokens, grad=True)
        for heads in (problem.heads, problem.kv_heads, problem.kv_heads)
    ]
    grad_out = torch.ones_like(leaves[0])

    def forward(_: object) -> torch.Tensor:
        return context_parallel_attention(*leaves, group=group, mask=Full())

    yield Probe("start forward", (1,), forward)
    yield Probe(
        "start backward",
        (1,),
        lambda out: torch.autograd.grad(out, leaves, grad_out),
        prepare=lambda: forward(None),
    )


def timed(probe: Probe, device: str) -> float:
    """Seconds of the slowest rank."""
    brought = probe.prepare()
    dist.barrier()
    start = time.perf_counter()
    probe.run(brought)
    if device != "cpu":
        torch.accelerator.synchronize()
    mine = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def measured(field: Sequence[Probe], rounds: int, device: str = "cpu") -> list[float]:
    """The least seconds of each probe, all of them in turn in every round, after a warm-up.

    why the least: whatever else the machine does only adds to a time.
    """
    for probe in field:
        timed(probe, device)
    by_round = [[timed(probe, device) for probe in field] for _ in range(rounds)]
    return [min(seconds) for seconds in zip(*by_round, strict=True)]


def fitted(field: Sequence[Probe], seconds: Sequence[float], ranks: int) -> Machine:
    """The machine that explains the times best."""
    by_kind: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    for probe, value in zip(field, seconds, strict=True):
        by_kind.setdefault(probe.kind, []).append((probe.parts, value))
    link = Link(0.0, float("inf"))
    if ranks > 1:
        latency, inverse = _least_squares(by_kind["block"])
        link = Link(latency, 1 / inverse if inverse else float("inf"))
    passes = []
    for name in ("forward", "backward"):
        ((_, start),) = by_kind[f"start {name}"]
        passes.append(Rates(*_least_squares(by_kind[name]), start))
    return Machine(*passes, link)


def _least_squares(samples: Sequence[tuple[tuple[float, ...], float]]) -> list[float]:
    """Constants of at least 0 that make the sum of the squared relative errors least.

    There are so few that every choice of those that are not 0 can be tried.
    """
    parts = np.array([row for row, _ in samples]) / np.array([[t] for _, t in samples])
    count = parts.shape[1]
    best, least = np.zeros(count), np.inf
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            scale = parts[:, chosen].max(0)
            found = np.linalg.lstsq(parts[:, chosen] / scale, np.ones(len(parts)), rcond=None)[0]
            error = np.square(parts[:, chosen] / scale @ found - 1).sum()
            if (found >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = found / scale
    return best.tolist()


@dataclass(frozen=True)
class Fit:
    """A machine, what it was fitted to, and how far its times are from those: the largest relative
    error of a tile (forward, backward) and of a block."""

    machine: Machine
    ranks: int
    worst: dict[str, float]


def fit(field: Sequence[Probe], seconds: Sequence[float], ranks: int) -> Fit:
    """`fitted`, held against the times themselves."""
    machine = fitted(field, seconds, ranks)
    worst: dict[str, float] = {}
    for probe, measured in zip(field, seconds, strict=True):
        if probe.kind in ("forward", "backward", "block"):
            error = abs(_modelled(machine, probe) / measured - 1)
            worst[probe.kind] = max(error, worst.get(probe.kind, 0.0))
    return Fit(machine, ranks, worst)


def _modelled(machine: Machine, probe: Probe) -> float:
    if probe.kind == "block":
        return machine.link.seconds(probe.parts[1])
    rates = getattr(machine, probe.kind)
    constants = rates.pair, rates.edge, rates.number, rates.call
    return sum(part * constant for part, constant in zip(probe.parts, constants, strict=True))


def fit_here(problem: Problem | None = None, rounds: int = 5) -> Fit:
    """On every rank of a run: the constants of this machine for this many ranks."""
    problem = problem or Problem()
    field = list(probes(problem, resolve(None)))
    return fit(field, measured(field, rounds, problem.device), dist.get_world_size())


def words(found: Fit) -> str:
    """The constants as lines to read."""
    lines = [f"fitted to {found.ranks} ranks of one thread each, forward and backward in float32"]
    for name, flops in (("forward", 4), ("backward", 10)):
        rates = getattr(found.machine, name)
        speed = f"{flops / rates.pair / 1e9:.0f} GFLOP/s" if rates.pair else "not to be told"
        lines.append(
            f"{name:9} {speed} a rank; {rates.edge / rates.pair if rates.pair else 0:.0f} pairs "
            f"more for a row on the diagonal; {rates.number * 1e9:.2f} ns to add a number; "
            f"{rates.call * 1e6:.0f} us a tile; {rates.start * 1e3:.1f} ms to start"
        )
    link = found.machine.link
    if found.ranks > 1:
        lines.append(
            f"link      {link.latency * 1e6:.0f} us a message, {link.bandwidth / 1e9:.2f} GB/s"
        )
    errors = ", ".join(f"{name} {error:.0%}" for name, error in found.worst.items())
    lines.append(f"largest error of the fit in its own measurements: {errors}")
    return "\n".join(lines)
