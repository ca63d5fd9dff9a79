"""Why a plan is what it is, in sentences with their numbers."""

from .division import Division, memory
from .hardware import PER_NODE
from .plan import SAME, DoesNotFit, Option, Plan
from .step import Time, attention_of

NAMES = {
    "products": "products of matrices",
    "attention": "attention",
    "recompute": "forward again",
    "context": "waiting for CP",
    "tensor": "waiting for TP",
    "pipeline": "waiting for PP",
    "data": "waiting for DP",
}


def verdict(plan: Plan) -> str:
    """The plan in a sentence."""
    way = plan.best.way
    if way.cp == 1:
        return "Do not use context parallelism for this job."
    return f"Use context parallelism: CP = {way.cp}, strategy {named(way)}."


def named(way: Division) -> str:
    """The strategy with its rows."""
    if way.cp == 1:
        return "none"
    return f"hybrid in rows of {way.row}" if way.strategy == "hybrid" else way.strategy


def degrees(way: Division) -> str:
    words = f"CP {way.cp} · TP {way.tp} · PP {way.pp} · DP {way.dp}"
    return words if way.cp == 1 else f"{words}, {named(way)}"


def reasons(plan: Plan) -> list[str]:
    """Why: what would be without CP, what the degrees are for, what the strategy waits for."""
    return [*_about_cp(plan), *_about_memory(plan), *_about_waits(plan), *_about_ties(plan)]


def runner_up(plan: Plan) -> str:
    """The next best, and by how much it is slower."""
    if plan.runner_up is None:
        return "Nothing else fits."
    return f"{degrees(plan.runner_up.way)}: {_slower(plan.runner_up, plan.best)}."


def does_not_fit(error: DoesNotFit) -> list[str]:
    """Which limit breaks and by how much."""
    request, needed = error.request, error.memory.total
    part, size = max(vars(error.memory).items(), key=lambda item: item[1])
    lines = [
        f"No division fits: the memory of the GPU is the limit. {degrees(error.least)}, which "
        f"needs least of all, needs {gb(needed)} on each {request.gpu.name}, and a job may fill "
        f"{gb(request.room)} of its {gb(request.gpu.memory)}.",
        f"That is {gb(error.missing)} too much, {needed / request.room:.1f} times as much as there "
        f"is; most of it, {gb(size)}, is {part}.",
    ]
    if error.enough:
        return [*lines, f"With {error.enough} GPUs there is a division that fits."]
    return [*lines, "More GPUs, up to 64 times as many, would not do either."]


def gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _about_cp(plan: Plan) -> list[str]:
    best, alone, request = plan.best, plan.by_cp.get(1), plan.request
    if best.way.cp == 1:
        with_cp = [one for cp, one in plan.by_cp.items() if cp > 1]
        if not with_cp:
            return [
                "A sequence is computed whole on each rank: nothing with CP fits, or is possible."
            ]
        other = min(with_cp, key=lambda one: one.time.total)
        return [
            f"Whole sequences fit: {request.batch} of {request.seq_len:,} tokens for "
            f"{request.gpus} GPUs. To divide them adds messages, and makes the pieces smaller.",
            f"The best with CP ({degrees(other.way)}) is {_slower(other, best)}.",
        ]
    if alone is not None:
        return [f"The best without CP ({degrees(alone.way)}) is {_slower(alone, best)}."]
    if plan.without_cp is None:
        return [
            f"Without CP, the {request.gpus} GPUs cannot be used: TP is at most "
            f"{request.model.kv_heads}, PP at most {request.model.layers}, and DP must divide "
            f"{request.batch} sequences."
        ]
    needed = memory(request, plan.without_cp).total
    return [
        f"Without CP nothing fits: the least, {degrees(plan.without_cp)}, needs {gb(needed)} of "
        f"{gb(request.room)}."
    ]


def _about_memory(plan: Plan) -> list[str]:
    way, request, lines = plan.best.way, plan.request, []
    if way.recompute:
        saved = memory(request, _without(way, recompute=False))
        lines.append(
            "Layers are recomputed in backward: their activations alone would be "
            f"{gb(saved.activations)}."
        )
    if way.shard_all:
        whole = memory(request, _without(way, shard_all=False))
        lines.append(
            "Parameters and gradients are sharded over the DP·CP ranks: whole on each they would "
            f"be {gb(whole.parameters + whole.gradients)}."
        )
    if way.pp > 1:
        runs = f", {way.interleave} runs of layers each" if way.interleave > 1 else ""
        lines.append(f"PP divides the layers into {way.pp} stages{runs}, which need no all-gather.")
    if way.tp > 1:
        inside = "within a node" if way.tp <= PER_NODE else "across nodes"
        lines.append(f"TP divides activations and parameters of each layer {inside}.")
    return lines


def _without(way: Division, **changes: bool) -> Division:
    return Division(**{**vars(way), **changes})


def _about_waits(plan: Plan) -> list[str]:
    best, lines = plan.best, []
    if best.way.cp > 1:
        attention = attention_of(plan.request, best.way)
        computing = attention.forward + attention.backward
        waiting = attention.forward_wait + attention.backward_wait
        others = ", ".join(
            f"{name} {one.time.total / best.time.total:.2f}"
            for name, one in plan.by_strategy.items()
            if name != best.way.strategy
        )
        lines.append(
            f"An attention computes {1e3 * computing:.1f} ms and waits {1e3 * waiting:.1f} ms; a "
            f"rank sends {attention.sent.bytes / 1e6:,.0f} MB for it, forward and backward."
        )
        if others:
            lines.append(f"A step with CP {best.way.cp} and another strategy, relative: {others}.")
    return lines


def _about_ties(plan: Plan) -> list[str]:
    if plan.runner_up is None or plan.runner_up.time.total >= plan.best.time.total:
        return []
    return [f"Of what is within {SAME:.0%} of the fastest, this asks for the simplest set-up."]


def _slower(one: Option, best: Option) -> str:
    """How one compares with the best, and the parts of it that are longer."""
    ratio = one.time.total / best.time.total
    if abs(ratio - 1) < SAME:
        return "as fast, to what such a model can tell"
    part, extra = _most_added(one.time, best.time)
    words = f"{ratio:.1f} times as long" if ratio >= 2 else f"{ratio - 1:.0%} slower"
    return f"{words}, most of it {NAMES[part]} (+{extra:.1f} s)"


def _most_added(time: Time, best: Time) -> tuple[str, float]:
    more = {name: seconds - getattr(best, name) for name, seconds in vars(time).items()}
    part = max(more, key=lambda name: more[name])
    return part, more[part]
