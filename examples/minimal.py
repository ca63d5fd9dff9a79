"""Attention over a sequence that two ranks share, forward and backward, and its error.

    torchrun --standalone --nproc-per-node=2 examples/minimal.py

Runs on CPUs and on GPUs alike. What torchrun starts is this program, once for each rank.
"""

import torch
import torch.distributed as dist

import cpref

device = cpref.init()

# The whole sequence, the same on every rank; in training each rank would only make its own part.
torch.manual_seed(0)
q, k, v, grad_out = (
    torch.randn(1, 4, 4096, 64, dtype=torch.bfloat16, device=device) for _ in range(4)
)

# The three lines that matter: take your shard, attend, go backward.
mine = [cpref.shard(x, dim=2).requires_grad_() for x in (q, k, v)]
out = cpref.context_parallel_attention(*mine)
out.backward(cpref.shard(grad_out, dim=2))

# The same on one device: in float64, and in bfloat16 as torch does it.
whole = [cpref.unshard(x, dim=2) for x in (out.detach(), *(x.grad for x in mine))]


def on_one_device(dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(dtype))]


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


exact, plain = on_one_device(torch.float64), on_one_device(torch.bfloat16)
good = True
for name, x, e, p in zip(("out", "dq", "dk", "dv"), whole, exact, plain, strict=True):
    ours, torchs = error(x, e), error(p, e)
    good = good and ours <= 1.6 * torchs
    if dist.get_rank() == 0:
        print(f"{name:3}  error {ours:.2e} on {dist.get_world_size()} ranks, {torchs:.2e} on one")

cpref.shutdown()
raise SystemExit(0 if good else 1)
