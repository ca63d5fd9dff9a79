"""The next-token loss of a sequence that is sharded.

Two things go wrong easily. The label of a shard's last token is the first token of another shard:
so labels are shifted before anything is sharded. And ranks hold different numbers of supervised
tokens: so the loss is the sum over all ranks divided by the count over all ranks, not a mean of
means.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .comm import GroupLike, resolve
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

    def check() -> tuple[dict[str, object], None]:
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"logits has shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; "
                "they must be (B, S_local, vocab) and (B, S_local)"
            )
        return {"dtype": logits.dtype, "ignore_index": ignore_index}, None

    comm.agree("next_token_loss", check)
    wide = logits.flatten(0, -2).to(accumulator_dtype(logits.dtype))
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=ignore_index, reduction="sum")
    count = (labels != ignore_index).sum()
    count = sum(comm.all_gather(count.view(1), label="loss count").wait()).clamp(min=1)
    share = total / count.squeeze()
    everyones = sum(comm.all_gather(share.detach().view(1), label="loss").wait()).squeeze()
    # why: the value is everyone's, the gradient only this rank's; share - share is exactly 0, so
    # that all ranks return the same bits
    return everyones + (share - share.detach())
