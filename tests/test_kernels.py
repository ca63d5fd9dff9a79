"""Each kernel's tile, forward and backward, against the judge."""

import pytest
import torch

from cpref import Causal, Full, MaskMod, reference_attention
from cpref.exactness import relative_error
from cpref.kernels import CpuFlash, CudaFlash, Mathematics, pick

KERNELS = [CpuFlash(), Mathematics()]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

SCALE = 0.3
BOUND = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def draw(dtype=torch.float64, heads=4, kv_heads=2, rows=21, keys=21, head_dim=8, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, rows, head_dim), *[(2, kv_heads, keys, head_dim)] * 2]
    shapes.append(shapes[0])
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(dtype).to(device) for x in tensors]


def half_hidden(rows, keys):
    """Hides some keys of every row, and everything from two of the rows."""
    allowed = (torch.arange(rows)[:, None] * 3 + torch.arange(keys)) % 4 != 0
    allowed[1] = allowed[rows - 1] = False
    return allowed


def exact(q, k, v, grad_out, mask):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = reference_attention(*leaves, mask=mask, scale=SCALE)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())


def exact_lse(q, k, allowed):
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q.double() @ k.mT * SCALE).masked_fill(~allowed, -torch.inf)
    return scores.logsumexp(-1)


def tile(kind, rows=21, keys=21):
    """(causal, allowed, the same as a mask, the same as a bool table) of a kind of tile."""
    table = half_hidden(rows, keys)
    everything = torch.ones(rows, keys, dtype=torch.bool)
    return {
        "full": (False, None, Full(), everything),
        "causal": (True, None, Causal(), everything.tril()),
        "masked": (False, table, MaskMod(lambda q, kv: table[q, kv]), table),
    }[kind]


def results(kernel, q, k, v, grad_out, causal, allowed):
    out, lse = kernel.forward(q, k, v, causal, allowed, SCALE)
    blind = lse.masked_fill(lse == -torch.inf, torch.inf)  # why: what attend_backward hands over
    grads = kernel.backward(grad_out, q, k, v, out, blind, causal, allowed, SCALE)
    return out, lse, grads


@kernels
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (4, 1)])
def test_a_tile_is_exact_forward_and_backward(kernel, kind, dtype, heads, kv_heads):
    q, k, v, grad_out = draw(dtype, heads, kv_heads)
    causal, allowed, mask, table = tile(kind)
    out, lse, grads = results(kernel, q, k, v, grad_out, causal, allowed)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    for x, right in zip((out, *grads), exact(q, k, v, grad_out, mask), strict=True):
        assert relative_error(x, right) <= BOUND[dtype]
    # why: for the half types torch's kernel has an exponential of fewer bits
    close = 1e-4 if dtype in (torch.bfloat16, torch.float16) else BOUND[dtype]
    torch.testing.assert_close(lse.double(), exact_lse(q, k, table), rtol=close, atol=close)


@kernels
@pytest.mark.parametrize(("rows", "keys"), [(21, 5), (3, 40), (1, 1)])
def test_a_full_tile_may_be_of_any_shape(kernel, rows, keys):
    q, k, v, grad_out = draw(rows=rows, keys=keys)
    out, _, grads = results(kernel, q, k, v, grad_out, False, None)
    right_out, right_dq, right_dk, right_dv = exact(q, k, v, grad_out, Full())
    assert relative_error(out, right_out) <= 1e-14
    assert relative_error(grads[2], right_dv) <= 1e-14
    if keys > 1:  # why: over a single key, dq and dk are 0
        assert relative_error(grads[0], right_dq) <= 1e-14
        assert relative_error(grads[1], right_dk) <= 1e-14


@kernels
@pytest.mark.parametrize("dtype", list(BOUND))
def test_a_row_that_sees_nothing_is_zero(kernel, dtype):
    q, k, v, grad_out = draw(dtype)
    allowed = half_hidden(21, 21)
    out, lse, (dq, dk, dv) = results(kernel, q, k, v, grad_out, False, allowed)
    blind = ~allowed.any(-1)
    assert (out[:, :, blind] == 0).all()
    assert (lse[:, :, blind] == -torch.inf).all()
    assert (dq[:, :, blind] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


@kernels
def test_the_gradients_of_tiles_add_up_with_the_lse_of_the_whole_row(kernel):
    q, k, v, grad_out = draw()
    out, lse, whole = results(kernel, q, k, v, grad_out, False, None)
    dq = torch.zeros_like(q)
    for keys in (slice(0, 8), slice(8, 21)):
        part_dq, dk, dv = kernel.backward(
            grad_out, q, k[:, :, keys], v[:, :, keys], out, lse, False, None, SCALE
        )
        dq += part_dq
        torch.testing.assert_close(dk, whole[1][:, :, keys], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dv, whole[2][:, :, keys], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(dq, whole[0], rtol=1e-12, atol=1e-13)


VIEWS = {
    "head dim strided": lambda x: x.mT.contiguous().mT,
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "slice of more": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
}


@kernels
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "grad_out"])
def test_views_give_what_their_copies_give(kernel, view, which):
    tensors = draw()
    as_copies = results(kernel, *tensors, True, None)
    tensors[which] = view(tensors[which])
    as_views = results(kernel, *tensors, True, None)
    torch.testing.assert_close(as_views, as_copies, rtol=1e-12, atol=1e-13)


@kernels
def test_an_expanded_head_gives_what_its_copies_give(kernel):
    q, k, v, grad_out = draw(heads=4, kv_heads=1)
    k, v, grad_out = k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1), grad_out[:, :1]
    grad_out = grad_out.expand(-1, 4, -1, -1)
    copies = [x.contiguous() for x in (q, k, v, grad_out)]
    as_views = results(kernel, q, k, v, grad_out, False, None)
    torch.testing.assert_close(as_views, results(kernel, *copies, False, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_600_of_1024_keys_hidden(dtype):
    q, k, v, grad_out = draw(dtype, rows=64, keys=1024)
    table = torch.ones(64, 1024, dtype=torch.bool)
    table[:, :600] = False
    out, _, grads = results(CpuFlash(), q, k, v, grad_out, False, table)
    right = exact(q, k, v, grad_out, MaskMod(lambda q, kv: table[q, kv]))
    for x, exactly in zip((out, *grads), right, strict=True):
        assert relative_error(x, exactly) <= BOUND[dtype]


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_mathematics_in_pieces_is_mathematics_in_one(kind, monkeypatch):
    tensors = draw(torch.float64)
    causal, allowed, _, _ = tile(kind)
    at_once = results(Mathematics(), *tensors, causal, allowed)
    monkeypatch.setattr(Mathematics, "_scores_at_once", 2 * 4 * 21 * 5)
    in_pieces = results(Mathematics(), *tensors, causal, allowed)
    torch.testing.assert_close(in_pieces, at_once, rtol=1e-12, atol=1e-13)


def test_the_kernel_is_picked_by_head_dim_and_device():
    narrow, wide = torch.zeros(1, 1, 1, 576), torch.zeros(1, 1, 1, 577)
    assert isinstance(pick(narrow, None), CpuFlash)
    assert isinstance(pick(wide, None), Mathematics)
    on_meta = torch.zeros(1, 1, 1, 8, device="meta")
    assert isinstance(pick(on_meta, None), Mathematics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_dim_that_no_flash_kernel_takes(dtype):
    q, k, v, grad_out = draw(dtype, head_dim=600)
    out, _, grads = results(pick(q, None), q, k, v, grad_out, False, None)
    for x, right in zip((out, *grads), exact(q, k, v, grad_out, Full()), strict=True):
        assert relative_error(x, right) <= BOUND[dtype]


@on_a_gpu
@pytest.mark.parametrize("head_dim", [8, 12, 64])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_the_flash_kernel_of_cuda_is_exact(kind, head_dim):
    tensors = draw(torch.bfloat16, head_dim=head_dim, device="cuda")
    causal, _, mask, _ = tile(kind)
    out, _, grads = results(CudaFlash(), *tensors, causal, None)
    for x, right in zip((out, *grads), exact(*tensors, mask), strict=True):
        assert relative_error(x, right) <= BOUND[torch.bfloat16]
