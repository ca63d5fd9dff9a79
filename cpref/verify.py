"""`cpref verify`: the exactness matrix, on real ranks or on threads, with its worst errors.

Every case of `matrix.py` is computed on each number of ranks and held against its bounds from
`exactness.py`. The table shows, for each strategy and dtype, the error that comes nearest to its
bound.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields

import torch
from tqdm import tqdm

from .attention import STRATEGIES
from .classroom.launch import RanksFailed, launch
from .classroom.rank import keep
from .exactness import Case, Errors, bounds, errors
from .local import run_local
from .matrix import OPTIONS, case, covering, everything
from .processes import init

_DEFAULT_RANKS = (1, 2, 3, 4, 5)
_DONE = "done\n"  # what a rank prints after each case
_COLUMNS = "{:15} {:9} {:>6} {:>5} {:>9} {:>9} {:>6}   {}"


@dataclass(frozen=True)
class Result:
    """The errors of one case on so many ranks, and what they may be."""

    ranks: int
    case: Case
    errors: Errors
    bounds: Errors

    @property
    def missed(self) -> bool:
        return not self.errors.within(self.bounds)

    @property
    def nearest(self) -> tuple[float, str]:
        """How much of its bound the worst of out, dq, dk, dv uses, and which it is."""
        return max((_used(self.errors, self.bounds, x.name), x.name) for x in fields(Errors))


def _used(measured: Errors, allowed: Errors, name: str) -> float:
    error, bound = getattr(measured, name), getattr(allowed, name)
    if error <= bound:
        return error / bound if bound else 0.0
    return error / bound if bound and error == error else float("inf")  # why: nan is a miss, too


def cases(ranks: int, *, full: bool = False) -> list[Case]:
    """The matrix on so many ranks.

    Every pair of options, every strategy with every dtype and length; or all of their product.
    """
    if full:
        return [case(choice, ranks) for choice in everything()]
    return [case(choice, ranks) for choice in covering(OPTIONS, ("strategy", "dtype", "seq_len"))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, nargs="+", metavar="P", help="numbers of ranks; default: 1 2 3 4 5"
    )
    parser.add_argument("--local", action="store_true", help="threads as ranks, not processes")
    parser.add_argument(
        "--full", action="store_true", help="the whole product of options, not every pair: hours"
    )
    parser.add_argument("--json", action="store_true", help="print every case's errors as JSON")


def run(args: argparse.Namespace) -> int:
    """0 if every error is within its bound, else 1. Raises ValueError for bad input."""
    measure = _on_threads if args.local else _on_processes
    results: list[Result] = []
    for ranks in _numbers_of_ranks(args):
        try:
            results += measure(ranks, args.full)
        except RanksFailed as error:
            print(error, file=sys.stderr)
            return 1
    missed = [result for result in results if result.missed]
    if args.json:
        print(json.dumps([_as_json(result) for result in results], indent=2))
    else:
        _print_table(results, "threads" if args.local else "processes")
        print(
            "errors of dq, dk: relative to the gradient, or to the term subtracted in it, if larger"
        )
        for result in missed:
            print(f"MISSED on {result.ranks} ranks: {result.case}: {_described(result)}")
        print(_sentence(results, missed))
    return 1 if missed else 0


def _numbers_of_ranks(args: argparse.Namespace) -> Sequence[int]:
    found = torch.accelerator.current_accelerator(check_available=True)
    most = sys.maxsize if args.local or found is None else torch.accelerator.device_count()
    if args.ranks is None:
        return [ranks for ranks in _DEFAULT_RANKS if ranks <= most]
    for ranks in args.ranks:
        if ranks < 1:
            raise ValueError(f"--ranks is {ranks}; it must be at least 1")
        if ranks > most:
            raise ValueError(
                f"--ranks is {ranks}, more than the {most} accelerators here; use --local"
            )
    return args.ranks


def _progress(ranks: int, total: int) -> tqdm:
    bar = "{desc} {bar} {n}/{total} cases, {elapsed}"
    return tqdm(total=total, desc=f"{ranks} ranks", ncols=80, bar_format=bar)


def _on_threads(ranks: int, full: bool) -> list[Result]:
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    chosen = cases(ranks, full=full)
    results = []
    with _progress(ranks, len(chosen)) as bar:
        for one in chosen:
            measured = run_local(lambda group, one=one: errors(one, group, device=device), ranks)
            results.append(Result(ranks, one, measured[0], bounds(one, device=device)))
            bar.update()
    return results


def _on_processes(ranks: int, full: bool) -> list[Result]:
    chosen = cases(ranks, full=full)
    with _progress(ranks, len(chosen)) as bar:
        kept = launch(
            ranks,
            module=["cpref.verify", str(ranks), *(["--full"] if full else [])],
            on_output=lambda rank, text: rank or bar.update(text.count(_DONE)),
        ).by_rank[0]
    return [
        Result(ranks, one, Errors(*measured), Errors(*allowed))
        for one, (measured, allowed) in zip(chosen, kept["measured"], strict=True)
    ]


def _measure(ranks: int, full: bool) -> Iterator[tuple[tuple, tuple]]:
    """Runs on every rank: the errors and bounds of each case, as plain numbers."""
    device = init()
    torch.set_num_threads(1)
    for one in cases(ranks, full=full):
        measured = errors(one, device=device)
        yield astuple(measured), astuple(bounds(one, device=device))
        print(_DONE, end="", flush=True)


def _print_table(results: list[Result], where: str) -> None:
    print(f"\nrelative L2 errors against float64 on one process; ranks are {where}")
    print(_COLUMNS.format("strategy", "dtype", "cases", "of", "error", "bound", "used", "in"))
    for strategy in STRATEGIES:
        for dtype in OPTIONS["dtype"]:
            of_cell = [r for r in results if (r.case.strategy, r.case.dtype) == (strategy, dtype)]
            if not of_cell:
                continue
            worst = max(of_cell, key=lambda result: result.nearest)
            used, name = worst.nearest
            error, bound = getattr(worst.errors, name), getattr(worst.bounds, name)
            print(
                _COLUMNS.format(
                    strategy,
                    str(dtype).removeprefix("torch."),
                    len(of_cell),
                    name,
                    f"{error:.2e}",
                    f"{bound:.2e}",
                    f"{used:.0%}",
                    _where(worst),
                )
            )


def _where(result: Result) -> str:
    one = result.case
    mask = str(one.mask)
    mask = mask if len(mask) <= 24 else mask[:23] + "…"
    heads = f"H={one.heads}/{one.kv_heads}"
    return f"P={result.ranks} {one.layout} {one.accumulate} S={one.seq_len} {heads} {mask}"


def _described(result: Result) -> str:
    return ", ".join(
        f"{x.name} {getattr(result.errors, x.name):.2e} of {getattr(result.bounds, x.name):.2e}"
        for x in fields(Errors)
    )


def _sentence(results: list[Result], missed: list[Result]) -> str:
    if missed:
        return f"NOT exact: {len(missed)} of {len(results)} cases miss a bound."
    numbers = ", ".join(str(ranks) for ranks in sorted({result.ranks for result in results}))
    return f"Exact: all {len(results)} cases on {numbers} ranks are within their bounds."


def _as_json(result: Result) -> dict[str, object]:
    described = {name: _plain(value) for name, value in vars(result.case).items()}
    return {
        "ranks": result.ranks,
        "case": described,
        "errors": asdict(result.errors),
        "bounds": asdict(result.bounds),
        "within": not result.missed,
    }


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | None) else str(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--full", action="store_true")
    asked = parser.parse_args()
    keep(measured=list(_measure(asked.ranks, asked.full)))
