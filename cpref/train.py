"""The training loop over a sharded sequence: that of one device, with four lines more.

shard           tokens, labels and positions
attention       is context_parallel_attention
loss            is the mean over the tokens of all ranks
gradients       are summed over the ranks
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from .attention import context_parallel_attention
from .comm import Group, GroupLike, resolve
from .data import sequences
from .layout import local_positions, shard
from .loss import next_token_loss, shift_labels
from .model import Attention, Config, Decoder


@dataclass(frozen=True)
class Step:
    """One step of training. loss: over all tokens; tokens_per_second: of the global sequence."""

    number: int
    loss: float
    tokens_per_second: float


def train(
    tokens: Tensor,
    *,
    seq_len: int,
    steps: int,
    config: Config | None = None,
    group: GroupLike = None,
    strategy: str = "ring",
    layout: str = "zigzag",
    batch: int = 1,
    learning_rate: float = 3e-3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Iterator[Step]:
    """Train a fresh `Decoder` on runs of `tokens`, and yield each `Step` as it is done.

    tokens: (S_document,) int64. seq_len: global length of a sequence, of any size. Weights and data
    follow from `seed`, so they are equal on all ranks without being sent, and equal to those of one
    rank. A group of one rank moves nothing and is plain training.
    Raises what `sequences` and `context_parallel_attention` raise.
    """
    comm = resolve(group)
    model = Decoder(config or Config(), seed).to(device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    attention = sharded_attention(comm, strategy, layout, seq_len)
    batches = sequences(tokens, seq_len, batch=batch, seed=seed)
    for number in range(steps):
        start = time.perf_counter()
        loss = loss_of(model, next(batches).to(device), attention, comm, layout)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model, comm)
        optimizer.step()
        value = loss.item()
        yield Step(number, value, batch * seq_len / (time.perf_counter() - start))


def sharded_attention(group: Group, strategy: str, layout: str, seq_len: int) -> Attention:
    """Causal attention over the shards of `group`, as the `Decoder` takes it."""
    return partial(
        context_parallel_attention, group=group, strategy=strategy, layout=layout, seq_len=seq_len
    )


def loss_of(
    model: Decoder, tokens: Tensor, attention: Attention, group: Group, layout: str
) -> Tensor:
    """The loss of whole sequences (B, S), of which this rank computes its shard."""
    labels = shift_labels(tokens)
    positions = local_positions(tokens.shape[1], group=group, layout=layout, device=tokens.device)
    mine = shard(tokens, 1, group=group, layout=layout)
    logits = model(mine, positions, attention)
    return next_token_loss(logits, shard(labels, 1, group=group, layout=layout), group=group)


def sum_gradients(model: nn.Module, group: Group) -> None:
    """Replace each parameter's gradient by its sum over the ranks, all in one message."""
    if group.size == 1:
        return
    parameters = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in parameters])
    summed = group.all_reduce(flat, label="gradients").split([p.numel() for p in parameters])
    for parameter, grad in zip(parameters, summed, strict=True):
        parameter.grad.copy_(grad.view_as(parameter))
