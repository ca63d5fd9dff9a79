"""How tensors move: four moves on a group of ranks.

    shift           my block goes to rank r + hops, the block of rank r - hops comes to me
    all_gather      everyone's part comes to me
    reduce_scatter  everyone's contributions to my part come to me, added up
    all_to_all      a different part for each rank goes out, one from each rank comes in

Each move is posted at once and returns a `Pending`; what it brings is there after `wait()`. Between
the two the caller computes: post, compute, wait is the whole secret of overlap. Until `wait()` the
tensors that were handed over belong to the move: do not write into them.

A `Group` counts what it sends, and lets its ranks agree on a call before the first byte moves.
`processes.py` moves tensors between processes, `local.py` between threads.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, Union

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .agreement import disagreement
from .parcels import Parcels, Shape, pack, sizes_of, unpack
from .watch import Watch

T = TypeVar("T")
GroupLike = Union["Group", "Grid", ProcessGroup, DeviceMesh, None]


class Pending(Generic[T]):
    """A move under way. `wait()` returns what it brings, however often it is called."""

    def __init__(self, finish: Callable[[], T]):
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        if self._finish is not None:
            self._brought = self._finish()
            self._finish = None  # why: lets go of the buffers that were sent
        return self._brought


@dataclass
class Traffic:
    """What this rank has sent: payload bytes and messages, counted where the moves are posted."""

    bytes: int = 0
    messages: int = 0

    def add(self, tensor: Tensor, messages: int = 1) -> int:
        """Count the same payload sent so many times; returns its bytes."""
        sent = messages * tensor.numel() * tensor.element_size()
        self.bytes += sent
        self.messages += messages
        return sent

    def reset(self) -> None:
        self.bytes = self.messages = 0


class Group(ABC):
    """Ranks that move tensors among themselves, seen from one of them.

    rank: this rank, 0 to P-1; size: P. P = 1 moves nothing.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.traffic = Traffic()
        self.watch = Watch()

    def source(self, hops: int) -> int:
        """The rank whose block is here when every block has made `hops` hops."""
        return (self.rank - hops) % self.size

    def computing(self, label: str) -> AbstractContextManager:
        """`with group.computing("ring forward, step 1"):`, for who looks on."""
        return self.watch.during("compute", label)

    # -- the four moves ---------------------------------------------------------------------------

    def shift(
        self, block: Tensor, *, hops: int = 1, shape: Shape | None = None, label: str = "shift"
    ) -> Pending[Tensor]:
        """Send `block` to rank r + hops, receive a block of `shape` (None: the same) from r - hops.

        Send and receive are posted together: posted one after the other on all ranks, each would
        wait for the other's.
        """
        if hops % self.size == 0:
            return Pending(lambda: block)
        block = block.contiguous()
        into = block.new_empty(block.shape if shape is None else tuple(shape))
        sent = self.traffic.add(block) if block.numel() else 0
        to, source = (self.rank + hops) % self.size, self.source(hops)
        return self._move(label, sent, lambda: self._shift(block, into, to, source, label))

    def all_gather(
        self, part: Tensor, shapes: Sequence[Shape] | None = None, *, label: str = "all_gather"
    ) -> Pending[list[Tensor]]:
        """Every rank's part, in the order of ranks. shapes: one for each rank; None: all equal."""
        if self.size == 1:
            return Pending(lambda: [part])
        arrived = Parcels.empty(shapes or [part.shape] * self.size, part.dtype, part.device)
        sent = part.contiguous().view(-1)
        slot = arrived.buffer.shape[1]
        if sent.numel() < slot:  # why: collectives want equal sizes; the filling is not looked at
            sent = torch.cat([sent, sent.new_zeros(slot - sent.numel())])
        size = self.traffic.add(sent, self.size - 1)
        gathered = self._move(label, size, lambda: self._all_gather(arrived.buffer, sent, label))
        return Pending(lambda: (gathered.wait(), arrived.parts)[1])

    def reduce_scatter(
        self, parts: Parcels | Sequence[Tensor], *, label: str = "reduce_scatter"
    ) -> Pending[Tensor]:
        """The sum over the ranks of their contributions `parts[r]` to this rank's part.

        Added in the dtype of the parts: hand over float32 where the sum matters.
        """
        if self.size == 1:
            return Pending(lambda: parts.parts[0] if isinstance(parts, Parcels) else parts[0])
        parcels = parts if isinstance(parts, Parcels) else Parcels.of(parts)
        mine = parcels.parts[self.rank]
        size = self.traffic.add(parcels.buffer[0], self.size - 1)
        reduced = self._move(label, size, lambda: self._reduce_scatter(parcels.buffer, label))
        return Pending(lambda: reduced.wait()[: mine.numel()].view(mine.shape))

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], *, label: str = "all_to_all"
    ) -> Pending[list[Tensor]]:
        """parts[r] goes to rank r; what comes from rank r has the shape shapes[r]."""
        if self.size == 1:
            return Pending(lambda: list(parts))
        size = sum(self.traffic.add(part) for r, part in enumerate(parts) if r != self.rank)
        sent, sizes = pack(*parts), ([p.numel() for p in parts], sizes_of(shapes))
        arrived = self._move(label, size, lambda: self._all_to_all(sent, *sizes, label))
        return Pending(lambda: unpack(arrived.wait(), shapes))

    def all_reduce(self, x: Tensor, *, label: str = "all_reduce") -> Tensor:
        """The sum of every rank's x, on every rank: a reduce-scatter, then an all-gather."""
        slices = list(x.contiguous().view(-1).tensor_split(self.size))
        mine = self.reduce_scatter(slices, label=label).wait()
        parts = self.all_gather(mine, [s.shape for s in slices], label=label).wait()
        return torch.cat(parts).view(x.shape)

    def _move(self, label: str, size: int, post: Callable[[], Pending[T]]) -> Pending[T]:
        """Post a move that sends `size` bytes, in view of who looks on."""
        return Pending(self.watch.follow(label, size, lambda: post().wait))

    # -- how a subclass moves flat buffers --------------------------------------------------------

    @abstractmethod
    def _shift(
        self, block: Tensor, into: Tensor, to: int, source: int, label: str
    ) -> Pending[Tensor]:
        """Send block, receive `into`; returns `into`. Neither is touched when it has no element."""

    @abstractmethod
    def _all_gather(self, into: Tensor, sent: Tensor, label: str) -> Pending[Tensor]:
        """(P, slot) from everyone's (slot,)."""

    @abstractmethod
    def _reduce_scatter(self, sent: Tensor, label: str) -> Pending[Tensor]:
        """(slot,) from everyone's (P, slot)."""

    @abstractmethod
    def _all_to_all(
        self, sent: Tensor, out_sizes: list[int], in_sizes: list[int], label: str
    ) -> Pending[Tensor]:
        """Flat: out_sizes[r] elements go to rank r, in_sizes[r] come from it."""

    @abstractmethod
    def _exchange(self, words: Tensor, label: str) -> Tensor:
        """(P, n) int64 on the CPU, from everyone's (n,). Not counted as traffic."""

    @contextmanager
    def naming_failures(self, step: str) -> Iterator[None]:
        """Let the other ranks, which will wait in vain, know that it was this one that failed."""
        try:
            yield
        except Exception as error:
            self._report(error, step)
            raise

    @abstractmethod
    def _report(self, error: Exception, step: str) -> None:
        """Tell the other ranks of an error of this rank's own."""

    # -- agreeing before anything moves -----------------------------------------------------------

    def agree(self, call: str, check: Callable[[], tuple[dict[str, object], T]]) -> T:
        """Run `check` on every rank, and go on only if all ranks passed it with the same terms.

        check returns the terms that must be equal on all ranks, and a result for the caller. It may
        raise ValueError, TypeError or IndexError: then every rank raises, the ones that found
        nothing wrong too, so that nobody is left waiting for a block that never comes.
        """
        problem: Exception | None = None
        try:
            terms, result = check()
            text = json.dumps([call, {name: str(value) for name, value in terms.items()}])
        except (ValueError, TypeError, IndexError) as error:
            problem = error
            text = json.dumps([call, type(error).__name__, str(error)])
        if self.size > 1:
            with self.watch.during("wait", f"the agreement on {call}"):
                self._compare(call, text)
        if problem is not None:
            raise problem
        return result

    def _compare(self, call: str, text: str) -> None:
        label = f"the agreement on {call}"
        content = text.encode()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)
        heads = self._exchange(torch.tensor([digest, len(content)]), label)
        if (heads == heads[0]).all():
            return
        longest = int(heads[:, 1].max())
        words = torch.tensor(list(content.ljust(longest)), dtype=torch.int64)
        texts = [bytes(row.tolist()).decode() for row in self._exchange(words, label)]
        raise disagreement([json.loads(text) for text in texts])


@dataclass(frozen=True)
class Grid:
    """Ranks as a table: each row of neighbours exchanges heads, each column is a ring.

    flat: all of them, row after row; ulysses: this rank's row; ring: this rank's column. What the
    two send is counted in the traffic of all, and who looks on at all sees them, too.
    """

    flat: Group
    ring: Group
    ulysses: Group

    def __post_init__(self):
        self.ring.traffic = self.ulysses.traffic = self.flat.traffic
        self.ring.watch = self.ulysses.watch = self.flat.watch


def resolve(group: GroupLike) -> Group:
    """The `Group` behind what a caller passes as `group`.

    None is the default process group; a DeviceMesh of one or two dimensions, or a `Grid`, all its
    ranks. Raises ValueError if there is no process group yet, if this rank is not in the group, or
    if the mesh has more dimensions; TypeError for anything else.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, Grid):
        return group.flat
    from . import processes  # why: it imports this module

    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return processes.mesh_grid(group).flat
    return processes.process_group(group)


def as_grid(group: GroupLike) -> Grid:
    """The `Grid` that the hybrid strategy needs. ValueError if `group` has only one dimension."""
    if isinstance(group, Grid):
        return group
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        from . import processes  # why: it imports this module

        return processes.mesh_grid(group)
    raise ValueError(
        f"group is {type(group).__name__}, but strategy='hybrid' needs two dimensions; pass a "
        "DeviceMesh of rows (the ring) x neighbours (that exchange heads), or use 'ring'"
    )
