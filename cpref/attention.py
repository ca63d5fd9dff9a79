"""Attention over a sequence that is sharded over ranks: the one public call."""

import math
import sys
from collections.abc import Callable
from functools import wraps
from numbers import Real
from types import ModuleType

import torch
from torch import Tensor

from .comm import Grid, Group, GroupLike, as_grid, resolve
from .layout import place, require_length
from .mask import Causal, Mask, as_mask
from .strategies import Saved, all_gather, hybrid, reduce_scatter, ring, ulysses
from .tiles import Job

STRATEGIES: dict[str, ModuleType] = {
    "ring": ring,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "ulysses": ulysses,
    "hybrid": hybrid,
}
ACCUMULATE = ("fp32", "exact")


def _between_graphs(function: Callable) -> Callable:
    """torch.compiler.disable, applied at the call: the compiler takes a second to import."""

    @wraps(function)
    def call(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)

    call._torchdynamo_disable = True  # why: not even this much is to be traced
    return call


@_between_graphs
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike = None,
    strategy: str = "ring",
    layout: str = "zigzag",
    mask: Mask | Callable[[Tensor, Tensor], Tensor] = Causal(),  # noqa: B008 - frozen
    scale: float | None = None,
    seq_len: int | None = None,
    kv_seq_len: int | None = None,
    overlap: bool = True,
    accumulate: str = "fp32",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ under the mask)·v over the whole sequence, from this rank's shards.

    Every rank of the group makes the same call, each with its own shards.

    q: (B, H, S_local, D), any float dtype; k: (B, Hkv, S_local, D) and v: (B, Hkv, S_local, Dv) of
    the same dtype and device, H divisible by Hkv. Views and non-contiguous tensors are fine.
    group: ProcessGroup, one-dimensional DeviceMesh, group of `run_local`, or None for the default
    group. For "hybrid" a two-dimensional DeviceMesh (rows of the ring x neighbours that exchange
    heads) or a `Grid`.
    strategy: what travels, "ring", "all_gather", "reduce_scatter", "ulysses" or "hybrid"; see
    `cpref.strategies` for the bytes that each sends.
    layout: how `shard` dealt the sequence out, "contiguous", "zigzag" or "striped".
    mask: `Full()`, `Causal()`, `SlidingWindow(size)`, `Documents(lengths)`, or a function
    (q_index, kv_index) -> bool of global positions.
    scale: of the scores; None means 1/sqrt(D).
    seq_len, kv_seq_len: global lengths of q and of k, v. None means P times the local length, and
    the length of q; give seq_len when it is not divisible by P.
    overlap: compute while tensors travel. Off, the same numbers come later.
    accumulate: "fp32" merges partials in float32; "exact" computes half precision tiles in float32
    too, so that the error does not grow with P. float64 inputs are float64 throughout.
    return_lse: also return the log-sum-exp of the scores.

    Returns out (B, H, S_local, Dv) in the dtype of q; with return_lse also lse (B, H, S_local),
    float32 (float64 for float64). A row that may attend to nothing gives out 0 and lse -inf.
    Differentiable in q, k, v, through out and lse, once.

    Raises ValueError or TypeError, on every rank, if the shapes, dtypes, devices or arguments do
    not fit each other or differ between ranks; `RankError` if another rank dies or hangs.

    Sources: Liu et al. 2023, Ring Attention (arXiv 2310.01889), and those named in the strategies.
    """
    comm = resolve(group)

    def check() -> tuple[dict[str, object], tuple[list[Tensor], Job, Group | Grid]]:
        tensors = _require_tensors(q, k, v)
        _require_known("strategy", strategy, tuple(STRATEGIES))
        _require_known("accumulate", accumulate, ACCUMULATE)
        moves = _require_group(strategy, group, comm, heads=q.shape[1])
        total = q.shape[2] * comm.size if seq_len is None else seq_len
        kv_total = total if kv_seq_len is None else kv_seq_len
        job = Job(
            q=place(total, comm.size, layout),
            kv=place(kv_total, comm.size, layout, name="kv_seq_len"),
            mask=as_mask(mask),
            scale=1 / math.sqrt(q.shape[3]) if scale is None else _require_scale(scale),
            kv_heads=k.shape[1],
            dtype=tensors[0].dtype,
            exact=accumulate == "exact",
            overlap=overlap,
            return_lse=return_lse,
        )
        job.mask.require_lengths(total, kv_total)
        shape = f"; expected {_EXPECTED}"
        require_length("q", q.shape[2], job.q, comm.rank, expected=shape)
        require_length(
            "k", k.shape[2], job.kv, comm.rank, name_of_total="kv_seq_len", expected=shape
        )
        return _terms(job, strategy, tensors), (tensors, job, moves)

    tensors, job, moves = comm.agree("context_parallel_attention", check)
    out, lse = _Attention.apply(*tensors, STRATEGIES[strategy], job, moves)
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """The one autograd.Function, whatever travels."""

    @staticmethod
    def forward(ctx, q, k, v, strategy: ModuleType, job: Job, group: Group | Grid):
        with resolve(group).naming_failures("attention forward"):
            part, saved = strategy.forward(q, k, v, job, group)
        ctx.save_for_backward(*saved)
        ctx.strategy, ctx.job, ctx.group = strategy, job, group
        if not job.return_lse:
            ctx.mark_non_differentiable(part.lse)
        return part.out, part.lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        saved = Saved(*ctx.saved_tensors)
        if not ctx.job.return_lse:
            grad_lse = None
        with torch.no_grad(), resolve(ctx.group).naming_failures("attention backward"):
            grads = ctx.strategy.backward(grad_out, grad_lse, saved, ctx.job, ctx.group)
            grads = [grad.to(ctx.job.dtype) for grad in grads]
        if torch.is_grad_enabled():  # with create_graph
            grads = [_Once.apply(grad.requires_grad_()) for grad in grads]
        return *grads, None, None, None


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again, and says so rather than pass for constant."""

    @staticmethod
    def forward(ctx, grad):
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("context_parallel_attention can be differentiated once, not twice")


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPECTED = "(B, H, S_local, D), as in scaled_dot_product_attention"


def _require_tensors(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """q, k, v in the dtype to compute in, after a check that they fit each other."""
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; it must be a tensor {_EXPECTED}")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {_EXPECTED}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} is {x.dtype}; it must be {', '.join(map(str, _DTYPES))}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must be together")
    tensors = _as_autocast(q, k, v)
    for name, x in zip("kv", tensors[1:], strict=True):
        if x.dtype != tensors[0].dtype:
            raise TypeError(f"{name} is {x.dtype}, q {tensors[0].dtype}; they must be the same")
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"{shapes}: the batch, dimension 0, must be equal; expected {_EXPECTED}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"{shapes}: k and v must agree in heads and tokens; expected {_EXPECTED}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: q and k must agree in the head dim; expected {_EXPECTED}")
    if 0 in (*q.shape[:2], q.shape[3], *k.shape[:2], v.shape[3]):
        raise ValueError(f"{shapes}: batch, heads and head dim must be at least 1")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads and k {k.shape[1]}; the heads of q must be a multiple of "
            f"those of k; expected {_EXPECTED}"
        )
    return tensors


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """What autocast would make of the inputs of scaled_dot_product_attention."""
    device = tensors[0].device.type
    known = torch.amp.is_autocast_available(device)
    if not known or not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _require_scale(scale: float) -> float:
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"scale is {scale!r}; it must be a finite number, or None for 1/sqrt(D)")
    return float(scale)


def _require_known(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{argument} is {value!r}; it must be one of {', '.join(known)}")


def _require_group(strategy: str, group: GroupLike, comm: Group, heads: int) -> Group | Grid:
    """The group as the strategy wants it, if it can share the query heads where it has to."""
    if strategy == "hybrid":
        grid = as_grid(group)
        _require_shared(heads, grid.ulysses.size, strategy, "ranks of a row")
        return grid
    if strategy == "ulysses":
        _require_shared(heads, comm.size, strategy, "ranks")
    return comm


def _require_shared(heads: int, size: int, strategy: str, ranks: str) -> None:
    if heads % size == 0:
        return
    divisors = [str(n) for n in range(2, heads + 1) if heads % n == 0] or ["1"]
    raise ValueError(
        f"q has {heads} heads, which {size} {ranks} cannot share under strategy={strategy!r}; "
        f"use 'ring', or {' or '.join(divisors)} {ranks}"
    )


def _terms(job: Job, strategy: str, tensors: list[Tensor]) -> dict[str, object]:
    """What has to be equal on all ranks for their moves to fit together."""
    q, _, v = tensors
    with_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return {
        "strategy": strategy,
        "layout": job.q.layout,
        "mask": job.mask.signature(job.q.seq_len, job.kv.seq_len),
        "seq_len": job.q.seq_len,
        "kv_seq_len": job.kv.seq_len,
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": job.kv_heads,
        "head_dim": q.shape[3],
        "v_head_dim": v.shape[3],
        "dtype": job.dtype,
        "device": q.device.type,
        "scale": job.scale,
        "accumulate": "exact" if job.exact else "fp32",
        "return_lse": job.return_lse,
        "requires_grad": with_grad,
    }
