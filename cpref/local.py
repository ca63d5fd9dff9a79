"""A world of ranks as threads of one process.

The same moves as between processes, in view of one debugger and started in a millisecond: for
notebooks, tests, and P = 32 on a laptop. A message is a copy in a mailbox, so what a rank writes
afterwards does not reach the others, just as between processes.

Where processes would hang, this world sees it: as soon as every rank waits and no message can
satisfy any of them, all ranks get an error that says who waits for what.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor

from .comm import Grid, Group, Pending

T = TypeVar("T")
Address = tuple[int, int, str]  # from, to, what: the move and how many of its kind came before


class LocalError(RuntimeError):
    """The ranks wait for each other for ever, or a message is not what its receiver expects."""


class _Aborted(Exception):
    """Raised in the ranks that waited when another rank failed; never seen by the caller."""


class _Post:
    """The mailboxes between the ranks, and who waits at which."""

    def __init__(self, ranks: int):
        self._changed = threading.Condition()
        self._boxes: dict[Address, deque[Tensor]] = defaultdict(deque)
        self._waiting: dict[int, tuple[Address, str]] = {}
        self._running = set(range(ranks))
        self._groups: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._failure: str | None = None
        self._aborted = False

    def number(self, rank: int, members: tuple[int, ...]) -> int:
        """How many groups of these members `rank` had before: equal on all that make the same."""
        with self._changed:
            self._groups[rank, members] += 1
            return self._groups[rank, members] - 1

    def put(self, address: Address, tensor: Tensor) -> None:
        with self._changed:
            self._boxes[address].append(tensor.detach().clone())
            self._changed.notify_all()

    def take(self, address: Address, label: str) -> Tensor:
        """The next message at `address`; waits for it."""
        _, rank, _ = address
        with self._changed:
            while not self._boxes[address]:
                self._waiting[rank] = address, label
                self._fail_if_stuck()
                if self._failure:
                    raise LocalError(self._failure)
                if self._aborted:
                    raise _Aborted
                self._changed.wait()
            self._waiting.pop(rank, None)
            message = self._boxes[address].popleft()
            if not self._boxes[address]:
                del self._boxes[address]
            return message

    def leave(self, rank: int) -> None:
        with self._changed:
            self._running.discard(rank)
            self._waiting.pop(rank, None)
            self._fail_if_stuck()
            self._changed.notify_all()

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _fail_if_stuck(self) -> None:
        """If every rank that still runs waits at an empty mailbox, nothing can move any more."""
        stuck = self._waiting.keys() == self._running and not any(
            self._boxes.get(address) for address, _ in self._waiting.values()
        )
        if not (stuck and self._waiting) or self._failure or self._aborted:
            return
        waits = [
            f"rank {rank} waits in {label} for rank {source}"
            + ("" if source in self._running else ", which has ended")
            for rank, ((source, _, _), label) in sorted(self._waiting.items())
        ]
        self._failure = f"no rank can go on: {'; '.join(waits)}"
        self._changed.notify_all()


class LocalGroup(Group):
    """A `Group` of threads. `run_local` makes it; `subgroup` makes a smaller one of some ranks."""

    def __init__(self, post: _Post, members: tuple[int, ...], rank: int):
        super().__init__(rank, len(members))
        self._mail, self._members = post, members
        # why: two groups of the same ranks must not open each other's mail
        self._name = f"{members} {post.number(members[rank], members)}"
        self._moves: dict[str, int] = defaultdict(int)

    def subgroup(self, members: tuple[int, ...]) -> "LocalGroup":
        """The group of the given ranks of this one, in that order; this rank must be among them."""
        if self.rank not in members:
            raise ValueError(f"group: rank {self.rank} is not among its members {members}")
        world = tuple(self._members[rank] for rank in members)
        return LocalGroup(self._mail, world, members.index(self.rank))

    def grid(self, neighbours: int) -> Grid:
        """This group as a table with rows of `neighbours` ranks, for the hybrid strategy."""
        if neighbours < 1 or self.size % neighbours:
            raise ValueError(
                f"neighbours is {neighbours}; it must divide the {self.size} ranks of the group"
            )
        row, column = divmod(self.rank, neighbours)
        return Grid(
            flat=self,
            ring=self.subgroup(tuple(range(column, self.size, neighbours))),
            ulysses=self.subgroup(tuple(range(row * neighbours, (row + 1) * neighbours))),
        )

    def _shift(
        self, block: Tensor, into: Tensor, to: int, source: int, label: str
    ) -> Pending[Tensor]:
        turn = self._turn("shift")
        if block.numel():
            self._put(to, turn, block)
        if not into.numel():
            return Pending(lambda: into)
        return Pending(lambda: self._take(source, turn, into, label))

    def _all_gather(self, into: Tensor, sent: Tensor, label: str) -> Pending[Tensor]:
        turn = self._turn("all_gather")
        for rank in range(self.size):
            self._put(rank, turn, sent)

        def finish() -> Tensor:
            for rank in range(self.size):
                self._take(rank, turn, into[rank], label)
            return into

        return Pending(finish)

    def _reduce_scatter(self, sent: Tensor, label: str) -> Pending[Tensor]:
        turn = self._turn("reduce_scatter")
        for rank in range(self.size):
            self._put(rank, turn, sent[rank])

        def finish() -> Tensor:
            total, arrived = torch.zeros_like(sent[0]), torch.empty_like(sent[0])
            for rank in range(self.size):  # why: always in the same order, so always the same bits
                total += self._take(rank, turn, arrived, label)
            return total

        return Pending(finish)

    def _all_to_all(
        self, sent: Tensor, out_sizes: list[int], in_sizes: list[int], label: str
    ) -> Pending[Tensor]:
        turn = self._turn("all_to_all")
        for rank, part in enumerate(sent.split(out_sizes)):
            self._put(rank, turn, part)

        def finish() -> Tensor:
            into = sent.new_empty(sum(in_sizes))
            for rank, part in enumerate(into.split(in_sizes)):
                self._take(rank, turn, part, label)
            return into

        return Pending(finish)

    def _exchange(self, words: Tensor, label: str) -> Tensor:
        return self._all_gather(words.new_empty(self.size, *words.shape), words, label).wait()

    def _report(self, error: Exception, step: str) -> None:
        return  # why: the thread ends with the error, and that ends the others

    def _turn(self, move: str) -> str:
        self._moves[move] += 1
        return f"{self._name} {move} {self._moves[move]}"

    def _put(self, rank: int, turn: str, tensor: Tensor) -> None:
        self._mail.put((self._members[self.rank], self._members[rank], turn), tensor)

    def _take(self, rank: int, turn: str, into: Tensor, label: str) -> Tensor:
        address = self._members[rank], self._members[self.rank], turn
        message = self._mail.take(address, label)
        if message.dtype != into.dtype or message.numel() != into.numel():
            raise LocalError(
                f"rank {self.rank} expects {into.numel()} numbers of {into.dtype} from rank {rank} "
                f"in {label}, and gets {message.numel()} of {message.dtype}"
            )
        return into.copy_(message.view(into.shape))


def run_local(fn: Callable[..., T], ranks: int, *args: object) -> list[T]:
    """Run fn(group, *args) on `ranks` threads of this process; each rank's result, in order.

    group: pass it on to every function of cpref that takes one. The ranks share the processor's
    threads among themselves, keep the caller's grad, inference and autocast modes, and see the same
    `args`.
    If ranks raise, the first exception is raised here as it was, with the rank in a note, and the
    other ranks end. Raises LocalError if the ranks wait for each other for ever.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}; it must be a whole number of at least 1")
    post = _Post(ranks)
    results: list[T | None] = [None] * ranks
    failures: list[tuple[int, BaseException]] = []
    threads_each, threads_before = max(1, torch.get_num_threads() // ranks), torch.get_num_threads()
    modes = _modes_of_this_thread()

    def live(rank: int) -> None:
        try:
            torch.set_num_threads(threads_each)
            # why: on an accelerator all ranks' backward would share one thread of autograd's, and
            # the first to wait would block the others; so each runs backward in its own thread.
            with modes(), torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(LocalGroup(post, tuple(range(ranks)), rank), *args)
        except _Aborted:
            pass
        except BaseException as error:  # why: handed to the caller below
            failures.append((rank, error))
            post.abort()
        finally:
            post.leave(rank)

    threads = [
        threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(ranks)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        post.abort()  # why: an interrupt arrives here, in the main thread, and ends the ranks too
        torch.set_num_threads(threads_before)
    if failures:
        rank, error = failures[0]
        error.add_note(f"raised on rank {rank} of {ranks}")
        raise error
    return results


def _modes_of_this_thread() -> Callable[[], ExitStack]:
    """The modes that a new thread does not inherit; call the result there to enter them."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", accelerator.type} if accelerator else {"cpu"}
    casting = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in casting:
            stack.enter_context(torch.autocast(kind, dtype))
        return stack

    return enter
