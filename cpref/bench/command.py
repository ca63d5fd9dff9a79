"""The command around the benchmark: what to measure, on how many ranks, and the table."""

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path

import torch

from ..classroom.launch import RanksFailed, launch
from ..files import writable_folder
from ..show import figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[4096], help="global lengths")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32"], help="float32, bfloat16, float64"
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after a warm-up")
    parser.add_argument("--only", nargs="+", default=[""], help="those whose names contain this")
    parser.add_argument("--forward", action="store_true", help="forward alone, without backward")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    parser.add_argument("--out", metavar="FILE", help="write the JSON there, too")
    parser.add_argument("--figures", metavar="DIR", help="draw the ratios into DIR/bench.png")


def run(args: argparse.Namespace) -> int:
    """0 when all could be measured, 1 when a rank failed. Raises ValueError for bad input."""
    request = _request(args)
    try:
        kept = launch(
            args.ranks,
            module=["cpref.bench.rank", json.dumps(request)],
            on_output=lambda rank, text: rank or print(text, end="", flush=True, file=sys.stderr),
        ).by_rank[0]
    except RanksFailed as error:
        print(error, file=sys.stderr)
        return 1
    report = {
        "request": {**request, "ranks": args.ranks},
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        **kept,
    }
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
    if args.figures:
        figures.ratios(kept["tables"], args.ranks).save(Path(args.figures) / "bench.png")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    return 0


def _request(args: argparse.Namespace) -> dict[str, object]:
    """What the ranks are to measure, or ValueError that says why it cannot be."""
    numbers = {
        "--ranks": [args.ranks],
        "--seq-len": args.seq_len,
        "--heads": [args.heads],
        "--head-dim": [args.head_dim],
        "--batch": [args.batch],
        "--rounds": [args.rounds],
    }
    for name, values in numbers.items():
        for value in values:
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
    for seq_len in args.seq_len:
        if seq_len % (2 * args.ranks):
            raise ValueError(
                f"--seq-len is {seq_len}; to be fair to peers that need it, it must be divisible "
                f"by twice the ranks, {2 * args.ranks}"
            )
    for dtype in args.dtype:
        if dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise ValueError(
                f"--dtype is {dtype!r}; it must be float32, bfloat16, float16 or float64"
            )
    if args.out:
        writable_folder("--out", Path(args.out).parent)
    if args.figures:
        writable_folder("--figures", args.figures)
    shared = 2 * args.ranks
    return {
        "seq_len": args.seq_len,
        "dtype": args.dtype,
        "heads": args.heads,
        "head_dim": args.head_dim,
        "batch": args.batch,
        "rounds": args.rounds,
        "only": args.only,
        "backward": not args.forward,
        "error_seq_len": min(1024 // shared * shared or shared, *args.seq_len),
    }


def _print_tables(report: dict) -> None:
    request = report["request"]
    what = "forward and backward" if request["backward"] else "forward"
    print(
        f"causal attention, {what}, B={request['batch']} H={request['heads']} "
        f"D={request['head_dim']}, {request['ranks']} ranks of one thread each ({report['device']})"
    )
    names = ["out", "dq", "dk", "dv"] if request["backward"] else ["out"]
    for table in report["tables"]:
        print(f"\n{table['seq_len']} tokens, {table['dtype']}")
        errors = "".join(f"{name:>10}" for name in names)
        numbers = ("ms", 10), ("ns a pair", 11), ("ratio", 7), ("peak MiB", 10), ("sent MiB", 10)
        print(f"{'':32}{''.join(f'{name:>{width}}' for name, width in numbers)}{errors}")
        pairs = request["batch"] * request["heads"] * table["seq_len"] * (table["seq_len"] + 1) / 2
        for result in table["results"]:
            errors = "".join(f"{result['error'][name]:10.1e}" for name in names)
            seconds = statistics.median(result["seconds"])
            print(
                f"{result['name']:32}{seconds * 1e3:10.1f}{seconds / pairs * 1e9:11.3f}"
                f"{result['ratio']:7.2f}{result['peak_bytes'] / 2**20:10.1f}"
                f"{result['sent_bytes'] / 2**20:10.2f}{errors}"
            )
    print(
        f"\nratio: median over {request['rounds']} rounds of the time to the first line's in the "
        "same round, which has as\nmany threads as there are ranks. pair: a query and a key that "
        "attend, in one head. peak: bytes alive at\nonce, of what the call makes, on rank 0. "
        f"Errors: relative L2, against float64, at {request['error_seq_len']} tokens."
    )
    if report["missing"]:
        print(
            f"not installed and left out: {', '.join(report['missing'])} (pip install cpref[peers])"
        )
