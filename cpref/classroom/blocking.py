"""A send that returns only when its message has been received: for the exercise on deadlocks.

A send of `torch.distributed` returns when the message is on its way. A small one is so at once, so
that a program which deadlocks with large messages passes every test with small ones. Here messages
of every size behave like large ones, between threads and between processes alike.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Group
from ..local import LocalGroup


def send(group: Group, block: Tensor, to: int) -> None:
    """Send `block`, of any shape, to rank `to`; returns when that rank has received it."""
    _require_other(group, "to", to)
    group.traffic.add(block)
    receipt = torch.empty(1)
    if isinstance(group, LocalGroup):
        turn = group._turn(f"message from {group.rank} to {to}")
        group._put(to, turn, block)
        group._take(to, f"{turn}, receipt", receipt, "send")
    else:
        dist.send(block.contiguous(), group=group._group, group_dst=to)
        dist.recv(receipt, group=group._group, group_src=to)


def receive(
    group: Group, shape: Sequence[int], source: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The next block that rank `source` sends to this rank; waits for it."""
    _require_other(group, "source", source)
    block, receipt = torch.empty(tuple(shape), dtype=dtype), torch.zeros(1)
    if isinstance(group, LocalGroup):
        turn = group._turn(f"message from {source} to {group.rank}")
        group._take(source, turn, block, "recv")
        group._put(source, f"{turn}, receipt", receipt)
    else:
        dist.recv(block, group=group._group, group_src=source)
        dist.send(receipt, group=group._group, group_dst=source)
    return block


def _require_other(group: Group, name: str, rank: int) -> None:
    if rank == group.rank or not 0 <= rank < group.size:
        raise ValueError(
            f"{name} is {rank}; on rank {group.rank} it must be another of the ranks 0 to "
            f"{group.size - 1}"
        )
