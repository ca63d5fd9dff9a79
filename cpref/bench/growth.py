"""Does the error grow with the number of ranks? Measured on local ranks, against float64.

    python -m cpref.bench.growth --out benchmarks/errors.json --figures benchmarks

Errors do not depend on the machine's speed, nor on what moves the bytes: threads of one process are
as good as devices. Takes half a minute.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ..attention import ACCUMULATE
from ..exactness import Case, Errors, bounds, errors
from ..files import writable_folder
from ..local import run_local
from ..show.errors import growth

RANKS = (2, 4, 8, 16, 32)
CASE = Case(dtype=torch.bfloat16, heads=4, kv_heads=2, head_dim=64, seq_len=2048)


def measured(case: Case = CASE, ranks: tuple[int, ...] = RANKS) -> dict[str, dict[int, Errors]]:
    """The errors of the case for each way to accumulate and each number of ranks."""
    return {
        how: {count: _errors(replace(case, accumulate=how), count) for count in ranks}
        for how in ACCUMULATE
    }


def _errors(case: Case, ranks: int) -> Errors:
    return run_local(lambda group: errors(case, group), ranks)[0]


def plain(case: Case = CASE) -> Errors:
    """What plain attention on one process gets wrong: the bound of the case is 1.6 times that."""
    allowed = bounds(replace(case, accumulate="fp32"))
    return Errors(**{name: bound / 1.6 for name, bound in asdict(allowed).items()})


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description="errors against the number of ranks")
    parser.add_argument("--out", metavar="FILE", help="write the JSON there")
    parser.add_argument("--figures", metavar="DIR", help="draw them into DIR/errors.png")
    args = parser.parse_args(words)
    if args.figures:
        writable_folder("--figures", args.figures)
    alone, by_ranks = plain(), measured()
    report = {
        "case": str(CASE),
        "plain": asdict(alone),
        "ranks": {how: {p: asdict(e) for p, e in of.items()} for how, of in by_ranks.items()},
    }
    print(json.dumps(report, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
    if args.figures:
        growth(by_ranks, alone, str(CASE.dtype)).save(Path(args.figures) / "errors.png")


if __name__ == "__main__":
    main(sys.argv[1:])
