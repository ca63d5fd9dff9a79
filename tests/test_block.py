"""A shard of queries against a block of keys: tiles merged forward, added up backward."""

import pytest
import torch

from cpref import Causal, Documents, Full, SlidingWindow, reference_attention
from cpref.block import (
    Rows,
    attend,
    attend_backward,
    empty_partial,
    query_rows,
    rows_with_delta,
    rowsum,
)
from cpref.exactness import relative_error
from cpref.layout import LAYOUTS, place
from cpref.tiles import Job

S, P = 200, 2
MASKS = [Full(), Causal(), SlidingWindow(37), Documents([30, 90, 80])]


def job(mask=Causal(), layout="zigzag", dtype=torch.float64, **options):  # noqa: B008 - frozen
    placement = place(S, P, layout)
    return Job(q=placement, kv=placement, mask=mask, scale=0.3, kv_heads=2, dtype=dtype, **options)


def draw(dtype=torch.float64, v_head_dim=8):
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 4, S, 8), (2, 2, S, 8), (2, 2, S, v_head_dim), (2, 4, S, v_head_dim)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def exact(q, k, v, grad_out, mask):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = reference_attention(*leaves, mask=mask, scale=0.3)
    return out.detach(), torch.autograd.grad(out, leaves, grad_out.double())


def shards(plan, x):
    return [x[:, :, torch.tensor(plan.q.positions(rank))] for rank in range(P)]


def forward(plan, q, k, v):
    """The partials of all shards, over all blocks."""
    totals = []
    for rank, mine in enumerate(shards(plan, q)):
        total = empty_partial(mine, v)
        for source, block in enumerate(zip(shards(plan, k), shards(plan, v), strict=True)):
            attend(total, mine, *block, plan.tiles(rank, source), plan)
        totals.append(total)
    return totals


def backward(plan, rows_of, k, v):
    """dq, dk, dv of all shards; rows_of: the Rows of each."""
    k_shards, v_shards = shards(plan, k), shards(plan, v)
    dqs = [torch.zeros_like(rows.q) for rows in rows_of]
    dks, dvs = [torch.zeros_like(x) for x in k_shards], [torch.zeros_like(x) for x in v_shards]
    for rank, rows in enumerate(rows_of):
        for source in range(P):
            attend_backward(
                rows,
                k_shards[source],
                v_shards[source],
                plan.tiles(rank, source),
                plan,
                dqs[rank],
                dks[source],
                dvs[source],
            )
    return dqs, dks, dvs


def together(plan, parts):
    order = torch.cat([torch.tensor(plan.q.positions(rank)) for rank in range(P)])
    return torch.cat(parts, 2)[:, :, order.argsort()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("v_head_dim", [8, 5, 12])
def test_blocks_together_give_the_attention_and_gradients_of_one(layout, mask, v_head_dim):
    plan, (q, k, v, grad_out) = job(mask, layout), draw(v_head_dim=v_head_dim)
    right_out, right_grads = exact(q, k, v, grad_out, mask)
    parts = forward(plan, q, k, v)
    assert relative_error(together(plan, [part.out for part in parts]), right_out) < 1e-14

    rows = [
        query_rows(mine, grad, part.out, part.lse, None)
        for mine, grad, part in zip(shards(plan, q), shards(plan, grad_out), parts, strict=True)
    ]
    for grads, right in zip(backward(plan, rows, k, v), right_grads, strict=True):
        assert relative_error(together(plan, grads), right) < 1e-14


@pytest.mark.parametrize("v_head_dim", [8, 5, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_delta_does_in_place_of_out(v_head_dim, dtype):
    """The two extra columns change nothing but where delta comes from."""
    plan, (q, k, v, grad_out) = job(dtype=dtype), draw(dtype, v_head_dim)
    q, k, v, grad_out = (shards(plan, x)[0] for x in (q, k, v, grad_out))
    total = empty_partial(q, v)
    tiles = plan.tiles(0, 0)
    attend(total, q, k, v, tiles, plan)
    out = total.out.to(dtype)
    with_out = Rows(q, grad_out, out, total.lse)
    with_delta = rows_with_delta(q, grad_out, total.lse, rowsum(grad_out, out))
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32

    def gradients(rows):
        sums = [torch.zeros_like(x, dtype=accumulator) for x in (q, k, v)]
        attend_backward(rows, k, v, tiles, plan, *sums)
        return sums

    # why: kernels round ds to bfloat16, and the last bit of delta turns a few of those roundings
    close = 1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps / 16
    for one, other in zip(gradients(with_out), gradients(with_delta), strict=True):
        assert relative_error(one, other) < close


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e7])
def test_the_columns_hold_a_delta_of_any_size(dtype, size):
    delta = torch.randn(1, 2, 50, dtype=torch.float64) * size
    grad_out = torch.randn(1, 2, 50, 8).to(dtype)
    rows = rows_with_delta(grad_out, grad_out, delta[..., 0], delta)
    held = (rows.grad_out.double() * rows.out.double()).sum(-1)
    assert relative_error(held, delta) < torch.finfo(dtype).eps ** 2


def test_a_gradient_of_lse_is_the_gradient_of_its_definition():
    plan, (q, k, v, grad_out) = job(Full()), draw()
    grad_lse = grad_out[..., 0].clone()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    lse = (leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * 0.3).logsumexp(-1)
    out = reference_attention(*leaves, mask=Full(), scale=0.3)
    right = torch.autograd.grad([out, lse], leaves, [grad_out, grad_lse])
    parts = forward(plan, q, k, v)
    rows = [
        query_rows(*of_shard, part.out, part.lse, of_lse)
        for *of_shard, part, of_lse in zip(
            shards(plan, q), shards(plan, grad_out), parts, shards(plan, grad_lse), strict=True
        )
    ]
    for grads, exactly in zip(backward(plan, rows, k, v), right, strict=True):
        assert relative_error(together(plan, grads), exactly) < 1e-14


def test_no_tile_leaves_everything_as_it_was():
    plan, (q, k, v, grad_out) = job(), draw()
    total = empty_partial(q, v)
    attend(total, q, k, v, (), plan)
    assert (total.out == 0).all()
    assert (total.lse == -torch.inf).all()
    sums = [torch.full_like(x, 3.0) for x in (q, k, v)]
    attend_backward(Rows(q, grad_out, total.out, total.lse), k, v, (), plan, *sums)
    assert all((x == 3).all() for x in sums)


def test_rows_that_see_nothing_get_and_give_no_gradient():
    plan, (q, k, v, grad_out) = job(Full()), draw()
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    sums = [torch.zeros_like(x) for x in shards(plan, q)[:1] + shards(plan, k)[:1] * 2]
    rows = Rows(*(shards(plan, x)[0] for x in (q, grad_out, torch.zeros_like(grad_out), lse)))
    attend_backward(rows, shards(plan, k)[0], shards(plan, v)[0], plan.tiles(0, 0), plan, *sums)
    assert all((x == 0).all() for x in sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_tiles_of_half_precision_inputs_are_those_of_float32(dtype):
    """Not only close to float64, but closer than one rounding to half precision would leave it."""
    plan, (q, k, v, grad_out) = job(dtype=dtype, exact=True), draw(dtype)
    right_out, _ = exact(q, k, v, grad_out, Causal())
    out = together(plan, [part.out for part in forward(plan, q, k, v)])
    assert out.dtype == torch.float32
    assert relative_error(out, right_out) < 1e-6
