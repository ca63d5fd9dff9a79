"""What each rank of the demo does: train, compare, count, time; and hand over the numbers."""

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..attention import context_parallel_attention
from ..classroom.rank import keep
from ..comm import Group, resolve
from ..data import document, sequences
from ..exactness import relative_error
from ..layout import shard, unshard
from ..local import run_local
from ..measure.cost import Shape, backward_sent, forward_sent
from ..measure.memory import measure_memory
from ..model import Config, Decoder
from ..processes import init
from ..train import Step, loss_of, sharded_attention, train

CONFIG = Config(layers=2, width=64, heads=4, kv_heads=2, hidden=172)
# why: roundings grow from step to step, in any training. One rank and the same rank with weights
# that are one rounding apart differ by 1e-7 in their first 20 losses, by 6e-6 after 160 (CPU,
# float32, 256 tokens). Only in the early steps does a difference tell something about the ranks.
JUDGED_STEPS = 20
STRATEGIES = ("ring", "all_gather", "reduce_scatter", "ulysses")


@dataclass(frozen=True)
class Plan:
    """What the demo is asked to do."""

    ranks: int
    seq_len: int
    steps: int
    strategy: str
    layout: str
    document: str | None

    def others(self) -> Iterator[str]:
        """The strategies to compare beside the one that trains: those that can, by their heads."""
        for name in STRATEGIES:
            shareable = CONFIG.heads % self.ranks == 0
            if name != self.strategy and (name != "ulysses" or shareable):
                yield name


@dataclass(frozen=True)
class Measured:
    """The numbers of one strategy.

    errors: relative L2 errors of out, dq, dk, dv against float64 on one process; loss_error: the
    largest relative difference of the training loss from one rank's, in the first JUDGED_STEPS;
    sent: bytes that each rank sends in one attention, forward and backward; formula: what it should
    be, None where the formula does not apply; saved: bytes that one forward of the model saves on
    each rank; saved_alone: on one rank that holds the whole sequence; seconds, seconds_alone: of a
    training step, medians.
    """

    strategy: str
    errors: dict[str, float]
    loss_error: float
    losses: list[float]
    sent: list[int]
    formula: int | None
    saved: list[int]
    saved_alone: int
    seconds: float
    seconds_alone: float


def main(plan: Plan) -> None:
    """Runs on every rank. Rank 0 keeps `results`, a list of dictionaries, and `alone`."""
    device = init(timeout=120)
    group = resolve(None)
    tokens = document(plan.document)
    names = [plan.strategy, *plan.others()]
    runs = {name: _train(tokens, plan, name, group, device) for name in names}
    alone, saved_alone = _alone(tokens, plan, group, device)
    whole = _whole(plan, device)
    exact = _exact(*whole)
    results = []
    for name in names:
        parts, sent = _attention(plan, name, group, *whole)
        apart = [abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(runs[name], alone, strict=True)]
        measured = Measured(
            strategy=name,
            errors=_errors(parts, exact),
            loss_error=max(apart[:JUDGED_STEPS]),
            losses=[step.loss for step in runs[name]],
            sent=_of_all(sent, group),
            formula=_formula(plan, name),
            saved=_of_all(_saved(tokens, plan, name, group, device), group),
            saved_alone=saved_alone,
            seconds=_seconds(runs[name], plan),
            seconds_alone=_seconds(alone, plan),
        )
        results.append(asdict(measured))
    keep(results=results, alone=[step.loss for step in alone], device=str(device))


def _train(
    tokens: Tensor,
    plan: Plan,
    strategy: str,
    group: Group,
    device: torch.device,
    on_step: Callable[[Step], object] = lambda step: None,
) -> list[Step]:
    steps = train(
        tokens,
        seq_len=plan.seq_len,
        steps=plan.steps,
        config=CONFIG,
        group=group,
        strategy=strategy,
        layout=plan.layout,
        learning_rate=1e-3,
        device=device,
    )
    ranks = "1 rank " if group.size == 1 else f"{group.size} ranks"
    bar = tqdm(
        steps,
        total=plan.steps,
        desc=f"{ranks} {strategy if group.size > 1 else '':14}",
        disable=group.rank > 0,
        ncols=88,
        unit="step",
        bar_format="{desc} {bar} {n}/{total}{postfix}",
    )
    done = []
    for step in bar:
        bar.set_postfix_str(f"loss {step.loss:.3f}, {step.tokens_per_second:,.0f} tokens/s")
        done.append(step)
        on_step(step)
    return done


def _alone(
    tokens: Tensor, plan: Plan, group: Group, device: torch.device
) -> tuple[list[Step], int]:
    """The same on one rank, with the threads of all: its steps, and the bytes it saves.

    The other ranks wait, and hear of each step as it is done: so that they wait no longer than a
    step takes, however many there are.
    """

    def told(*numbers: float) -> list[float]:
        return group.all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()

    if group.rank > 0:
        steps = [Step(number, *told(0, 0)) for number in range(plan.steps)]
        return steps, int(told(0)[0])

    def on_step(step: Step) -> None:
        told(step.loss, step.tokens_per_second)

    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads * group.size, os.cpu_count() or 1))
    steps = run_local(lambda one: _train(tokens, plan, "ring", one, device, on_step), 1)[0]
    saved = run_local(lambda one: _saved(tokens, plan, "ring", one, device), 1)[0]
    torch.set_num_threads(threads)
    told(saved)
    return steps, saved


def _whole(plan: Plan, device: torch.device) -> list[Tensor]:
    """q, k, v and grad_out of an attention of the model's shape, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    heads = [CONFIG.heads, CONFIG.kv_heads, CONFIG.kv_heads, CONFIG.heads]
    shapes = [(1, h, plan.seq_len, CONFIG.head_dim) for h in heads]
    return [torch.randn(shape, generator=draw).to(device) for shape in shapes]


def _attention(
    plan: Plan, strategy: str, group: Group, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor
) -> tuple[list[Tensor], int]:
    """out, dq, dk, dv of sharded attention, made whole again; and the bytes that this rank sent."""
    where = {"group": group, "layout": plan.layout}
    mine = [shard(x, 2, **where).requires_grad_() for x in (q, k, v)]
    group.traffic.reset()
    out = context_parallel_attention(*mine, strategy=strategy, seq_len=plan.seq_len, **where)
    out.backward(shard(grad_out, 2, **where))
    sent = group.traffic.bytes
    parts = [out.detach(), *(x.grad for x in mine)]
    return [unshard(x, 2, seq_len=plan.seq_len, **where) for x in parts], sent


def _exact(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """out, dq, dk, dv on one process, in float64.

    By torch's own attention: `reference_attention` would need the memory of all scores, on each
    rank. That the two agree is tested.
    """
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())]


def _errors(parts: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    names = ("out", "dq", "dk", "dv")
    return {n: relative_error(x, e) for n, x, e in zip(names, parts, exact, strict=True)}


def _of_all(number: int, group: Group) -> list[int]:
    """Every rank's number, in the order of ranks."""
    return [int(n) for n in group.all_gather(torch.tensor([number])).wait()]


def _formula(plan: Plan, strategy: str) -> int | None:
    if plan.seq_len % plan.ranks:
        return None
    shape = Shape(
        batch=1,
        seq_len=plan.seq_len,
        heads=CONFIG.heads,
        kv_heads=CONFIG.kv_heads,
        head_dim=CONFIG.head_dim,
        ranks=plan.ranks,
        bytes_each=4,
    )
    return (forward_sent(strategy, shape) + backward_sent(strategy, shape)).bytes


def _saved(tokens: Tensor, plan: Plan, strategy: str, group: Group, device: torch.device) -> int:
    model = Decoder(CONFIG).to(device)
    attention = sharded_attention(group, strategy, plan.layout, plan.seq_len)
    batch = next(sequences(tokens, plan.seq_len)).to(device)
    with measure_memory(model.parameters()) as memory:
        loss_of(model, batch, attention, group, plan.layout)
    return memory.saved_bytes


def _seconds(steps: list[Step], plan: Plan) -> float:
    """The median time of a step, without the first, in which everything is still cold."""
    speeds = [step.tokens_per_second for step in steps[1:] or steps]
    return plan.seq_len / statistics.median(speeds)
