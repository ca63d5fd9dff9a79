"""What the tests of exercises say: in words what is wrong, not only that something is.

    expect.same("dk", dk, exact, mistakes={"the mean over the ranks": exact / 4})
    expect.equal("the length", length, 5)
    expect.on_ranks(check, 2, 3)        # check(group), on 2 ranks and on 3

In a notebook `on_ranks` runs on local ranks, in a moment. The grader runs the same check on local
ranks first, which see a deadlock, and then on real ones.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..comm import Group
from ..local import LocalError, run_local

Check = Callable[[Group], None]
_CLOSE = 1e-4  # relative: the answer is this one, and not another that is near it
_real_ranks: Callable[[Check, int], None] | None = None  # set in the grader's processes alone


def same(
    name: str,
    got: object,
    exact: Tensor,
    *,
    tolerance: float = 1e-5,
    mistakes: Mapping[str, Tensor] | None = None,
) -> None:
    """AssertionError, in words, unless `got` is `exact` up to a relative L2 error of `tolerance`.

    exact: of any shape and dtype; -inf must stand in the same places. mistakes: what to say when
    got is a known wrong tensor.
    """
    if type(got) not in (Tensor, torch.nn.Parameter):  # why: a subclass says of itself what it is
        raise AssertionError(
            f"{name} is {_kind(got)}; it must be a tensor of shape {tuple(exact.shape)}"
        )
    if got.shape != exact.shape:
        swapped = sorted(got.shape) == sorted(exact.shape)
        raise AssertionError(
            f"{name} has shape {tuple(got.shape)}; it must be {tuple(exact.shape)}"
            + (": are two dimensions exchanged?" if swapped else "")
        )
    got, exact = got.detach().cpu().double(), exact.detach().cpu().double()
    if error(got, exact) <= tolerance:
        return
    for words, wrong in (mistakes or {}).items():
        if wrong.shape == exact.shape and error(got, wrong.detach().cpu().double()) < _CLOSE:
            raise AssertionError(f"{name} is {words}")
    raise AssertionError(f"{name} {_described(got, exact)}")


def equal(name: str, got: object, exact: object, mistakes: Mapping[str, object] | None = None):
    """AssertionError, in words, unless the two are equal; tensors and arrays as lists."""
    got, exact = _plain(got), _plain(exact)
    if _alike(got, exact):
        return
    for words, wrong in (mistakes or {}).items():
        if _alike(got, _plain(wrong)):
            raise AssertionError(f"{name} is {words}")
    raise AssertionError(f"{name} is {_short(got)}; it must be {_short(exact)}")


def on_ranks(check: Check, *sizes: int) -> None:
    """Run check(group) on each number of ranks; in the grader the last one on real ranks, too.

    Raises what the first failing rank raised, an AssertionError with the rank before its words; an
    AssertionError that says who waits for whom where the ranks cannot go on.
    """
    if _real_ranks is not None and getattr(_real_ranks, "is_rank", False):
        _real_ranks(check, sizes[-1])
        return
    for size in sizes:
        _on_local_ranks(check, size)
    if _real_ranks is not None:
        _real_ranks(check, sizes[-1])


def error(x: Tensor, exact: Tensor) -> float:
    """|x - exact| / |exact| of float64 tensors; inf where NaN, or infinities, are out of place."""
    infinite = exact.isinf()
    if (
        x.isnan().any()
        or not torch.equal(x[infinite], exact[infinite])
        or x[~infinite].isinf().any()
    ):
        return torch.inf
    distance, size = (x - exact)[~infinite].norm().item(), exact[~infinite].norm().item()
    return distance / size if size else (0.0 if distance == 0 else torch.inf)


def with_rank(check: Check, group: Group) -> None:
    """check(group), with the rank before the words of an AssertionError."""
    try:
        check(group)
    except AssertionError as failed:
        words = str(failed) or "an assert without words fails"
        raise AssertionError(f"rank {group.rank} of {group.size}: {words}") from failed


def _on_local_ranks(check: Check, size: int) -> None:
    try:
        run_local(lambda group: with_rank(check, group), size)
    except LocalError as stuck:
        raise AssertionError(in_words(str(stuck))) from None


def in_words(stuck: str) -> str:
    """What a LocalError says, as who waits for a message that does not come."""
    waits = re.findall(r"rank (\d+) waits in (.+?) for rank (\d+)(, which has ended)?", stuck)
    if not waits:
        return stuck
    said = []
    for rank, label, source, ended in waits:
        why = f"rank {source} has ended" if ended else f"rank {source} waits, too"
        if label == "send":
            said.append(f"rank {rank} sends to rank {source}, which never receives it ({why})")
        else:
            said.append(
                f"rank {rank} waits for a message that rank {source} never sends ({label}; {why})"
            )
    return f"deadlock on {len(waits)} ranks: {'; '.join(said[:4])}"


def _described(got: Tensor, exact: Tensor) -> str:
    if got.isnan().any():
        return f"has NaN in {int(got.isnan().sum())} of {got.numel()} places"
    if not got.any():
        return "is all zeros"
    if not torch.equal(got.isinf(), exact.isinf()):
        is_so, should = int(got.isinf().sum()), int(exact.isinf().sum())
        return f"is infinite in {is_so} places; it must be so in {should}"
    finite = ~exact.isinf()
    x, y = got[finite], exact[finite]
    factor = ((x @ y) / (y @ y)).item() if y.any() else 0
    if factor and error(x, factor * y) < _CLOSE:
        hint = ": is something added twice?" if abs(factor - 2) < _CLOSE else ""
        return f"is off by a factor of {factor:.4g}{hint}"
    off = f"has a relative error of {error(got, exact):.2g} against float64"
    wrong = (got - exact).abs().nan_to_num() > _CLOSE * y.abs().max()
    if exact.dim() >= 2:
        rows = wrong.transpose(-2, 0).flatten(1).any(1)
        if 0 < rows.sum() < len(rows):
            which = rows.nonzero().flatten().tolist()
            return f"{off}; wrong in rows {_short(which)} of {len(rows)}, right in the others"
    return off


def _alike(got: object, exact: object) -> bool:
    """Equal, and of plain types: what compares itself as it likes is equal to nothing."""
    if isinstance(exact, list):
        same_length = type(got) is list and len(got) == len(exact)
        return same_length and all(map(_alike, got, exact))
    if isinstance(exact, dict):
        same_keys = type(got) is dict and set(map(str, got)) == set(map(str, exact))
        return same_keys and all(
            k in got and _alike(_plain(got[k]), _plain(exact[k])) for k in exact
        )
    if isinstance(exact, int | float) and not isinstance(exact, bool):
        return type(got) in (int, float) and got == exact
    return type(got) is type(exact) and got == exact


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _kind(value: object) -> str:
    return "None: is there a return?" if value is None else type(value).__name__


def _short(value: object) -> str:
    if value is None:
        return "None (is there a return?)"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
