"""How it is measured: one run, all contenders in turn, medians, ratios within the run.

Every round visits all contenders, each round in another order, so that a machine that becomes slow
for a while is slow for all. Ranks compute with one thread each; a contender that is alone has as
many threads as there are ranks. A time is that of the slowest rank.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..exactness import relative_error
from ..mask import Causal
from ..measure.peak import PeakMemory
from ..reference import reference_attention
from .contenders import Contender


@dataclass(frozen=True)
class Problem:
    """Causal attention of (B, H, S, D) in one dtype; forward alone, or forward and backward."""

    batch: int
    heads: int
    head_dim: int
    seq_len: int
    dtype: torch.dtype
    backward: bool = True
    device: str = "cpu"

    def inputs(self, seq_len: int | None = None) -> list[Tensor]:
        """q, k, v, grad_out, whole, the same on every rank."""
        shape = (self.batch, self.heads, seq_len or self.seq_len, self.head_dim)
        draw = torch.Generator().manual_seed(0)
        wide = (torch.randn(shape, generator=draw) for _ in range(4))
        return [x.to(self.dtype).to(self.device) for x in wide]


@dataclass(frozen=True)
class Result:
    """What one contender needed for one problem.

    seconds: of each round; ratio: the median over the rounds of its time to the baseline's in the
    same round; peak_bytes, sent_bytes: of one call, on rank 0; error: relative L2 errors against
    float64 of out (and dq, dk, dv), at `error_seq_len`, since the judge holds all scores.
    """

    name: str
    seconds: list[float]
    ratio: float
    peak_bytes: int
    sent_bytes: int
    error: dict[str, float]
    error_seq_len: int


def compare(
    problem: Problem, field: Sequence[Contender], rounds: int, error_seq_len: int
) -> list[Result]:
    """Every contender's result, on every rank; the first contender is the baseline."""
    field = [contender for contender in field if problem.dtype in contender.takes]
    parts = {c.name: _parts(c, problem.inputs()) for c in field}
    seconds: dict[str, list[float]] = {c.name: [] for c in field}
    for contender in field:
        _once(contender, parts[contender.name], problem.backward)  # warm-up
    for turn in range(rounds):
        for contender in _rotated(field, turn):
            seconds[contender.name].append(
                _timed(contender, parts[contender.name], problem.backward)
            )
    baseline = seconds[field[0].name]
    return [
        Result(
            contender.name,
            seconds[contender.name],
            statistics.median(
                mine / base for mine, base in zip(seconds[contender.name], baseline, strict=True)
            ),
            *_cost(contender, parts[contender.name], problem.backward),
            _error(contender, problem, error_seq_len),
            error_seq_len,
        )
        for contender in field
    ]


def _rotated(field: Sequence[Contender], turn: int) -> list[Contender]:
    """Another first contender each round, and each other round backwards."""
    start = turn % len(field)
    order = [*field[start:], *field[:start]]
    return order[::-1] if turn % 2 else order


def _parts(contender: Contender, inputs: list[Tensor]) -> list[Tensor]:
    *leaves, grad_out = (contender.split(x) for x in inputs)
    return [*(x.detach().clone().requires_grad_() for x in leaves), grad_out]


def _once(contender: Contender, parts: list[Tensor], backward: bool) -> list[Tensor]:
    """[out] or [out, dq, dk, dv]; nothing on the ranks that a lone contender does not use."""
    if contender.alone and dist.get_rank() > 0:
        return []
    *leaves, grad_out = parts
    threads = torch.get_num_threads()
    torch.set_num_threads(threads * dist.get_world_size() if contender.alone else threads)
    try:
        with torch.set_grad_enabled(backward):
            out = contender.attend(*leaves)
        if not backward:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    finally:
        torch.set_num_threads(threads)


def _timed(contender: Contender, parts: list[Tensor], backward: bool) -> float:
    dist.barrier()
    start = time.perf_counter()
    _once(contender, parts, backward)
    _finish(parts[0].device)
    mine = torch.tensor([time.perf_counter() - start], dtype=torch.float64)  # on the CPU: gloo
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def _finish(device: torch.device) -> None:
    """Wait for what an accelerator has still to do: there a call only queues its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _cost(contender: Contender, parts: list[Tensor], backward: bool) -> tuple[int, int]:
    with PeakMemory() as peak:
        _once(contender, parts, backward)
    return peak.peak_bytes, peak.sent_bytes


def _error(contender: Contender, problem: Problem, seq_len: int) -> dict[str, float]:
    inputs = problem.inputs(seq_len)
    parts = _once(contender, _parts(contender, inputs), problem.backward)
    whole = [contender.join(x) for x in parts]
    *leaves, grad_out = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    out = reference_attention(*leaves, mask=Causal())
    exact = [out, *torch.autograd.grad(out, leaves, grad_out)]
    pairs = zip(("out", "dq", "dk", "dv"), whole, exact, strict=False)
    return {name: relative_error(x, exactly) for name, x, exactly in pairs}
