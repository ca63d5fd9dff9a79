"""Who is compared: cpref's strategies, one process, PyTorch's own ring, and packages from PyPI.

A contender takes whole tensors apart, attends to its part, differentiably, and puts parts together
again. Peers are driven as their authors wrote them, in the layout they prefer; those that are not
installed are left out, and the table says so.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..attention import STRATEGIES, context_parallel_attention
from ..layout import shard, unshard

aten = torch.ops.aten


@dataclass(frozen=True)
class Contender:
    """One way to compute causal attention.

    alone: it runs on rank 0 only, with the threads of all ranks. split, join: whole (B, H, S, D) to
    this rank's part and back. attend: (q, k, v) parts to the out part, differentiable.
    takes: the dtypes that it can compute.
    """

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    split: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]
    alone: bool = False
    takes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _sharded(name: str, attend: Callable, layout: str, **options) -> Contender:
    return Contender(
        name,
        attend,
        split=partial(shard, dim=2, layout=layout),
        join=partial(unshard, dim=2, layout=layout),
        **options,
    )


def contenders(ranks: int, heads: int) -> Iterator[Contender]:
    """All that can run here, the baseline first."""
    yield Contender(
        "one process, SDPA",
        partial(F.scaled_dot_product_attention, is_causal=True),
        split=lambda x: x,
        join=lambda x: x,
        alone=True,
    )
    for strategy, layout in itertools.product(STRATEGIES, ("zigzag", "striped", "contiguous")):
        if strategy == "hybrid":
            if ranks % 2 == 0 and ranks > 2 and heads % 2 == 0:
                device = torch.accelerator.current_accelerator(check_available=True)
                mesh = init_device_mesh(device.type if device else "cpu", (ranks // 2, 2))
                yield _ours(strategy, layout, group=mesh)
        elif strategy != "ulysses" or heads % ranks == 0:
            yield _ours(strategy, layout)
    yield _sharded("PyTorch's own ring, zigzag", _PyTorchRing.apply, "zigzag")
    if find_spec("ringmaster"):
        yield _sharded("axolotl-ringmaster, p2p", _ringmaster, "contiguous")
    if find_spec("ring_attention_pytorch"):
        only = (torch.float32,)  # why: on the CPU it multiplies float32 by the inputs' dtype
        yield _sharded("ring-attention-pytorch", _ring_attention_pytorch, "contiguous", takes=only)


def missing() -> list[str]:
    """The peers that are not installed: pip install 'cpref[peers]' brings them."""
    peers = {"ringmaster": "axolotl-ringmaster", "ring_attention_pytorch": "ring-attention-pytorch"}
    return [package for module, package in peers.items() if not find_spec(module)]


def _ours(strategy: str, layout: str, **options) -> Contender:
    attend = partial(context_parallel_attention, strategy=strategy, layout=layout, **options)
    return _sharded(f"cpref {strategy}, {layout}", attend, layout)


class _PyTorchRing(torch.autograd.Function):
    """The loop of torch.distributed.tensor.experimental, given the CPU kernel it does not choose.

    why private names: on the CPU its public entry raises NotImplementedError.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring = _pytorch_ring_module()
        out, lse, *_ = ring._templated_ring_attention(
            dist.group.WORLD,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu,
            q,
            k,
            v,
            is_causal=True,
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        ring = _pytorch_ring_module()
        q, k, v, out, lse = ctx.saved_tensors

        def kernel(grad_out, query, key, value, out, logsumexp, is_causal, **_):
            # why: given the lse of two chunks as one view, the kernel expects it contiguous
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, logsumexp.contiguous(), 0.0, is_causal
            )

        return ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, grad_out, "grad_out", q, k, v, out, lse, is_causal=True
        )[:3]


def _pytorch_ring_module():
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _ringmaster(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    out = ring_p2p_attention(
        q, k, v, group=dist.group.WORLD, causal=True, scaling=q.shape[-1] ** -0.5
    )
    return out.transpose(1, 2)


def _ring_attention_pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = ring_flash_attn(
        q, k, v, causal=True, ring_reduce_col=True, ring_size=dist.get_world_size()
    )
    return out.transpose(1, 2)
