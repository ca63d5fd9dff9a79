"""What to say when ranks do not agree: one error, the same on all ranks, naming who and what."""

from collections.abc import Sequence


def disagreement(said: list[list]) -> Exception:
    """The error for what the ranks said before a call.

    said: for each rank [call, terms], where terms is a dictionary, or, from a rank that refuses its
    arguments, [call, name of the exception, message].
    """
    calls = [each[0] for each in said]
    if len(set(calls)) > 1:
        return ValueError(f"ranks call different functions: {_by_rank(calls)}")
    problems = {rank: each for rank, each in enumerate(said) if len(each) == 3}
    if problems:
        rank, (_, kind, message) = next(iter(problems.items()))
        also = "" if len(problems) == 1 else f" (and {len(problems) - 1} more ranks)"
        errors = {"TypeError": TypeError, "IndexError": IndexError}
        return errors.get(kind, ValueError)(f"on rank {rank}{also}: {message}")
    terms = [each[1] for each in said]
    names = [name for name in terms[0] if len({each.get(name) for each in terms}) > 1]
    differences = "; ".join(
        f"{name} is {_by_rank([each.get(name) for each in terms])}" for name in names
    )
    return ValueError(f"{calls[0]}: ranks disagree: {differences}; it must be equal on all ranks")


def _by_rank(values: Sequence[str]) -> str:
    """'float32 on ranks 0, 2, float64 on rank 1'."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(who)}"
        for value, who in ranks.items()
    )
