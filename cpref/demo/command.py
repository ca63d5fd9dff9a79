"""The command around the job: check the request, launch the ranks, say what came out."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ..attention import STRATEGIES as ALL_STRATEGIES
from ..classroom.launch import RanksFailed, launch
from ..data import document
from ..files import writable_folder
from ..layout import LAYOUTS
from ..show import figures
from .job import CONFIG, JUDGED_STEPS, Measured, Plan

_OUT_BOUND, _GRAD_BOUND = 1e-6, 3e-6
# What AdamW makes of the gradients' roundings has no formula, so this bound is from measurements of
# 20 steps (CPU, float32). Right: up to 4e-7, from 2 to 1024 tokens on 2 to 8 ranks. Wrong, 512
# tokens on 4 ranks: dK,dV that travel in bfloat16 make 7e-6, one part in a hundred of them lost
# 1e-4, local positions 2e-4, gradients that are not summed 1e-2. It is blind to gradients that are
# all wrong by one factor, such as averaged ones (1.5e-6), since AdamW is; the tests are not.
_LOSS_BOUND = 2e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="default: one per accelerator, else 4")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--strategy", default="ring", help="the one that is trained first")
    parser.add_argument("--layout", default="zigzag", help=", ".join(LAYOUTS))
    parser.add_argument("--document", help="a text file; default: the Python language reference")
    parser.add_argument("--out", default="out", help="folder for demo.json")
    parser.add_argument("--figures", metavar="DIR", help="folder for the figures; default: --out")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    """0 if every number is within its bound, else 1. Raises ValueError for bad input."""
    plan = _plan(args)
    out = writable_folder("--out", args.out)
    pictures = writable_folder("--figures", args.figures) if args.figures else out
    try:
        kept = launch(
            plan.ranks,
            module=["cpref.demo.rank", json.dumps(asdict(plan))],
            on_output=lambda rank, text: rank or print(text, end="", flush=True, file=sys.stderr),
        ).by_rank[0]
    except RanksFailed as error:
        print(error, file=sys.stderr)
        return 1
    results = [Measured(**result) for result in kept["results"]]
    alone, chosen = kept["alone"], results[0]
    verdict = {result.strategy: _misses(result) for result in results}
    report = {
        "plan": asdict(plan),
        "device": kept["device"],
        "torch": torch.__version__,
        "losses_of_one_rank": alone,
        "results": kept["results"],
        "misses": verdict,
    }
    (out / "demo.json").write_text(json.dumps(report, indent=2))
    figures.losses(alone, chosen.losses, plan.ranks).save(pictures / "losses.png")
    saved = {result.strategy: max(result.saved) for result in results}
    picture = figures.saved_activations(chosen.saved_alone, saved, plan.ranks)
    picture.save(pictures / "saved_activations.png")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(results, plan, kept["device"])
        print(f"\nwritten: {out}/demo.json, {pictures}/losses.png and saved_activations.png")
        print(_sentence(results, plan, verdict))
    return 1 if any(verdict.values()) else 0


def _plan(args: argparse.Namespace) -> Plan:
    """What was asked for, or ValueError that says why it cannot be done."""
    ranks = args.ranks if args.ranks is not None else _default_ranks()
    for name, value in (("--ranks", ranks), ("--steps", args.steps)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    trainable = tuple(name for name in ALL_STRATEGIES if name != "hybrid")
    for name, value, known in (
        ("--strategy", args.strategy, trainable),
        ("--layout", args.layout, LAYOUTS),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    length = len(document(args.document))
    if not 2 <= args.seq_len <= length:
        raise ValueError(
            f"--seq-len is {args.seq_len}; it must be from 2 to the {length} tokens of the document"
        )
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and ranks > torch.accelerator.device_count():
        raise ValueError(
            f"--ranks is {ranks}, more than the {torch.accelerator.device_count()} devices of this "
            "machine; hide them to use the CPU"
        )
    if ranks > args.seq_len:
        raise ValueError(f"--ranks is {ranks}, more than the {args.seq_len} tokens of --seq-len")
    if args.strategy == "ulysses" and CONFIG.heads % ranks:
        raise ValueError(
            f"--ranks is {ranks}; under ulysses it must divide the model's {CONFIG.heads} heads"
        )
    path = None if args.document is None else str(Path(args.document).resolve())
    return Plan(ranks, args.seq_len, args.steps, args.strategy, args.layout, path)


def _default_ranks() -> int:
    found = torch.accelerator.current_accelerator(check_available=True)
    return 4 if found is None else torch.accelerator.device_count()


def _misses(result: Measured) -> list[str]:
    """The numbers that are not within their bounds."""
    misses = [
        f"{name} {error:.1e}"
        for name, error in result.errors.items()
        if not error <= (_OUT_BOUND if name == "out" else _GRAD_BOUND)
    ]
    if not result.loss_error <= _LOSS_BOUND:
        misses.append(f"loss {result.loss_error:.1e}")
    if result.formula is not None and set(result.sent) != {result.formula}:
        misses.append(f"bytes {result.sent} instead of {result.formula}")
    return misses


def _print_table(results: list[Measured], plan: Plan, device: str) -> None:
    print(
        f"\n{plan.seq_len} tokens on {plan.ranks} ranks ({device}), {plan.layout}, float32; "
        "relative L2 errors against float64 on one process"
    )
    head = ("strategy", "out", "dq", "dk", "dv", "loss", "MiB sent", "by formula", "saved", "time")
    bounds = [_OUT_BOUND, *[_GRAD_BOUND] * 3, _LOSS_BOUND]
    rows = [head, ("bound", *(f"{bound:.0e}" for bound in bounds), "= formula")]
    for result in results:
        errors = [f"{error:.1e}" for error in result.errors.values()]
        formula = "-" if result.formula is None else f"{result.formula / 2**20:.3f}"
        rows.append(
            (
                result.strategy,
                *errors,
                f"{result.loss_error:.1e}",
                f"{max(result.sent) / 2**20:.3f}",
                formula,
                f"{max(result.saved) / result.saved_alone:.3f}",
                f"{result.seconds / result.seconds_alone:.2f}",
            )
        )
    for row in rows:
        cells = [f"{cell:>11}" if i > 4 else f"{cell:>9}" for i, cell in enumerate(row[1:])]
        print(f"{row[0]:15}{''.join(cells)}")
    if CONFIG.heads % plan.ranks:
        print(f"(ulysses is left out: {plan.ranks} ranks cannot share {CONFIG.heads} heads)")
    print("(hybrid wants ranks in two dimensions: `cpref verify` compares it)")
    alone = "one rank on the same CPU cores" if device == "cpu" else "one rank on one device"
    saved = f"of one rank's {results[0].saved_alone / 2**20:.1f} MiB"
    print(
        f"loss        largest difference from one rank's in the first {JUDGED_STEPS} steps; later, "
        "roundings grow\n"
        "MiB sent    by one attention, forward and backward: by the rank that sends most\n"
        f"saved       activations of the rank that saves most, as a part {saved}\n"
        f"time        of a training step, as a part of that of {alone};\n"
        "            whatever else the machine does disturbs it"
    )


def _sentence(results: list[Measured], plan: Plan, verdict: dict[str, list[str]]) -> str:
    wrong = [f"{name}: {', '.join(misses)}" for name, misses in verdict.items() if misses]
    if wrong:
        return f"NOT shown: out of bounds are {'; '.join(wrong)}."
    chosen = results[0]
    worst = max(result.loss_error for result in results)
    judged = min(plan.steps, JUDGED_STEPS)
    who = f"{plan.ranks} ranks train" if plan.ranks > 1 else "1 rank trains"
    part = max(chosen.saved) / chosen.saved_alone
    return (
        f"Shown: {who} on {plan.seq_len:,} tokens as one rank does (the losses of the first "
        f"{judged} steps differ by {worst:.0e} at most), while each saves {part:.0%} of its "
        "activations."
    )
