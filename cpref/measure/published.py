"""What the planner proposes for jobs whose division was published, beside what was published.

    llama3   Llama Team 2024, The Llama 3 Herd of Models (arXiv 2407.21783), table 4: the 405B model
             at 8,192 and at 131,072 tokens, about 16 million tokens a step, H100, bfloat16. The
             last row is the long-context stage.
    nemo     NVIDIA, NeMo Framework, Long Sequence Performance, the table of LLAMA2-7B in float8 on
             DGX H100 (docs/source/performance/performance_long_sequence.md of NVIDIA/NeMo, with
             the batch sizes of its 25.04 revision): with CP, and the fastest without.

NeMo's FLOP/s count all pairs of the attention, although half of them are masked
(nemo/utils/flops_formulas.py, llama2: 12 * enc_seq_len / hs); so they are compared in that count.
How Llama 3 counts is not said; there they are compared in the count of causal pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .choices import Fixed, divisions, variants
from .division import Division, Request
from .plan import Option, Plan, option, plan, request
from .shapes import model_shape


@dataclass(frozen=True)
class Published:
    """A row of a table. tflops: each GPU's, in 10^12 FLOP/s; without_cp: the best without CP."""

    source: str
    model: str
    seq_len: int
    gpus: int
    batch: int
    tp: int
    cp: int
    pp: int
    dp: int
    tflops: float
    without_cp: float | None = None

    @property
    def request(self) -> Request:
        model = model_shape(self.model)
        tokens = self.batch * self.seq_len
        return request(model, self.seq_len, self.gpus, batch_tokens=tokens, fp8=self.fp8)

    @property
    def fp8(self) -> bool:
        return self.source == "nemo"

    @property
    def full(self) -> bool:
        """Whether the FLOP/s count masked pairs, too."""
        return self.source == "nemo"


PUBLISHED = (
    Published("llama3", "405b", 8192, 8192, 2048, 8, 1, 16, 64, 430),
    Published("llama3", "405b", 8192, 16384, 2048, 8, 1, 16, 128, 400),
    Published("llama3", "405b", 131_072, 16384, 128, 8, 16, 16, 8, 380),
    *(
        Published("nemo", "llama2-7b", length * 1024, length, 4096 // length, *degrees)
        for length, *degrees in (
            (4, 1, 1, 1, 4, 768, 768),
            (8, 1, 1, 2, 4, 730, 730),
            (16, 2, 1, 1, 8, 660, 660),
            (32, 2, 2, 1, 8, 610, 595),
            (64, 4, 2, 1, 8, 574, 534),
            (128, 4, 4, 1, 8, 555, 424),
            (256, 4, 8, 1, 8, 549, 392),
            (512, 8, 16, 1, 4, 549, 104),
            (1024, 8, 32, 1, 4, 536, 26.5),
        )
    ),
)


@dataclass(frozen=True)
class Compared:
    """A published row and its plan. theirs: the published degrees, as the model finds them fastest
    within the memory, None if they do not fit; unbounded: the same if memory were no limit."""

    row: Published
    plan: Plan
    theirs: Option | None
    unbounded: Option

    @property
    def agrees(self) -> bool:
        """Whether both use CP, or neither."""
        return (self.row.cp > 1) == (self.plan.best.way.cp > 1)

    @property
    def speedup(self) -> float | None:
        """Of the published division over the best without CP, modelled, where there is one."""
        alone = self.plan.by_cp.get(1)
        if alone is None or self.theirs is None:
            return None
        return alone.time.total / self.theirs.time.total

    @property
    def published_speedup(self) -> float | None:
        return self.row.tflops / self.row.without_cp if self.row.without_cp else None

    @property
    def why(self) -> str:
        """What differs, with the likely reason."""
        return " ".join(_differences(self)) or "the same degrees."


def _differences(one: Compared) -> Iterator[str]:
    row, best = one.row, one.plan.best
    ratio = one.plan.tflops(one.theirs or one.unbounded, full=row.full) / row.tflops
    if not one.agrees:
        yield (
            f"the plan has CP = {best.way.cp}, the published set-up {row.cp}. In the model a shard "
            "of few tokens computes as fast as a long one, so that dividing a sequence costs "
            "messages alone."
        )
    elif (row.tp, row.cp, row.pp, row.dp) != (best.way.tp, best.way.cp, best.way.pp, best.way.dp):
        theirs = one.theirs.time.total / best.time.total - 1 if one.theirs else float("inf")
        yield f"other degrees; the published ones are {theirs:.0%} slower in the model."
    if one.theirs and one.theirs.way.recompute and not one.unbounded.way.recompute:
        yield (
            f"As published it fits only with recomputation here; without, it would need "
            f"{one.unbounded.memory.total / 1e9:.0f} GB and reach "
            f"{one.plan.tflops(one.unbounded, full=row.full):.0f} TFLOP/s. The likely reason: they "
            "keep less for backward than the model counts."
        )
    if one.speedup and one.published_speedup:
        gain, alone = one.speedup / one.published_speedup, one.plan.by_cp[1].way
        if abs(gain - 1) > 0.1:
            shards = ", parameters and gradients sharded" if alone.shard_all else ""
            yield (
                f"CP gains {one.speedup:.2f} and not {one.published_speedup:.2f}: it depends on "
                f"what is done without it, which was not published; here TP {alone.tp}, PP "
                f"{alone.pp}, DP {alone.dp}{shards}."
            )
    if row.fp8 and abs(ratio - 1) > 0.2:
        yield (
            f"Modelled TFLOP/s are {ratio:.2f} of the published: float8 reaches less of its peak "
            "than assumed."
        )


def compared(row: Published) -> Compared:
    """The plan for the job of a row, and the row's own division in the same model."""
    asked = row.request
    fixed = Fixed(row.cp, row.tp, row.pp, row.dp)
    theirs = _fastest(asked, fixed)
    roomy = replace(asked, achieved=replace(asked.achieved, memory=1e3))
    return Compared(row, plan(asked), theirs, _fastest(roomy, fixed))


def _fastest(asked: Request, fixed: Fixed) -> Option | None:
    ways: list[Division] = [one for way in divisions(asked, fixed) for one in variants(asked, way)]
    options = [option(asked, way) for way in ways]
    return min(options, key=lambda one: one.time.total, default=None)
