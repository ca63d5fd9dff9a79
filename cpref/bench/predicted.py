"""Does the model of time hold on this machine? Whole attentions, predicted from single tiles.

    python -m cpref.bench.predicted --out benchmarks/predicted.json --figures benchmarks

In each round the ranks time, one after the other: single tiles and single blocks, to which the
constants are fitted (`cpref.measure.fit`), and whole attentions of every strategy and length, which
are predicted from them. The ratio of the two is what counts; of each time the least of the rounds
is taken, for whatever else the machine does only adds to it. It takes
eight minutes.
"""

import argparse
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ..attention import context_parallel_attention
from ..classroom.launch import launch
from ..comm import Group, resolve
from ..files import writable_folder
from ..measure.cost import Shape
from ..measure.fit import Probe, Problem, fit, measured, probes, words
from ..measure.times import Machine, backward_pass, forward_pass
from ..measure.work import attention_work
from ..show.cost import Compared, predicted_and_measured

LENGTHS = (2048, 4096, 8192, 16384)
STRATEGIES = ("ring", "all_gather", "reduce_scatter", "ulysses")
RANKS = 2

_CELL = """
import cpref, torch
from cpref.bench.predicted import on_a_rank
torch.set_num_threads(1)
cpref.init(timeout=600)
cpref.keep(**on_a_rank({lengths!r}, {rounds}))
"""


def on_a_rank(lengths: tuple[int, ...], rounds: int) -> dict:
    """On each rank: the fit and the comparison, as what `keep` can hand over."""
    problem, group = Problem(), resolve(None)
    field = list(probes(problem, group))
    cases = list(itertools.product(lengths, STRATEGIES))
    whole = [probe for case in cases for probe in _attention(problem, group, *case)]
    seconds = measured([*field, *whole], rounds)
    found = fit(field, seconds[: len(field)], group.size)
    forward, backward = seconds[len(field) :: 2], seconds[len(field) + 1 :: 2]
    compared = [
        Compared(seq_len, strategy, *predicted(problem, found.machine, seq_len, strategy), *both)
        for (seq_len, strategy), *both in zip(cases, forward, backward, strict=True)
    ]
    return {"fit": asdict(found), "words": words(found), "compared": list(map(asdict, compared))}


def _attention(problem: Problem, group: Group, seq_len: int, strategy: str) -> list[Probe]:
    """Forward and backward of a causal attention, zigzag."""
    local = seq_len // group.size
    leaves = [
        problem.tensor(heads, local, grad=True)
        for heads in (problem.heads, problem.kv_heads, problem.kv_heads)
    ]
    grad_out = torch.ones_like(leaves[0])

    def forward(_: object = None) -> torch.Tensor:
        return context_parallel_attention(*leaves, group=group, strategy=strategy)

    def backward(out: torch.Tensor) -> object:
        return torch.autograd.grad(out, leaves, grad_out)

    return [
        Probe("attention forward", (), forward),
        Probe("attention backward", (), backward, prepare=forward),
    ]


def predicted(
    problem: Problem, machine: Machine, seq_len: int, strategy: str, ranks: int = RANKS
) -> tuple[float, float]:
    """Seconds of forward and of backward, by the model."""
    bytes_each = getattr(torch, problem.dtype).itemsize
    heads = problem.heads, problem.kv_heads, problem.head_dim
    shape = Shape(problem.batch, seq_len, *heads, ranks, bytes_each)
    work = attention_work(seq_len, ranks, joined=ranks if strategy == "ulysses" else 1)
    passes = forward_pass, backward_pass
    return tuple(run(strategy, shape, work, machine).total for run in passes)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="predicted and measured times side by side")
    parser.add_argument("--seq-len", type=int, nargs="+", default=LENGTHS, help="global lengths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", metavar="FILE", help="write the JSON there")
    parser.add_argument("--figures", metavar="DIR", help="draw them into DIR/predicted.png")
    args = parser.parse_args(argv)
    if args.figures:
        writable_folder("--figures", args.figures)
    cell = _CELL.format(lengths=tuple(args.seq_len), rounds=args.rounds)
    kept = launch(RANKS, cell=cell).by_rank[0]
    compared = [Compared(**row) for row in kept["compared"]]
    print(kept["words"])
    print(f"\n{'tokens':>8} {'strategy':16}{'measured':>10}{'predicted':>10}{'ratio':>7}")
    for row in compared:
        print(
            f"{row.seq_len:8} {row.strategy:16}{row.measured * 1e3:7.0f} ms"
            f"{row.predicted * 1e3:7.0f} ms{row.ratio:7.2f}"
        )
    report = {
        "ranks": RANKS,
        "torch": torch.__version__,
        "problem": asdict(Problem()),
        "rounds": args.rounds,
        "fit": kept["fit"],
        "compared": [{**asdict(row), "ratio": row.ratio} for row in compared],
    }
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
    if args.figures:
        predicted_and_measured(compared, RANKS).save(Path(args.figures) / "predicted.png")


if __name__ == "__main__":
    main(sys.argv[1:])
