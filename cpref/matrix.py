"""Which cases? Every option of attention against every other.

The product of all options has tens of thousands of cases. Faults hardly ever need more than two
options to show (this strategy under that mask), so `covering` picks a few dozen cases in which
every pair of values occurs; `product` gives them all.

Source: Cohen et al. 1997, The AETG System (IEEE TSE 23-7), for the greedy choice.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .attention import ACCUMULATE, STRATEGIES
from .exactness import Case
from .layout import LAYOUTS
from .mask import Causal, Documents, Full, Mask, MaskMod, SlidingWindow

Choice = dict[str, object]

_HALF = (torch.bfloat16, torch.float16)
_ROWS = 2048  # query rows of a half precision case: enough to compare two errors of rounding


def every_third(q_index: Tensor, kv_index: Tensor) -> Tensor:
    """A mask_mod without structure: a third of the keys is hidden, a fourth of the rows blind."""
    return (kv_index % 3 != 0) & (q_index % 4 != 1)


def document_lengths(seq_len: int) -> tuple[int, ...]:
    """Documents that add up to seq_len: short ones, a single token, and one of several shards."""
    lengths: list[int] = []
    for length in itertools.cycle((5, 3, 9, 1, 120)):
        if sum(lengths) == seq_len:
            return tuple(lengths)
        lengths.append(min(length, seq_len - sum(lengths)))


# For a global length of q: the mask, and the global length of k, v where it is another.
MASKS: dict[str, Callable[[int], tuple[Mask, int | None]]] = {
    "full": lambda seq_len: (Full(), None),
    "causal": lambda seq_len: (Causal(), None),
    "window": lambda seq_len: (SlidingWindow(max(1, seq_len // 5)), None),
    "documents": lambda seq_len: (Documents(document_lengths(seq_len)), None),
    "full documents": lambda seq_len: (Documents(document_lengths(seq_len), Full()), None),
    "mask_mod": lambda seq_len: (MaskMod(every_third), None),
    "full, more keys": lambda seq_len: (Full(), 2 * seq_len + 1),
    "mask_mod, fewer keys": lambda seq_len: (MaskMod(every_third), seq_len // 2 + 3),
}

OPTIONS: dict[str, Sequence] = {
    "strategy": tuple(STRATEGIES),
    "layout": LAYOUTS,
    "mask": tuple(MASKS),
    "dtype": (torch.float32, torch.bfloat16, torch.float64, torch.float16),
    "heads_per_kv_head": (1, 2, 4),
    "seq_len": (64, 7, 257, 1),
    "v_head_dim": (None, 24),
    "accumulate": ACCUMULATE,
    "overlap": (True, False),
}


def case(choice: Mapping[str, object], ranks: int) -> Case:
    """The case of a choice from `OPTIONS`, with as few heads as its strategy can share."""
    fixed = {name: choice[name] for name in choice if name not in ("mask", "heads_per_kv_head")}
    mask, kv_seq_len = MASKS[choice["mask"]](choice["seq_len"])
    neighbours = next((n for n in range(2, ranks + 1) if ranks % n == 0), 1)
    sharing = {"ulysses": ranks, "hybrid": neighbours}.get(choice["strategy"], 2)
    heads = math.lcm(sharing, choice["heads_per_kv_head"])
    half = choice["dtype"] in _HALF
    return Case(
        **fixed,
        mask=mask,
        kv_seq_len=kv_seq_len,
        heads=heads,
        kv_heads=heads // choice["heads_per_kv_head"],
        batch=max(2, math.ceil(_ROWS / heads / choice["seq_len"]) if half else 0),
        neighbours=neighbours,
    )


def product(options: Mapping[str, Sequence]) -> Iterator[Choice]:
    """Every choice of one value for each option."""
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


def everything(**fixed: object) -> Iterator[Choice]:
    """The product of `OPTIONS`, or of those that are not fixed, without choices that are twins.

    overlap changes no bit of the result, and nor does accumulate unless the inputs are of half
    precision.
    """
    options = {**OPTIONS, "overlap": (True,), **{name: (value,) for name, value in fixed.items()}}
    for choice in product(options):
        if choice["accumulate"] == "fp32" or choice["dtype"] in _HALF:
            yield choice


def parts(choice: Choice, groups: Sequence[Sequence[str]]) -> set[tuple]:
    """The values that occur together in a choice, for each group of options."""
    return {tuple((name, choice[name]) for name in group) for group in groups}


def groups_of(options: Mapping[str, Sequence], *together: Sequence[str]) -> list[Sequence[str]]:
    """The options whose values are to meet: those of each `together`, and every two."""
    return [*together, *itertools.combinations(options, 2)]


def covering(options: Mapping[str, Sequence], *together: Sequence[str]) -> list[Choice]:
    """A few choices in which every pair of values of two options occurs; always the same ones.

    together: options of which not only every pair but every combination is to occur, in their order
    in `options`. Each choice starts from values that have not met yet, and takes for every other
    option the value by which most such values meet, of several the one used least so far.
    """
    groups = groups_of(options, *together)
    missing = {
        part: None  # why: a dict, since the order of a set may differ between runs
        for group in groups
        for choice in product({name: options[name] for name in group})
        for part in parts(choice, [group])
    }
    chosen: list[Choice] = []
    while missing:
        choice: Choice = dict(next(iter(missing)))
        for name in options:
            if name not in choice:
                met = [g for g in groups if name in g and {*g} <= {*choice, name}]
                choice[name] = max(
                    options[name],
                    key=lambda value: (
                        len(parts({**choice, name: value}, met) & missing.keys()),
                        -sum(value == earlier[name] for earlier in chosen),
                    ),
                )
        for part in parts(choice, groups):
            missing.pop(part, None)
        chosen.append({name: choice[name] for name in options})
    return chosen
