"""The memory of one training step of a big model on many ranks, found on one machine that has none.

Fake tensors have a shape and a dtype and no numbers; the fake process group brings what never comes
from anybody. On them runs the package's own code (`cpref.model`, the strategies, the loss) with
torch's FSDP2 and AdamW, as rank 0 of so many ranks, and `StepMemory` reads what is alive. So a
figure from here is simulated: the tensors that a rank would hold, to the byte, but neither what a
kernel holds for itself while it runs, nor what an allocator or NCCL takes on top.

The fakes are on the CPU, whose flash kernel makes the same tensors as that of CUDA.

Sources: torch.distributed.fsdp.fully_shard, and PyTorch's FakeTensorMode and fake process group,
which are private modules: nothing outside of this file touches them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..attention import STRATEGIES
from ..comm import Group
from ..layout import is_count, local_positions, place, shard
from ..loss import next_token_loss_by_parts, shift_labels
from ..merge import Partial, accumulator_dtype
from ..model import Attention, Decoder
from ..processes import Processes
from ..strategies import Saved
from ..tiles import Job
from ..train import sharded_attention
from .memory import bytes_held, optimizer_bytes
from .peak import LiveBytes
from .shapes import ModelShape

T = TypeVar("T")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KNOWN = tuple(name for name in STRATEGIES if name != "hybrid")  # that needs a table of ranks


@dataclass(frozen=True)
class Training:
    """One training step of one sequence, in which `ranks` ranks share.

    ranks: P. sharded: parameters, gradients and optimizer state are divided over the ranks too
    (FSDP2); else each rank has them all. recompute: each block keeps its input alone, and runs
    again in backward. at_once: tokens whose logits are made at a time; None means all of them.
    dtype: of the computation, "bf16" or "fp32"; parameters, gradients and AdamW's two moments are
    float32 in either case.
    """

    model: ModelShape
    seq_len: int
    ranks: int
    strategy: str = "ring"
    layout: str = "zigzag"
    sharded: bool = True
    recompute: bool = True
    at_once: int | None = 2048
    dtype: str = "bf16"

    def __post_init__(self):
        for name in ("seq_len", "ranks"):
            if not is_count(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number")
        if self.ranks > self.seq_len:
            raise ValueError(
                f"ranks is {self.ranks}; it must be at most the {self.seq_len} tokens of seq_len"
            )
        if self.strategy not in KNOWN:
            raise ValueError(f"strategy is {self.strategy!r}; it must be one of {', '.join(KNOWN)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        place(self.seq_len, self.ranks, self.layout)


@dataclass(frozen=True)
class Usage:
    """What one rank holds, in bytes.

    parameters, gradients, optimizer: what stays between steps. forward, backward, update: the most
    that is alive while each runs, all of the above included.
    """

    parameters: int
    gradients: int
    optimizer: int
    forward: int
    backward: int
    update: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward, self.update)


def simulate(*trainings: Training, timeout: float = 600) -> list[Usage]:
    """What rank 0 of each training would hold. Simulated, in processes of its own, one for a core.

    why: it starts a fake process group, and a process has only one default group.
    Raises TimeoutError after `timeout` seconds, RuntimeError with its words if it fails.
    """
    workers = min(os.cpu_count() or 1, len(trainings))
    usages: list[Usage | None] = [None] * len(trainings)
    shares = [range(worker, len(trainings), workers) for worker in range(workers)]
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        found = pool.map(lambda share: _simulate([trainings[i] for i in share], timeout), shares)
        for share, part in zip(shares, found, strict=True):
            for index, usage in zip(share, part, strict=True):
                usages[index] = usage
    return usages


def _simulate(trainings: list[Training], timeout: float) -> list[Usage]:
    command = [sys.executable, "-m", "cpref.measure.simulate"]
    jobs = json.dumps([asdict(training) for training in trainings])
    try:
        done = subprocess.run(command, input=jobs, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not simulated within {timeout} s; take fewer layers") from None
    if done.returncode:
        raise RuntimeError(f"the simulation failed:\n{done.stderr.strip()}")
    return [Usage(**usage) for usage in json.loads(done.stdout)]


# -- one step, on tensors of any kind -------------------------------------------------------------


def step_memory(
    training: Training, group: Group, mesh: DeviceMesh, memory: "StepMemory | None" = None
) -> Usage:
    """What this rank holds in one step of `training`.

    group: its ranks; mesh: the same ranks, in rows of those that share the parameters; memory: with
    which it is measured. The simulation calls it with fake tensors; with real ones it really
    trains.
    """
    with memory or StepMemory() as memory:
        model = _WithLoss(training)
        _shard_parameters(model, training, mesh)
        attention = sharded_attention(group, training.strategy, training.layout, training.seq_len)
        memory.phase = "forward"
        tokens = torch.zeros(1, training.seq_len, dtype=torch.int64)
        loss = model(tokens, attention, group)
        memory.phase = "backward"
        loss.backward()
        memory.phase = "update"
        shards = [_own_shard(p) for p in model.parameters()]
        optimizer = torch.optim.AdamW(shards, foreach=False)
        optimizer.step()
    return Usage(
        parameters=bytes_held(shards),
        gradients=bytes_held(p.grad for p in shards),
        optimizer=optimizer_bytes(optimizer),
        **{phase: memory.peaks[phase] for phase in ("forward", "backward", "update")},
    )


class _WithLoss(nn.Module):
    """A decoder together with its loss, so that FSDP2 sees one forward from tokens to the loss."""

    def __init__(self, training: Training):
        super().__init__()
        self.training_step = training
        self.decoder = Decoder(training.model.config, recompute=training.recompute)

    def forward(self, tokens: Tensor, attention: Attention, group: Group) -> Tensor:
        training = self.training_step
        where = {"group": group, "layout": training.layout}
        labels = shard(shift_labels(tokens), 1, **where)
        mine = shard(tokens, 1, **where)
        x = self.decoder.features(mine, local_positions(training.seq_len, **where), attention)
        at_once = training.at_once or mine.shape[1]
        return next_token_loss_by_parts(x, self.decoder.head, labels, at_once=at_once, group=group)


def _shard_parameters(model: _WithLoss, training: Training, mesh: DeviceMesh) -> None:
    """FSDP2, a group of parameters for the embedding, for each block, and for the head with norm.

    mesh: rows that hold copies x ranks that share one.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # why: takes a second

    policy = MixedPrecisionPolicy(param_dtype=DTYPES[training.dtype], reduce_dtype=torch.float32)
    for part in (model.decoder.embedding, *model.decoder.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)  # why: the loss is a share of the mean already
        part.set_force_sum_reduction_for_comms(True)  # why: gloo knows no sum with a factor


def _own_shard(parameter: nn.Parameter) -> nn.Parameter:
    """What this rank holds of a parameter and of its gradient, in the same storages.

    why: AdamW works on each number by itself, so it may as well work on these. Given a DTensor,
    torch first tries each operation on fake tensors of the whole size, which would be counted.
    """
    own = nn.Parameter(parameter.to_local().detach())
    own.grad = parameter.grad.to_local()
    return own


class StepMemory(LiveBytes):
    """`LiveBytes` with a peak for each phase, which also follows FSDP2 as it empties storages.

    why: FSDP2 frees gathered parameters by resizing their storage to nothing, which is no operation
    that a dispatch mode would see. For use in a process where nobody else resizes meanwhile.
    """

    def __init__(self):
        super().__init__()
        self.phase = "start"
        self.peaks: dict[str, int] = {}
        self._highest = 0

    def __enter__(self):
        self._resize_ = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = self._resize_(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize_
        return super().__exit__(*error)

    def _resize(self, key: int, size: int) -> None:
        super()._resize(key, size)
        self.reach(self.live_bytes)

    def reach(self, size: int) -> None:
        """So much is alive."""
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), size)
        self._highest = max(self._highest, size)

    def highest(self, call: Callable[[], T]) -> tuple[T, int]:
        """What the call gives, and by how much it exceeded at its peak what was there before."""
        before = self._highest = self.live_bytes
        result = call()
        return result, self._highest - before


# -- the process in which it is simulated ---------------------------------------------------------


class _FakeRank(Processes):
    """Rank 0 of a fake process group. It has nobody to agree with, and fake numbers cannot differ:
    so the comparison before each call, which reads numbers, is left out."""

    def _compare(self, call: str, text: str) -> None:
        pass


class _Remembered:
    """A strategy that runs once forward and once backward, and then only claims its memory.

    why: every layer makes the same call, and on 64 ranks that is nearly all there is to do. What is
    left out has no numbers either; its results and its peak are the same (a test compares).
    """

    def __init__(self, strategy: ModuleType, memory: StepMemory):
        self._strategy, self._memory = strategy, memory
        self._peaks: dict[str, int] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, job: Job, group: Group):
        if "forward" in self._peaks:
            self._memory.reach(self._memory.live_bytes + self._peaks["forward"])
            lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
            out = q.new_empty(q.shape)
            return Partial(out, lse), Saved(q, k, v, out, lse)
        result, self._peaks["forward"] = self._memory.highest(
            lambda: self._strategy.forward(q, k, v, job, group)
        )
        return result

    def backward(self, grad_out: Tensor, grad_lse: None, saved: Saved, job: Job, group: Group):
        if "backward" in self._peaks:
            self._memory.reach(self._memory.live_bytes + self._peaks["backward"])
            dtype = accumulator_dtype(grad_out.dtype)
            return [x.new_empty(x.shape, dtype=dtype) for x in (saved.q, saved.k, saved.v)]
        result, self._peaks["backward"] = self._memory.highest(
            lambda: self._strategy.backward(grad_out, grad_lse, saved, job, group)
        )
        return result


@contextmanager
def _fake_ranks(training: Training) -> Iterator[tuple[Group, DeviceMesh]]:
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = training.ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        rows = (1, ranks) if training.sharded else (ranks, 1)
        mesh = dist.init_device_mesh("cpu", rows, mesh_dim_names=("copies", "shards"))
        with FakeTensorMode():
            yield _FakeRank(dist.group.WORLD), mesh
    finally:
        dist.destroy_process_group()


def _main() -> None:
    usages = []
    for job in json.loads(sys.stdin.read()):
        training = Training(**{**job, "model": ModelShape(**job["model"])})
        memory, strategy = StepMemory(), training.strategy
        quick = {strategy: _Remembered(STRATEGIES[strategy], memory)}
        with _fake_ranks(training) as (group, mesh), patch.dict(STRATEGIES, quick):
            usages.append(asdict(step_memory(training, group, mesh, memory)))
    print(json.dumps(usages))


if __name__ == "__main__":
    _main()
