"""How exact is it? One case of sharded attention against the judge.

The judge is `reference_attention`: float64, on one process. The error of a tensor is relative, in
the L2 norm: |x - exact| / |exact|. `errors` computes it for out, dq, dk and dv, with a random
grad_out; `bounds` says what it may be:

    float32             1e-6 for out, 3e-6 for the gradients
    float64             the same number of roundings: scaled by the ratio of the two epsilons
    bfloat16, float16   1.6 times the error that plain scaled_dot_product_attention makes with the
                        same inputs on one process; 1.15 times with accumulate="exact"

The last compares two roundings with each other, so it needs enough of them: in a case of a few rows
one row with an unlucky rounding can be most of either error.
"""

import math
import threading
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .attention import context_parallel_attention
from .comm import Grid, Group, GroupLike, as_grid, resolve
from .layout import shard
from .local import LocalGroup
from .mask import Causal, Full, Mask, as_mask
from .reference import reference_attention

_FLOAT32 = {"out": 1e-6, "dq": 3e-6, "dk": 3e-6, "dv": 3e-6}
_TIMES_PLAIN = {"fp32": 1.6, "exact": 1.15}


@dataclass(frozen=True)
class Case:
    """One attention call: what is computed, and how.

    kv_seq_len, v_head_dim: None means seq_len and head_dim. neighbours: ranks of a row under
    strategy="hybrid". The inputs are standard normal, drawn from `seed`.
    """

    strategy: str = "ring"
    layout: str = "zigzag"
    mask: Mask = Causal()  # noqa: RUF009 - frozen
    dtype: torch.dtype = torch.float32
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    v_head_dim: int | None = None
    seq_len: int = 64
    kv_seq_len: int | None = None
    accumulate: str = "fp32"
    overlap: bool = True
    neighbours: int = 1
    seed: int = 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        lengths = f"S={self.seq_len}" + (f" Skv={self.kv_seq_len}" if self.kv_seq_len else "")
        dims = f"D={self.head_dim}" + (f" Dv={self.v_head_dim}" if self.v_head_dim else "")
        how = f"{self.strategy} {self.layout} {self.accumulate}"
        shape = f"B={self.batch} H={self.heads} Hkv={self.kv_heads} {lengths} {dims}"
        return f"{how}, {self.mask}, {dtype} {shape}"

    def problem(self) -> "Case":
        """What is computed, without how: equal for all cases with the same exact result."""
        return replace(self, strategy="", layout="", accumulate="", overlap=True, neighbours=1)


@dataclass(frozen=True)
class Errors:
    """Relative L2 errors, or the bounds of such errors."""

    out: float
    dq: float
    dk: float
    dv: float

    def within(self, bounds: "Errors") -> bool:
        return all(
            getattr(self, x.name) <= getattr(bounds, x.name) for x in fields(self)
        )  # why: <= and not its opposite, so that nan is not within


@dataclass(frozen=True)
class Inputs:
    """Whole tensors, in the dtype of the case."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


def inputs(case: Case) -> Inputs:
    """The same on every rank."""
    draw = torch.Generator().manual_seed(case.seed)
    kv_seq_len, v_head_dim = case.kv_seq_len or case.seq_len, case.v_head_dim or case.head_dim
    shapes = (
        (case.batch, case.heads, case.seq_len, case.head_dim),
        (case.batch, case.kv_heads, kv_seq_len, case.head_dim),
        (case.batch, case.kv_heads, kv_seq_len, v_head_dim),
        (case.batch, case.heads, case.seq_len, v_head_dim),
    )
    wide = torch.float64
    return Inputs(*(torch.randn(s, generator=draw, dtype=wide).to(case.dtype) for s in shapes))


@dataclass(frozen=True)
class Exact:
    """Exact results, float64, and how large what they were summed from is.

    dq = scale·Σ p·(grad_out·vᵀ)·k - scale·Σ p·delta·k is a difference. Where a query sees a single
    key, the two terms are equal and dq is 0; where it sees a few, dq is a small rest. An error
    relative to that rest would compare one rounding with another. So `sizes` holds, for dq and dk,
    the subtracted term where its norm is the larger one, and everywhere else the exact result.
    """

    results: tuple[Tensor, ...]
    sizes: tuple[Tensor, ...]


_one_at_a_time = threading.RLock()  # why: ranks that are threads would all compute the same


def exact(case: Case) -> Exact:
    with _one_at_a_time:
        return _exact(case.problem())


@lru_cache(maxsize=4)
def _exact(problem: Case) -> Exact:
    given = inputs(problem)
    return judge(given.q, given.k, given.v, given.grad_out, mask=problem.mask)


def judge(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, mask: Mask, scale: float | None = None
) -> Exact:
    """What attention of whole tensors and its gradients are exactly."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_attention(q, k, v, mask=mask, scale=scale)

    out, *grads = _with_gradients(attention, q, k, v, grad_out)
    delta = scale * (grad_out * out).sum(-1, keepdim=True)
    mean_k, *_, of_dk = _with_gradients(attention, q, k, k, delta * q)
    subtracted = (out, delta * mean_k, of_dk, grads[2])
    results = (out, *grads)
    sizes = tuple(max(pair, key=torch.norm) for pair in zip(results, subtracted, strict=True))
    return Exact(results, sizes)


def _with_gradients(attention, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """(out, dq, dk, dv) of attention(q, k, v), none of them attached to the inputs."""
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def errors(case: Case, group: GroupLike = None, *, device: torch.device | str = "cpu") -> Errors:
    """The errors of `case` on the ranks of `group`, the same on every rank.

    group: of processes or local. With strategy="hybrid" it is arranged as a table with rows of
    `case.neighbours` ranks. device: where this rank computes.
    """
    comm = resolve(group)
    given, judged = inputs(case), exact(case)

    def mine(x: Tensor) -> Tensor:
        return shard(x, 2, group=comm, layout=case.layout)

    computed = _with_gradients(
        lambda q, k, v: context_parallel_attention(
            q,
            k,
            v,
            group=arrange(comm, case),
            strategy=case.strategy,
            layout=case.layout,
            mask=case.mask,
            seq_len=case.seq_len,
            kv_seq_len=case.kv_seq_len,
            overlap=case.overlap,
            accumulate=case.accumulate,
        ),
        *(mine(x).to(device) for x in (given.q, given.k, given.v, given.grad_out)),
    )
    squares = [
        (x.double().cpu() - mine(result)).square().sum()
        for x, result in zip(computed, judged.results, strict=True)
    ]
    total = comm.all_reduce(torch.stack(squares).to(device)).cpu()
    sizes = [size.square().sum() for size in judged.sizes]
    return Errors(*(_ratio(s.item(), n.item()) for s, n in zip(total, sizes, strict=True)))


def bounds(case: Case, *, device: torch.device | str = "cpu") -> Errors:
    """What the errors of `case` may be at most. device: where plain attention is computed."""
    if case.dtype in (torch.float32, torch.float64):
        finer = torch.finfo(case.dtype).eps / torch.finfo(torch.float32).eps
        return Errors(**{name: bound * finer for name, bound in _FLOAT32.items()})
    times = _TIMES_PLAIN[case.accumulate]
    with _one_at_a_time:
        return Errors(*(times * error for error in _plain(case.problem(), str(device))))


@lru_cache(maxsize=64)
def _plain(problem: Case, device: str) -> tuple[float, ...]:
    """What scaled_dot_product_attention gets wrong on one process, in the dtype of the inputs.

    At least the error of rounding the exact result once to that dtype: with a few tokens plain
    attention may happen to hit it, which nothing can be better than. Unequal head dims get zeros
    appended: without them plain attention would not use its flash kernel but one that computes in
    float32 throughout, and the comparison would be one of kernels.
    """
    given, judged = inputs(problem), exact(problem)
    how = {"is_causal": True} if isinstance(problem.mask, Causal) else {}
    if not isinstance(problem.mask, Causal | Full):
        q_index = torch.arange(given.q.shape[2])[:, None]
        allowed = as_mask(problem.mask).allowed(q_index, torch.arange(given.k.shape[2]))
        how = {"attn_mask": allowed.to(device)}

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale, width = 1 / math.sqrt(q.shape[3]), max(q.shape[3], v.shape[3])
        q, k, padded = (F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, padded, scale=scale, enable_gqa=True, **how)
        return out[..., : v.shape[3]]

    tensors = (x.to(device) for x in (given.q, given.k, given.v, given.grad_out))
    computed = [x.cpu() for x in _with_gradients(plain, *tensors)]
    ours = zip(computed, judged.results, judged.sizes, strict=True)
    return tuple(
        max(relative_error(x, result, size), relative_error(size.to(problem.dtype), size, size))
        for x, result, size in ours
    )


def relative_error(x: Tensor, exact: Tensor, size: Tensor | None = None) -> float:
    """|x - exact| / |size|, in float64; size: None means the exact tensor itself."""
    size = exact if size is None else size
    squares = (x.double() - exact.double()).square().sum(), size.double().square().sum()
    return _ratio(*(square.item() for square in squares))


def _ratio(square: float, of: float) -> float:
    """The root of the quotient; 0/0 is 0: what is to be zero, and is."""
    if square == 0:
        return 0.0
    return math.sqrt(square / of) if of > 0 else math.inf


def arrange(group: Group, case: Case) -> Group | Grid:
    """The group as the strategy of the case wants it."""
    if case.strategy != "hybrid":
        return group
    if isinstance(group, LocalGroup):
        return group.grid(case.neighbours)
    return _mesh(group.size // case.neighbours, case.neighbours)


@lru_cache(maxsize=16)
def _mesh(rows: int, neighbours: int) -> Grid:
    device = torch.accelerator.current_accelerator(check_available=True)
    return as_grid(init_device_mesh(device.type if device else "cpu", (rows, neighbours)))
