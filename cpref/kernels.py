"""The kernels that compute one tile, each forward and backward, behind one signature.

forward(q, k, v, causal, allowed, scale) -> (out, lse)
backward(grad_out, q, k, v, out, lse, causal, allowed, scale) -> (dq, dk, dv)

q, out, grad_out: (B, H, Sq, D); k, v: (B, Hkv, Skv, D), H divisible by Hkv; lse: (B, H, Sq), in
natural logarithm. causal: query i sees the keys 0..i, Sq = Skv. allowed: (Sq, Skv) bool, or None.

The backward takes the out and lse of the whole row, not of the tile: with those, the gradients of
tiles simply add up. Inside, every kernel computes

    p = exp(scale·q·kᵀ - lse)               delta = rowsum(grad_out·out)
    dv = pᵀ·grad_out                        ds = p·(grad_out·vᵀ - delta)·scale
    dq = ds·k                               dk = dsᵀ·q

Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from .merge import accumulator_dtype

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """A way to compute a tile."""

    @abstractmethod
    def takes(self, q: Tensor, allowed: Tensor | None) -> bool:
        """Whether the kernel can compute this tile, from the device, dtype and head dim of q."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, allowed: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        allowed: Tensor | None,
        scale: float,
    ) -> Gradients: ...


class CpuFlash(Kernel):
    """torch's flash attention for the CPU: float64, float32 and the half types, head dim to 576."""

    def takes(self, q: Tensor, allowed: Tensor | None) -> bool:
        return q.device.type == "cpu" and q.shape[-1] <= 576

    def forward(self, q, k, v, causal, allowed, scale):
        bias = None if allowed is None else _bias(allowed, q.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _dense(q), _dense(k), _dense(v), 0.0, causal, attn_mask=bias, scale=scale
        )
        if allowed is not None:  # why: this kernel says lse = 0 for a row that sees nothing
            lse = lse.masked_fill(~allowed.any(-1), -torch.inf)
        return out, lse

    def backward(self, grad_out, q, k, v, out, lse, causal, allowed, scale):
        bias = None if allowed is None else _bias(allowed, q.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _dense(grad_out),
            _dense(q),
            _dense(k),
            _dense(v),
            _dense(out),
            lse,
            0.0,
            causal,
            attn_mask=bias,
            scale=scale,
        )


class CudaFlash(Kernel):
    """torch's flash attention for CUDA: the half types, head dim to 256, no mask."""

    def takes(self, q: Tensor, allowed: Tensor | None) -> bool:
        half = q.dtype in (torch.float16, torch.bfloat16)
        return q.device.type == "cuda" and half and q.shape[-1] <= 256 and allowed is None

    def forward(self, q, k, v, causal, allowed, scale):
        head_dim = q.shape[-1]
        q, k, v = (_to_eights(_dense(x)) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, return_debug_mask=False, scale=scale
        )
        return out[..., :head_dim], lse

    def backward(self, grad_out, q, k, v, out, lse, causal, allowed, scale):
        head_dim = q.shape[-1]
        grad_out, q, k, v, out = (_to_eights(_dense(x)) for x in (grad_out, q, k, v, out))
        no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # why: no dropout, no seed
        no_offset = torch.zeros((), dtype=torch.uint64, device=q.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            no_seed,
            no_offset,
            scale=scale,
        )
        return tuple(grad[..., :head_dim] for grad in grads)


class Mathematics(Kernel):
    """The formulas themselves, in float32 or float64, for every device, dtype and head dim.

    Works through the queries a few rows at a time, so that the scores of a long tile fit.
    """

    _scores_at_once = 1 << 24

    def takes(self, q: Tensor, allowed: Tensor | None) -> bool:
        return True

    def forward(self, q, k, v, causal, allowed, scale):
        q, k, v, grouped = _grouped(q, k, v)
        outs, lses = [], []
        for rows in self._chunks(q, k):
            scores = self._scores(q, k, rows, causal, allowed, scale)
            lse = scores.logsumexp(-1)
            p = (scores - _finite(lse).unsqueeze(-1)).exp()
            outs.append(p @ v)
            lses.append(lse)
        out, lse = torch.cat(outs, 3), torch.cat(lses, 3)
        return out.flatten(1, 2).to(grouped), lse.flatten(1, 2)

    def backward(self, grad_out, q, k, v, out, lse, causal, allowed, scale):
        heads = k.shape[1]
        q, k, v, grouped = _grouped(q, k, v)
        grad_out, out = (x.to(q.dtype).unflatten(1, (heads, -1)) for x in (grad_out, out))
        lse = lse.unflatten(1, (heads, -1))
        delta = (grad_out * out).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in self._chunks(q, k):
            scores = self._scores(q, k, rows, causal, allowed, scale)
            p = (scores - lse[:, :, :, rows].unsqueeze(-1)).exp()
            grad = grad_out[:, :, :, rows]
            dv += (p.mT @ grad).sum(2, keepdim=True)
            ds = p * (grad @ v.mT - delta[:, :, :, rows].unsqueeze(-1)) * scale
            dq[:, :, :, rows] = ds @ k
            dk += (ds.mT @ q[:, :, :, rows]).sum(2, keepdim=True)
        return dq.flatten(1, 2).to(grouped), dk.squeeze(2).to(grouped), dv.squeeze(2).to(grouped)

    def _chunks(self, q: Tensor, k: Tensor):
        batch, heads, groups, rows, _ = q.shape
        size = max(1, self._scores_at_once // (batch * heads * groups * k.shape[3]))
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))

    def _scores(self, q, k, rows, causal, allowed, scale):
        scores = q[:, :, :, rows] @ k.mT * scale  # (B, Hkv, G, rows, Skv)
        if causal:
            index = torch.arange(k.shape[3], device=q.device)
            scores = scores.masked_fill(index > index[rows, None], -torch.inf)
        if allowed is not None:
            scores = scores.masked_fill(~allowed[rows], -torch.inf)
        return scores


KERNELS: tuple[Kernel, ...] = (CpuFlash(), CudaFlash(), Mathematics())


def pick(q: Tensor, allowed: Tensor | None) -> Kernel:
    """The first kernel that can compute the tile."""
    return next(kernel for kernel in KERNELS if kernel.takes(q, allowed))


def _dense(x: Tensor) -> Tensor:
    # why: a last dimension with a stride other than 1 is read wrongly by the CPU kernel, without a
    # word, and refused by the CUDA kernel
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    # why: next to float64 inputs the CPU kernel reads a float32 mask wrongly, without a word
    zeros = torch.zeros(allowed.shape, dtype=accumulator_dtype(dtype))
    return zeros.masked_fill(~allowed, -torch.inf)[None, None]


def _to_eights(x: Tensor) -> Tensor:
    """Zeros appended to the head dim up to a multiple of 8, as the CUDA kernel wants it."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """q as (B, Hkv, G, Sq, D), k and v as (B, Hkv, 1, Skv, D), in the accumulator's dtype."""
    dtype = accumulator_dtype(q.dtype)
    q = q.to(dtype).unflatten(1, (k.shape[1], -1))
    return q, k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2), k.dtype


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0)
