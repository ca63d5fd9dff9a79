"""The next-token loss of a sequence that is sharded.

Two things go wrong easily. The label of a shard's last token is the first token of another shard:
so labels are shifted before anything is sharded. And ranks hold different numbers of supervised
tokens: so the loss is the sum over all ranks divided by the count over all ranks, not a mean of
means.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .comm import Group, GroupLike, resolve
from .merge import accumulator_dtype

IGNORE = -100


def shift_labels(tokens: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """The label of each token is the next one; the last has none. Call it on whole sequences.

    tokens: (B, S) int64. Returns (B, S) int64, to be sharded like the tokens.
    """
    end = torch.full_like(tokens[:, :1], ignore_index)
    return torch.cat([tokens[:, 1:], end], 1)


def next_token_loss(
    logits: Tensor, labels: Tensor, *, group: GroupLike = None, ignore_index: int = IGNORE
) -> Tensor:
    """The mean cross entropy over all supervised tokens of all ranks; the same bits on each.

    logits: (B, S_local, vocab); labels: (B, S_local) int64, shifted; those equal to `ignore_index`
    are not supervised. Computed in float32 (float64 for float64), a scalar. With no supervised
    token anywhere it is 0.

    Every rank calls backward, also one without a supervised token. The gradient is that of this
    rank's share, its own sum over the global count: so the gradients of parameters have to be
    summed over the ranks, not averaged. (A wrapper that averages over n ranks, such as FSDP, needs
    the loss multiplied by n.)

    Raises ValueError, on every rank, if the shapes do not fit each other on one.
    Moves a few bytes per rank.
    """
    comm = resolve(group)
    _agree(comm, "next_token_loss", "logits", "vocab", logits, labels, ignore_index)
    total = _summed(logits, labels, ignore_index)
    return _mean_of_all(total, labels, comm, ignore_index)


def next_token_loss_by_parts(
    x: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    at_once: int = 2048,
    group: GroupLike = None,
    ignore_index: int = IGNORE,
) -> Tensor:
    """`next_token_loss(head(x), labels)`, with the logits of at most `at_once` tokens in memory.

    With a vocabulary of 128,256 the logits of one token are 513 kB in float32: those of a long
    shard would need more than all else together. So they are made for some tokens at a time, and
    made again in backward.

    x: (B, S_local, width), of which head makes logits (..., vocab). at_once: at least 1. The rest,
    and what is raised, as `next_token_loss`.
    """
    comm = resolve(group)
    _agree(comm, "next_token_loss_by_parts", "x", "width", x, labels, ignore_index, at_once)

    def part(x: Tensor, labels: Tensor) -> Tensor:
        return _summed(head(x), labels, ignore_index)

    parts = zip(x.flatten(0, -2).split(at_once), labels.flatten().split(at_once), strict=True)
    # why: without dropout there is nothing random to be repeated
    again = {"use_reentrant": False, "preserve_rng_state": False}
    total = sum(checkpoint(part, *each, **again) for each in parts)
    return _mean_of_all(total, labels, comm, ignore_index)


def _agree(
    comm: Group,
    call: str,
    name: str,
    last: str,
    x: Tensor,
    labels: Tensor,
    ignore_index: int,
    at_once: int = 1,
) -> None:
    def check() -> tuple[dict[str, object], None]:
        if not at_once >= 1:
            raise ValueError(f"at_once is {at_once}; it must be at least 1 token")
        if x.shape[:-1] != labels.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and labels {tuple(labels.shape)}; "
                f"they must be (B, S_local, {last}) and (B, S_local)"
            )
        return {"dtype": x.dtype, "ignore_index": ignore_index}, None

    comm.agree(call, check)


def _summed(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    wide = logits.flatten(0, -2).to(accumulator_dtype(logits.dtype))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=ignore_index, reduction="sum")


def _mean_of_all(total: Tensor, labels: Tensor, comm: Group, ignore_index: int) -> Tensor:
    count = (labels != ignore_index).sum()
    count = sum(comm.all_gather(count.view(1), label="loss count").wait()).clamp(min=1)
    share = total / count.squeeze()
    everyones = sum(comm.all_gather(share.detach().view(1), label="loss").wait()).squeeze()
    # why: the value is everyone's, the gradient only this rank's; share - share is exactly 0, so
    # that all ranks return the same bits
    return everyones + (share - share.detach())
