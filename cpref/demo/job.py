"""What each rank of the demo does: train, compare, count, time; and hand over the numbers."""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..attention import context_parallel_attention
from ..classroom.rank import keep
from ..comm import Group, resolve
from ..data import document, sequences
from ..layout import shard, unshard
from ..local import run_local
from ..measure.cost import Shape, backward_sent, forward_sent
from ..measure.memory import measure_saved
from ..model import Config, Decoder
from ..processes import init
from ..train import Step, loss_of, sharded_attention, train

CONFIG = Config(layers=2, width=128, heads=4, kv_heads=2, hidden=344)
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
    """The numbers of one strategy, of rank 0.

    errors: relative L2 errors of out, dq, dk, dv against float64 on one process; loss_error: the
    largest relative difference of the training loss from one rank's; sent, formula: bytes of one
    attention, forward and backward, None where the formula does not apply; saved, saved_alone:
    bytes that one forward of the model saves, per rank and on one rank; seconds, seconds_alone: of
    a training step, medians.
    """

    strategy: str
    errors: dict[str, float]
    loss_error: float
    losses: list[float]
    sent: int
    formula: int | None
    saved: int
    saved_alone: int
    seconds: float
    seconds_alone: float


def main(plan: Plan) -> None:
    """Runs on every rank. Rank 0 keeps `results`, a list of dictionaries, and `alone`."""
    device = init(timeout=120)
    torch.set_num_threads(1)
    group = resolve(None)
    tokens = document(plan.document)
    names = [plan.strategy, *plan.others()]
    runs = {name: _train(tokens, plan, name, group, device) for name in names}
    alone, saved_alone = _alone(tokens, plan, group, device)
    results = []
    for name in names:
        sent, errors = _attention(plan, name, group, device)
        apart = [abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(runs[name], alone, strict=True)]
        measured = Measured(
            strategy=name,
            errors=errors,
            loss_error=max(apart),
            losses=[step.loss for step in runs[name]],
            sent=sent,
            formula=_formula(plan, name),
            saved=_saved(tokens, plan, name, group, device),
            saved_alone=saved_alone,
            seconds=_seconds(runs[name], plan),
            seconds_alone=_seconds(alone, plan),
        )
        results.append(asdict(measured))
    keep(results=results, alone=[step.loss for step in alone], device=str(device))


def _train(
    tokens: Tensor, plan: Plan, strategy: str, group: Group, device: torch.device
) -> list[Step]:
    steps = train(
        tokens,
        seq_len=plan.seq_len,
        steps=plan.steps,
        config=CONFIG,
        group=group,
        strategy=strategy,
        layout=plan.layout,
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
    return done


def _alone(
    tokens: Tensor, plan: Plan, group: Group, device: torch.device
) -> tuple[list[Step], int]:
    """The same on one rank with the threads of all, while the others wait; known to all."""
    steps, saved = [], 0
    if group.rank == 0:
        torch.set_num_threads(group.size)
        steps, saved = run_local(
            lambda one: (
                _train(tokens, plan, "ring", one, device),
                _saved(tokens, plan, "ring", one, device),
            ),
            1,
        )[0]
        torch.set_num_threads(1)
    numbers = torch.zeros(plan.steps, 2, dtype=torch.float64)
    for row, step in zip(numbers, steps, strict=False):
        row.copy_(torch.tensor([step.loss, step.tokens_per_second]))
    shared = group.all_reduce(torch.cat([numbers.flatten(), torch.tensor([float(saved)])]))
    rows = shared[:-1].view(-1, 2).tolist()
    return [Step(i, loss, speed) for i, (loss, speed) in enumerate(rows)], int(shared[-1])


def _attention(
    plan: Plan, strategy: str, group: Group, device: torch.device
) -> tuple[int, dict[str, float]]:
    """Bytes sent by one attention of the model's shape, and its errors against float64."""
    draw = torch.Generator().manual_seed(1)
    heads = [CONFIG.heads, CONFIG.kv_heads, CONFIG.kv_heads, CONFIG.heads]
    shapes = [(1, h, plan.seq_len, CONFIG.head_dim) for h in heads]
    q, k, v, grad_out = (torch.randn(s, generator=draw).to(device) for s in shapes)
    where = {"group": group, "layout": plan.layout}
    mine = [shard(x, 2, **where).requires_grad_() for x in (q, k, v)]
    group.traffic.reset()
    out = context_parallel_attention(*mine, strategy=strategy, seq_len=plan.seq_len, **where)
    out.backward(shard(grad_out, 2, **where))
    sent = group.traffic.bytes
    parts = [out.detach(), *(x.grad for x in mine)]
    whole = [unshard(x, 2, seq_len=plan.seq_len, **where) for x in parts]
    exact = _exact(q, k, v, grad_out)
    names = ("out", "dq", "dk", "dv")
    triples = zip(names, whole, exact, strict=True)
    return sent, {name: ((x - e).norm() / e.norm()).item() for name, x, e in triples}


def _exact(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """out, dq, dk, dv of torch's own attention, in float64, on one process."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())]


def _formula(plan: Plan, strategy: str) -> int | None:
    shared_heads = strategy != "ulysses" or CONFIG.kv_heads % plan.ranks == 0
    if plan.seq_len % plan.ranks or not shared_heads:
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
    with measure_saved(model.parameters()) as saved:
        loss_of(model, batch, attention, group, plan.layout)
    return saved.bytes


def _seconds(steps: list[Step], plan: Plan) -> float:
    """The median time of a step, without the first, in which everything is still cold."""
    speeds = [step.tokens_per_second for step in steps[1:] or steps]
    return plan.seq_len / statistics.median(speeds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("ranks", "seq_len", "steps"):
        parser.add_argument(name, type=int)
    for name in ("strategy", "layout", "document"):
        parser.add_argument(name)
    args = vars(parser.parse_args())
    main(Plan(**{**args, "document": args["document"] or None}))
