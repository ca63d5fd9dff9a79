"""Attention of one shard of queries against one block of keys: its tiles, one after the other.

`attend` merges the tiles into a partial, `attend_backward` adds up their gradients. Both write into
what the caller holds, so that memory does not grow with the number of tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import pick
from .merge import Partial, accumulator_dtype, merge_into
from .tiles import Job, Tile

_UNIT = 1024  # a power of two: to divide by it loses nothing


def empty_partial(q: Tensor, v: Tensor) -> Partial:
    """The partial over no key: out (B, H, Sq, Dv) and lse (B, H, Sq) in the accumulator's dtype."""
    shape = (*q.shape[:-1], v.shape[-1])
    return Partial.empty(torch.empty(shape, dtype=accumulator_dtype(q.dtype), device=q.device))


def attend(
    total: Partial, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], job: Job
) -> None:
    """Merge the attention of q over k, v into `total`, tile by tile.

    q: (B, H, Sq, D); k: (B, Hkv, Skv, D); v: (B, Hkv, Skv, Dv); total: over the same queries.
    """
    v_dim = v.shape[-1]
    q, k, v = _one_head_dim(*_in_tile_dtype(job, q, k, v))
    for tile, allowed in _with_masks(tiles, q.device):
        rows, keys = tile.rows, tile.keys
        out, lse = pick(q, allowed).forward(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], tile.kind == "causal", allowed, job.scale
        )
        part = Partial(out[..., :v_dim].to(total.out.dtype), lse.to(total.lse.dtype))
        merge_into(total.rows(rows), part)


@dataclass(frozen=True)
class Rows:
    """All that the backward of a tile needs to know of its queries.

    q: (B, H, Sq, D); grad_out, out: (B, H, Sq, Dv); lse: (B, H, Sq), over all the keys.
    """

    q: Tensor
    grad_out: Tensor
    out: Tensor
    lse: Tensor


def rows_with_delta(q: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Rows:
    """The `Rows` of queries of which delta = rowsum(grad_out·out), (B, H, Sq), is known, not out.

    Kernels compute delta themselves. So out is zero but for two columns that hold delta, where v
    will have zeros: grad_out·vᵀ stays what it was, and rowsum(grad_out·out) becomes delta. The
    first column holds delta in units of 1024, the second what rounding to out's dtype leaves of it:
    float16 too, which ends at 65504, then holds a delta of 1e7, and one of 1e-2 to 2e-6.
    """
    units = grad_out.new_tensor([_UNIT, 1]).expand(*delta.shape, 2)
    coarse = (delta / _UNIT).to(grad_out.dtype)
    fine = (delta - coarse.to(delta.dtype) * _UNIT).to(grad_out.dtype)
    return Rows(
        q,
        grad_out=torch.cat([grad_out, units], -1),
        out=torch.cat([torch.zeros_like(grad_out), torch.stack([coarse, fine], -1)], -1),
        lse=lse,
    )


def rowsum(grad_out: Tensor, out: Tensor) -> Tensor:
    """delta: (B, H, S), in the accumulator's dtype."""
    dtype = accumulator_dtype(out.dtype)
    return (grad_out.to(dtype) * out.to(dtype)).sum(-1)


def query_rows(
    q: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Rows:
    """The `Rows` of this call. A gradient of lse lowers delta: d lse/d scores is p itself."""
    if grad_lse is None:
        return Rows(q, grad_out, out, lse)
    return rows_with_delta(q, grad_out, lse, rowsum(grad_out, out) - grad_lse)


def attend_backward(
    rows: Rows,
    k: Tensor,
    v: Tensor,
    tiles: tuple[Tile, ...],
    job: Job,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the gradients of one shard of queries against one block of keys to dq, dk and dv.

    dq, dk, dv: shaped as q, k, v, in the accumulator's dtype.
    """
    q, grad_out, out, k, v = _one_head_dim(
        *_in_tile_dtype(job, rows.q, rows.grad_out, rows.out, k, v)
    )
    # why: p = exp(scores - lse) of a row that sees nothing has to be 0, and lse = -inf makes it nan
    lse = rows.lse.masked_fill(rows.lse == -torch.inf, torch.inf)
    for tile, allowed in _with_masks(tiles, q.device):
        r, keys = tile.rows, tile.keys
        grads = pick(q, allowed).backward(
            grad_out[:, :, r],
            q[:, :, r],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, r],
            lse[:, :, r],
            tile.kind == "causal",
            allowed,
            job.scale,
        )
        sums = dq[:, :, r], dk[:, :, keys], dv[:, :, keys]
        for total, grad in zip(sums, grads, strict=True):
            total += grad[..., : total.shape[-1]]


def _with_masks(
    tiles: tuple[Tile, ...], device: torch.device
) -> Iterator[tuple[Tile, Tensor | None]]:
    """Each tile with its mask, if it has one; not the tiles that a mask_mod leaves empty."""
    for tile in tiles:
        if tile.allowed is None:
            yield tile, None
            continue
        allowed = tile.allowed()
        if allowed.any():
            yield tile, torch.tensor(allowed, device=device)


def _in_tile_dtype(job: Job, *tensors: Tensor) -> list[Tensor]:
    """Half precision becomes float32 in an exact job."""
    if not job.exact:
        return list(tensors)
    return [x.to(accumulator_dtype(x.dtype)) for x in tensors]


def _one_head_dim(*tensors: Tensor) -> list[Tensor]:
    """All with the widest head dim, as kernels want it: appended zeros change no score or sum."""
    widest = max(x.shape[-1] for x in tensors)
    return [_pad_head_dim(x, widest) for x in tensors]


def _pad_head_dim(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
