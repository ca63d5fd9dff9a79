"""`cpref plan`: how to divide a training job among GPUs, and why."""

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

from .files import writable_folder
from .measure.choices import STRATEGIES, Fixed
from .measure.detector import DETECTORS, data_parallel
from .measure.hardware import ACHIEVED, GPUS, LINKS, gpu_named, network_named
from .measure.plan import BATCH_TOKENS, DoesNotFit, Option, Plan, plan, request
from .measure.published import PUBLISHED, Compared, compared
from .measure.reasons import (
    NAMES,
    degrees,
    does_not_fit,
    gb,
    reasons,
    runner_up,
    verdict,
)
from .measure.shapes import MODELS, ModelShape, model_shape
from .show import plan as figures

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MODELLED = (
    "Modelled from datasheets, not measured: "
    f"{ACHIEVED.matmul:.0%} of the peak FLOP/s in products, {ACHIEVED.attention_forward:.0%} and "
    f"{ACHIEVED.attention_backward:.0%} in attention forward\nand backward, {ACHIEVED.link:.0%} of "
    f"a link's bandwidth, {ACHIEVED.memory:.0%} of the memory. Rather too fast than too slow."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=", ".join((*MODELS, *DETECTORS)))
    parser.add_argument("--seq-len", help="tokens of a sequence: 8192, 128K, 1M (K is 1024)")
    parser.add_argument("--gpus", type=int, help="how many there are")
    parser.add_argument("--gpu", default="h100-80gb", help=", ".join(GPUS))
    parser.add_argument("--link", default="nvlink+ib", help=", ".join(LINKS))
    parser.add_argument(
        "--global-batch-tokens",
        metavar="TOKENS",
        help=f"of a step; default: {BATCH_TOKENS // 2**20}M, or one sequence if that is longer",
    )
    parser.add_argument("--fp8", action="store_true", help="products of matrices in float8")
    for name in ("cp", "tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, help=f"fix the {name.upper()} degree")
    parser.add_argument("--strategy", help=f"fix it: {', '.join(STRATEGIES)}")
    parser.add_argument("--published", action="store_true", help="compare with published set-ups")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the words")
    parser.add_argument("--figures", metavar="DIR", help="draw memory and time into DIR")


def run(args: argparse.Namespace) -> int:
    """0 if there is a plan, 1 if nothing fits. Raises ValueError for bad input."""
    if args.figures:
        writable_folder("--figures", args.figures)
    if args.published:
        return _run_published(args)
    for name in ("model", "gpus"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing; it must be given, or --published instead")
    if args.model.lower() in DETECTORS:
        return _run_detector(args)
    wanted = request(
        _model(args.model),
        _tokens("--seq-len", args.seq_len),
        args.gpus,
        args.gpu,
        args.link,
        args.global_batch_tokens and _tokens("--global-batch-tokens", args.global_batch_tokens),
        fp8=args.fp8,
    )
    try:
        found = plan(wanted, Fixed(args.cp, args.tp, args.pp, args.dp, args.strategy))
    except DoesNotFit as error:
        said = does_not_fit(error)
        report = {
            "fits": False,
            "why": said,
            "missing_bytes": error.missing,
            "enough": error.enough,
        }
        print(json.dumps(report, indent=2) if args.json else "\n".join([*said, "", MODELLED]))
        return 1
    if args.figures:
        figures.memory_by_part(found).save(Path(args.figures) / "plan_memory.png")
        figures.time_by_degree(found).save(Path(args.figures) / "plan_time.png")
    if args.json:
        print(json.dumps(_report(found), indent=2))
    else:
        print("\n".join(_words(found)))
    return 0


def _model(name: str) -> ModelShape:
    if name.lower() not in MODELS:
        known = ", ".join((*MODELS, *DETECTORS))
        raise ValueError(f"model is {name!r}; it must be one of {known}")
    return model_shape(name)


def _tokens(option: str, text: str | None) -> int:
    """A whole number of tokens, with K, M or G for powers of 1024."""
    match = re.fullmatch(r"(\d+)([KMG]?)", (text or "").strip().upper())
    if match is None:
        raise ValueError(
            f"{option} is {text!r}; it must be a whole number, such as 8192, 128K or 1M"
        )
    return int(match[1]) * _UNITS[match[2]]


def _words(found: Plan) -> list[str]:
    asked, best = found.request, found.best
    way = best.way
    yes = {True: "yes", False: "no"}
    lines = [
        f"{asked.model.name}, {asked.batch} x {asked.seq_len:,} tokens a step, {asked.gpus} "
        f"{asked.gpu.name}, {asked.network.name}{', fp8' if asked.fp8 else ''}",
        "",
        verdict(found),
        "",
        f"  degrees       {degrees(way)}",
        f"  micro-batch   {way.micro} x {way.tokens(asked) // way.micro:,} tokens on each rank, "
        f"{way.micro_batches(asked)} a step",
        f"  recomputed    {yes[way.recompute]};   parameters and gradients sharded over DP·CP: "
        f"{yes[way.shard_all]}",
        f"  memory        {gb(best.memory.total)} of {gb(asked.room)} that a job may fill",
        *(f"    {name:22}{size / 1e9:8.2f} GB" for name, size in vars(best.memory).items()),
        f"  time          {best.time.total:.2f} s a step, {found.tflops(best):.0f} TFLOP/s a GPU",
        *(f"    {NAMES[name]:22}{s:8.2f} s" for name, s in vars(best.time).items()),
        "",
        "Why:",
        *(f"  - {reason}" for reason in reasons(found)),
        f"Next best: {runner_up(found)}",
        "",
        MODELLED,
    ]
    return lines


def _report(found: Plan) -> dict[str, object]:
    return {
        "modelled": True,
        "fits": True,
        "verdict": verdict(found),
        "use_cp": found.best.way.cp > 1,
        "best": _option(found, found.best),
        "runner_up": found.runner_up and _option(found, found.runner_up),
        "by_cp": {cp: _option(found, one) for cp, one in found.by_cp.items()},
        "by_strategy": {name: _option(found, one) for name, one in found.by_strategy.items()},
        "room_bytes": found.request.room,
        "why": reasons(found),
        "assumed": asdict(found.request.achieved),
    }


def _option(found: Plan, one: Option) -> dict[str, object]:
    return {
        "division": asdict(one.way) | ({} if one.way.cp > 1 else {"strategy": None}),
        "memory_bytes": vars(one.memory) | {"total": one.memory.total},
        "seconds": vars(one.time) | {"total": one.time.total},
        "tflops": found.tflops(one),
    }


def _run_detector(args: argparse.Namespace) -> int:
    """Data parallelism, whatever the number of GPUs."""
    if args.gpus < 1:
        raise ValueError(f"gpus is {args.gpus}; it must be at least 1")
    detector, gpu = DETECTORS[args.model.lower()], gpu_named(args.gpu)
    way = data_parallel(detector, args.gpus, gpu, network_named(args.link, gpu))
    if args.json:
        report = {"modelled": True, "use_cp": False, "dp": way.gpus, **asdict(way)}
        print(json.dumps(report | {"images": way.images}, indent=2))
        return 0
    print(
        f"{detector.name}, images of {detector.side} x {detector.side} pixels, {args.gpus} "
        f"{gpu.name}, {args.link}\n\n"
        "Do not use context parallelism for this job: data parallelism, "
        f"DP = {args.gpus}, each GPU on whole images.\n\nWhy:\n"
        f"  - There is no long sequence: {detector.positions} positions attend to each other, in "
        "one block; the rest is convolutions.\n"
        f"  - Parameters, gradients and optimizer are {detector.states / 1e6:.0f} MB, "
        f"{detector.states / gpu.memory:.2%} of a GPU. Activations grow with the images on a GPU, "
        "and are not modelled.\n"
        f"  - An image takes {1e3 * way.image:.2f} ms at least, adding up the gradients "
        f"{1e3 * way.gradients:.2f} ms: it can hide from {way.images} images a GPU on.\n\n"
        f"{MODELLED}"
    )
    return 0


def _run_published(args: argparse.Namespace) -> int:
    rows = [compared(row) for row in PUBLISHED]
    if args.json:
        print(json.dumps([_row_report(one) for one in rows], indent=2))
        return 0
    print("\n".join(_table(rows)))
    return 0


def _row_report(one: Compared) -> dict[str, object]:
    return {
        "published": asdict(one.row),
        "agrees_on_cp": one.agrees,
        "plan": _option(one.plan, one.plan.best),
        "theirs": one.theirs and _option(one.plan, one.theirs),
        "speedup": one.speedup,
        "published_speedup": one.published_speedup,
        "why": one.why,
    }


def _fits(one: Compared) -> str:
    if one.theirs is None:
        return "no"
    return "again" if one.theirs.way.recompute else "yes"


def _table(rows: list[Compared]) -> list[str]:
    lines = [
        "Degrees: TP.CP.PP.DP. fits: into the memory, or only if layers are computed again. "
        "TFLOP/s: of\neach GPU. gain: of the published set-up over the best without CP. CP: "
        "whether both use it.\n",
        f"{'':28}{'published':>21}{'in the model':>14}  {'planned':30}{'gain':>17}",
        f"{'model':11}{'tokens':>9}{'GPUs':>8}{'degrees':>13}{'TFLOP/s':>8}{'fits':>7}{'TFLOP/s':>8}"
        f"  {'degrees':13}{'strategy':11}{'TF':>5} {'published':>10}{'model':>7}  CP",
    ]
    for one in rows:
        row, best, full = one.row, one.plan.best, one.row.full
        theirs = f"{row.tp}.{row.cp}.{row.pp}.{row.dp}"
        ours = f"{best.way.tp}.{best.way.cp}.{best.way.pp}.{best.way.dp}"
        modelled = one.theirs or one.unbounded
        gains = [f"{x:.2f}" if x else "-" for x in (one.published_speedup, one.speedup)]
        lines.append(
            f"{row.model:11}{row.seq_len:9,}{row.gpus:8,}{theirs:>13}{row.tflops:8.0f}"
            f"{_fits(one):>7}{one.plan.tflops(modelled, full=full):8.0f}  {ours:13}"
            f"{best.way.strategy if best.way.cp > 1 else '-':11}"
            f"{one.plan.tflops(best, full=full):5.0f} {gains[0]:>10}{gains[1]:>7}  "
            f"{'agrees' if one.agrees else 'differs'}"
        )
    whys = [f"  {one.row.model} at {one.row.seq_len:,}: {one.why}" for one in rows]
    return [*lines, "", "Where it differs, and the likely reason:", *whys, "", MODELLED]
