"""One softmax over keys in pieces: what each weighs, which joins are right, what rounding costs."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Rectangle

from .picture import BLACK, BLUE, GREEN, ORANGE, PALETTE, PURPLE, SKY, VERMILLION, Picture, blank

_KEYS = 16
_SCORES = np.random.default_rng(5).normal(0, 1.2, _KEYS).round(1)


def weights(first: int = 4, second: int = 10, raised: float = 0.0) -> Picture:
    """One query and 16 keys with made-up scores, cut into three pieces.

    first, second: where the cuts are, from 0 to 16, in any order. raised: what is added to the
    scores of the first piece.
    """
    first, second = sorted((first, second))
    scores = _SCORES.copy()
    scores[:first] += raised
    return pieces(scores, (first, second))


def pieces(scores: Sequence[float], cuts: Sequence[int]) -> Picture:
    """The scores of one query, the softmax of each piece by itself, and the weight of each piece.

    scores: one for each key. cuts: where each piece but the first begins, increasing.
    """
    scores = np.asarray(scores, dtype=float)
    parts = np.split(np.arange(len(scores)), cuts)
    lse = np.array([_lse(scores[part]) for part in parts])
    alone = np.concatenate([np.exp(scores[p] - x) for p, x in zip(parts, lse, strict=True)])
    share = np.exp(lse - _lse(scores))
    figure, (left, middle, right) = blank(7.2, 3.0, ncols=3, width_ratios=(5, 5, 3))
    for number, part in enumerate(parts):
        color = PALETTE[number % len(PALETTE)]
        left.bar(part, scores[part], color=color)
        middle.bar(part, alone[part], color=color)
        right.bar(number, share[number], color=color)
        right.text(number, share[number] + 0.02, f"{share[number]:.0%}", ha="center", fontsize=8)
    left.axhline(0, color=BLACK, linewidth=0.6)
    for axes in (left, middle):
        axes.set_xlabel("key")
        axes.xaxis.get_major_locator().set_params(integer=True)
    right.set_xticks(range(len(parts)))
    right.set_xlabel("piece")
    right.set_ylim(0, 1.12)
    left.set_title("score", fontsize=9)
    middle.set_title("softmax of each piece alone", fontsize=9)
    right.set_title("weight of the piece", fontsize=9)
    heavy = int(share.argmax())
    finding = (
        f"Piece {heavy} has {len(parts[heavy])} of {len(scores)} keys, and {share[heavy]:.0%} of "
        "the attention"
    )
    figure.suptitle(finding, fontsize=11)
    said = "; ".join(
        f"piece {number}: {len(part)} keys, lse {lse[number]:.2f}, weight {share[number]:.2f}"
        for number, part in enumerate(parts)
    )
    alt = f"One query, {len(scores)} keys in {len(parts)} pieces. {said}. {finding}."
    return Picture(figure, alt)


def survival(results: Mapping[str, Mapping[str, str]]) -> Picture:
    """Which way to join gives the right result in which case: a table of measured outcomes.

    results: form -> case -> outcome, "right" or what came instead, in a word.
    """
    forms, cases = list(results), list(next(iter(results.values())))
    figure, axes = blank(7.2, 1.3 + 0.38 * len(forms))
    for (row, form), (column, case) in ((a, b) for a in enumerate(forms) for b in enumerate(cases)):
        outcome = results[form][case]
        color = SKY if outcome == "right" else ORANGE
        axes.add_patch(Rectangle((column - 0.47, row - 0.44), 0.94, 0.88, color=color))
        axes.text(column, row, outcome, ha="center", va="center", fontsize=9)
    axes.set(xlim=(-0.5, len(cases) - 0.5), ylim=(len(forms) - 0.5, -0.5))
    axes.set_xticks(range(len(cases)), [case.replace(", ", ",\n") for case in cases], fontsize=8)
    axes.set_yticks(range(len(forms)), forms, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    good = [form for form in forms if set(results[form].values()) == {"right"}]
    finding = (
        f"Only {' and '.join(good)} is right in all cases"
        if len(good) == 1
        else f"{len(good)} of {len(forms)} ways to join are right in all cases"
    )
    figure.suptitle(finding, fontsize=11)
    said = "; ".join(
        f"{form}: {', '.join(f'{case} {results[form][case]}' for case in cases)}" for form in forms
    )
    return Picture(figure, f"Measured outcomes of ways to join partials. {said}. {finding}.")


_STYLE = ((BLUE, "o"), (ORANGE, "s"), (PURPLE, "D"), (VERMILLION, "^"), (GREEN, "v"))


def price(errors: Mapping[str, Mapping[int, float]]) -> Picture:
    """Errors of attention in bfloat16 against the number of pieces, for each thing rounded.

    errors: what is rounded -> number of pieces -> relative L2 error. The first is the least.
    """
    figure, axes = blank(7.2, 3.4)
    for (name, by_pieces), (color, marker) in zip(errors.items(), _STYLE, strict=False):
        axes.plot(list(by_pieces), list(by_pieces.values()), color=color, marker=marker, label=name)
    counts = list(next(iter(errors.values())))
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("pieces that the keys come in")
    axes.set_ylabel("relative L2 error against float64")
    axes.legend(fontsize=8)
    last = counts[-1]
    at_last = {name: by_pieces[last] for name, by_pieces in errors.items()}
    least, (worst, most) = next(iter(at_last.values())), max(at_last.items(), key=lambda x: x[1])
    finding = f"With {last} pieces, {worst} in bfloat16: {most / least:.1f} times the error"
    axes.set_title(finding, fontsize=11)
    said = "; ".join(
        f"{name} {', '.join(f'{n}: {error:.1e}' for n, error in by_pieces.items())}"
        for name, by_pieces in errors.items()
    )
    return Picture(figure, f"Measured errors by number of pieces: {said}. {finding}.")


def _lse(scores: np.ndarray) -> float:
    """-inf for no score at all."""
    return float(np.logaddexp.reduce(scores)) if len(scores) else -np.inf
