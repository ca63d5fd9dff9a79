"""The moves between processes, over torch.distributed: NCCL, gloo, or what the group is made of."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .comm import Grid, Group, GroupLike, Pending
from .faults import announce, clear, explain, is_local, leave, met, report

# why: from torch 2.13 on these two have new names, and the old ones warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_REMEMBERED = 1024  # agreements that a group without a CPU backend does not make again


class Processes(Group):
    """A `Group` over a process group."""

    def __init__(self, group: ProcessGroup):
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._reference = ref(group)  # why: a strong one would keep a destroyed group alive
        self._words_device = torch.device("cpu")
        self._has_cpu = "cpu:" in dist.get_backend_config(group)
        if not self._has_cpu:
            self._words_device = torch.device(torch.accelerator.current_accelerator())
        self._compared: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)
        self._met: dict[int, dict] = {}
        announce()

    def is_of(self, group: ProcessGroup) -> bool:
        return self._reference() is group

    @property
    def _group(self) -> ProcessGroup:
        group = self._reference()
        if group is None:  # why: to torch.distributed a None would be the group of all ranks
            raise RuntimeError("the process group of this group has been destroyed; make a new one")
        return group

    def _shift(
        self, block: Tensor, into: Tensor, to: int, source: int, label: str
    ) -> Pending[Tensor]:
        post = []
        if block.numel():
            post.append((dist.isend, block, to))
        if into.numel():
            post.append((dist.irecv, into, source))
        if not post:
            return Pending(lambda: into)
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
            for operation, tensor, peer in post
        ]
        works = self._named(
            [to, source], label, lambda: dist.batch_isend_irecv(operations), posting=True
        )

        def finish() -> Tensor:
            peers = [[peer] for _, _, peer in post] if len(works) == len(post) else [[to, source]]
            for work, peer in zip(works, peers, strict=True):
                self._named(peer, label, work.wait)
            operations.clear()  # why: until here they kept the block that is being sent alive
            return into

        return Pending(finish)

    def _all_gather(self, into: Tensor, sent: Tensor, label: str) -> Pending[Tensor]:
        return self._collective(
            into,
            label,
            lambda: _all_gather(into.view(-1), sent, group=self._group, async_op=True),
        )

    def _reduce_scatter(self, sent: Tensor, label: str) -> Pending[Tensor]:
        into = torch.empty_like(sent[0])
        return self._collective(
            into,
            label,
            lambda: _reduce_scatter(into, sent.view(-1), group=self._group, async_op=True),
        )

    def _all_to_all(
        self, sent: Tensor, out_sizes: list[int], in_sizes: list[int], label: str
    ) -> Pending[Tensor]:
        into = sent.new_empty(sum(in_sizes))
        return self._collective(
            into,
            label,
            lambda: dist.all_to_all_single(
                into, sent, in_sizes, out_sizes, group=self._group, async_op=True
            ),
        )

    def _exchange(self, words: Tensor, label: str) -> Tensor:
        sent = words.to(self._words_device)
        into = sent.new_empty(self.size, *sent.shape)
        return self._all_gather(into, sent, label).wait().cpu()

    def _compare(self, call: str, text: str) -> None:
        # why: without a CPU backend the exchange would make the host wait for the device at every
        # call, so there terms are compared only when they are not among the last that were. All
        # ranks remember the same ones, since all have agreed on the same ones.
        if not self._has_cpu and (call, text) in self._compared:
            return
        super()._compare(call, text)
        if not self._has_cpu:
            self._compared.append((call, text))
        self._met = self._met or met()
        clear()

    def _report(self, error: Exception, step: str) -> None:
        report(error, step)

    def _collective(
        self, into: Tensor, label: str, post: Callable[[], dist.Work]
    ) -> Pending[Tensor]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        work = self._named(others, label, post, posting=True)

        def finish() -> Tensor:
            self._named(others, label, work.wait)
            return into

        return Pending(finish)

    def _named(self, peers: Sequence[int], label: str, act: Callable, *, posting: bool = False):
        """Run `act`; a failure of the transport becomes an error that names the rank behind it."""
        try:
            return act()
        except RuntimeError as error:
            if is_local(error, posting=posting):
                raise
            raise explain(error, self._group, peers, label, self._met) from error


_known: WeakKeyDictionary[ProcessGroup, Processes] = WeakKeyDictionary()


def process_group(group: GroupLike) -> Processes:
    """The `Group` of a ProcessGroup, of a one-dimensional DeviceMesh, or of the default group."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of {group.ndim} dimensions; it must have one, or two for "
                "'hybrid': take a part of it, such as mesh['cp']"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group: rank {dist.get_rank()} of the world is not in it")
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "group is None, but no process group has been started; call cpref.init() under "
                "torchrun first, or run the ranks as threads with cpref.run_local"
            )
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group is {type(group).__name__}; it must be a ProcessGroup, a DeviceMesh, a group of "
            "cpref.run_local, or None for the default group"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"group: rank {dist.get_rank()} of the world is not in it")
    if group not in _known:
        _known[group] = Processes(group)
    return _known[group]


_grids: WeakKeyDictionary[DeviceMesh, Grid] = WeakKeyDictionary()


def mesh_grid(mesh: DeviceMesh) -> Grid:
    """A two-dimensional mesh as a `Grid`: the first dimension is the ring, the second the rows."""
    ranks = _require_table(mesh)
    ring, ulysses = mesh.get_group(0), mesh.get_group(1)
    # why: meshes that look the same are equal, also one of groups that have been destroyed since
    if mesh not in _grids or not _grids[mesh].ring.is_of(ring):
        flat = dist.group.WORLD
        if len(ranks) < dist.get_world_size():  # why: ranks outside the mesh do not come along
            flat = dist.new_group(ranks, use_local_synchronization=True)
        _grids[mesh] = Grid(Processes(flat), Processes(ring), Processes(ulysses))
    return _grids[mesh]


def _require_table(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh; ValueError unless they form the table that `Grid` describes."""
    ranks = mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        raise ValueError(f"group: rank {dist.get_rank()} of the world is not in it")
    if ranks != sorted(ranks):  # why: process groups order their ranks so, whatever the mesh does
        raise ValueError(
            f"group is a mesh of the ranks {mesh.mesh.tolist()}; they must increase, row after "
            "row, as init_device_mesh arranges them"
        )
    return ranks


def init(
    backend: str | None = None, timeout: timedelta | float = timedelta(minutes=5)
) -> torch.device:
    """Join the ranks that torchrun started, and return the device that is this rank's.

    Reads RANK, WORLD_SIZE and LOCAL_RANK from the environment; without them this process is a world
    of one. On a machine with accelerators rank r takes the one of its LOCAL_RANK.

    backend: as in `torch.distributed.init_process_group`; None means gloo on the CPU, and on an
    accelerator its own backend with gloo beside it for the few bytes that ranks agree with.
    timeout: how long any move waits for a rank before it is given up, in seconds or as timedelta;
    it has to be longer than a rank may be late. Groups that are made later have it, too, unless
    they are given another: of themselves a DeviceMesh and `new_group` would wait for 30 minutes.
    Calling it again is harmless. Raises ValueError if there are more ranks on this machine than
    accelerators.
    """
    device = _own_device()
    if dist.is_initialized():
        return device
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    if backend is None:
        backend = "gloo"
        if device.type != "cpu":
            own = dist.get_default_backend_for_device(device)
            backend = f"cpu:gloo,{device.type}:{own}"
    if dist.is_torchelastic_launched() or "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )
    _let_new_groups_wait(timeout)
    return device


def _let_new_groups_wait(timeout: timedelta | None) -> None:
    """Make `timeout` that of new groups. None: what PyTorch would take.

    why so: a mesh cannot be told a timeout, and the one of a gloo group is fixed when it is made.
    """
    for name, usual in _usual_timeouts.items():
        setattr(dist.distributed_c10d, name, usual if timeout is None else timeout)


_usual_timeouts = {
    name: getattr(dist.distributed_c10d, name)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout")
}


def shutdown() -> None:
    """Leave the ranks: destroys the default process group, if there is one."""
    if dist.is_initialized():
        leave()
        _let_new_groups_wait(None)
        dist.destroy_process_group()


def _own_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ValueError(
            f"rank with LOCAL_RANK={local_rank} has no device: this machine has {count}; start at "
            f"most {count} ranks on it, or hide the devices to use the CPU"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)
