"""The one public call: what it refuses, what it takes, and how it lives with the rest of torch."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import cpref
from cpref.attention import STRATEGIES
from cpref.exactness import Case, bounds, errors, judge, relative_error

from .sharded import attention, draw, for_strategy, judged, sharded

strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def close(x, exact, bound=1e-13):
    assert relative_error(x, exact) < bound


# -- what is refused ------------------------------------------------------------------------------


def refused(error, message, tensors=None, ranks=2, **options):
    """Every rank raises `error` with `message`, and none waits for another."""
    tensors = draw(seq_len=8)[:3] if tensors is None else tensors

    def call(group):
        try:
            cpref.context_parallel_attention(*tensors, group=group, **options)
        except (ValueError, TypeError) as raised:
            return type(raised), str(raised)

    for said in cpref.run_local(call, ranks):
        assert said is not None
        assert said[0] is error
        assert message in said[1]


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([[1.0], zeros(1, 1, 4, 8), zeros(1, 1, 4, 8)], TypeError, "q is list; it must be a ten"),
        ([zeros(4, 8)] * 3, ValueError, "q has shape (4, 8); it must be (B, H, S_local, D)"),
        ([zeros(1, 2, 4, 8), zeros(2, 4, 8), zeros(1, 2, 4, 8)], ValueError, "k has shape (2, 4,"),
        (
            [zeros(1, 1, 4, 8, dtype=torch.int64)] * 3,
            TypeError,
            "q is torch.int64; it must be torch.f",
        ),
        (
            [zeros(1, 1, 4, 8), zeros(1, 1, 4, 8).double(), zeros(1, 1, 4, 8)],
            TypeError,
            "k is torch.float64, q torch.float32; they must be the same",
        ),
        (
            [zeros(2, 1, 4, 8), zeros(1, 1, 4, 8), zeros(1, 1, 4, 8)],
            ValueError,
            "the batch, dimension 0, must be equal",
        ),
        (
            [zeros(1, 2, 4, 8), zeros(1, 2, 4, 8), zeros(1, 1, 4, 8)],
            ValueError,
            "k and v must agree in heads and tokens",
        ),
        (
            [zeros(1, 2, 4, 8), zeros(1, 2, 4, 6), zeros(1, 2, 4, 8)],
            ValueError,
            "q and k must agree in the head dim",
        ),
        ([zeros(1, 0, 4, 8)] * 3, ValueError, "batch, heads and head dim must be at least 1"),
        ([zeros(1, 2, 0, 8)] * 3, ValueError, "seq_len is 0; it must be a whole number of at"),
        (
            [zeros(1, 3, 4, 8), zeros(1, 2, 4, 8), zeros(1, 2, 4, 8)],
            ValueError,
            "q has 3 heads and k 2; the heads of q must be a multiple of those of k",
        ),
        (
            [zeros(1, 1, 4, 8), zeros(1, 1, 4, 8, device="meta"), zeros(1, 1, 4, 8)],
            ValueError,
            "k is on meta, q on cpu; they must be together",
        ),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(tensors, error, message):
    refused(error, message, tensors)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"strategy": "rings"},
            ValueError,
            "strategy is 'rings'; it must be one of ring, all_gather, reduce_scatter, ulysses, hyb",
        ),
        ({"layout": "zig"}, ValueError, "layout is 'zig'; it must be one of contiguous, zigzag, s"),
        ({"accumulate": "fp64"}, ValueError, "accumulate is 'fp64'; it must be one of fp32, exact"),
        ({"mask": None}, TypeError, "mask is None; it must be Full(), Causal()"),
        ({"mask": torch.ones(8, 8).bool()}, TypeError, "or a function (q_index, kv_index) -> bool"),
        ({"mask": cpref.Documents([3, 4])}, ValueError, "add up to 7 tokens, but seq_len is 16"),
        ({"mask": lambda q, kv: q * kv}, TypeError, "a mask_mod must return bool"),
        ({"seq_len": 0}, ValueError, "seq_len is 0"),
        ({"seq_len": 15}, ValueError, "q has 8 tokens on rank"),
        ({"kv_seq_len": 12, "mask": cpref.Full()}, ValueError, "k has 8 tokens on rank"),
        ({"kv_seq_len": 12}, ValueError, "needs as many keys as queries"),
        ({"strategy": "hybrid"}, ValueError, "strategy='hybrid' needs two dimensions"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_arguments_that_cannot_be_are_refused_on_every_rank(options, error, message):
    refused(error, message, **options)


def test_heads_that_ulysses_cannot_share_are_named_with_the_ranks_that_could():
    tensors = draw(seq_len=4, heads=6, kv_heads=6)[:3]
    refused(
        ValueError,
        "q has 6 heads, which 4 ranks cannot share under strategy='ulysses'; use 'ring', or "
        "2 or 3 or 6 ranks",
        tensors,
        ranks=4,
        strategy="ulysses",
    )


def test_heads_that_a_row_of_the_hybrid_cannot_share_are_named_with_the_row():
    def call(group):
        with pytest.raises(ValueError, match=r"which 2 ranks of a row cannot share .* 3 ranks of"):
            x = torch.zeros(1, 3, 4, 8)
            cpref.context_parallel_attention(x, x, x, group=group.grid(2), strategy="hybrid")

    cpref.run_local(call, 4)


def test_tokens_before_heads_by_mistake_are_met_with_the_expected_shape():
    tensors = [x.transpose(1, 2) for x in draw(seq_len=5, heads=4, kv_heads=2)[:3]]
    refused(ValueError, "expected (B, H, S_local, D), as in scaled_dot_product_attention", tensors)


def test_a_length_that_is_not_p_times_the_local_one_has_to_be_given():
    """10 tokens on 4 ranks: 3, 3, 2, 2."""

    def call(group):
        parts = [cpref.shard(x, 2, group=group) for x in draw(seq_len=10)[:3]]
        try:
            cpref.context_parallel_attention(*parts, group=group)
        except ValueError as error:
            return str(error)

    said = cpref.run_local(call, 4)
    assert all("seq_len is 12 on ranks 0, 1, 8 on ranks 2, 3" in each for each in said), said


# -- what is taken --------------------------------------------------------------------------------

ODD_VIEWS = {
    "tokens before heads": lambda q, k, v: [
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)
    ],
    "head dim strided": lambda q, k, v: [x.mT.contiguous().mT for x in (q, k, v)],
    "one packed projection": lambda q, k, v: torch.cat([q, k, v], 1).split([4, 2, 2], 1),
    "slices of the head dim": lambda q, k, v: [torch.cat([x, x], 3)[..., :8] for x in (q, k, v)],
    "of a larger batch": lambda q, k, v: [torch.cat([x, x])[::2] for x in (q, k, v)],
}


@strategies
@pytest.mark.parametrize("view", ODD_VIEWS)
def test_views_are_taken_as_they_are(strategy, view):
    q, k, v, grad_out = draw(seq_len=16)
    k, v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    if view == "of a larger batch":
        q, k, v = (torch.cat([x, x])[::2] for x in (q, k, v))
    exact = judged(q, k, v, grad_out)

    def run(group):
        parts = [cpref.shard(x, 2, group=group).detach() for x in (q, k, v)]
        leaves = [x.requires_grad_() for x in parts]
        out = cpref.context_parallel_attention(
            *ODD_VIEWS[view](*leaves) if view != "of a larger batch" else leaves,
            group=for_strategy(group, strategy),
            strategy=strategy,
        )
        out.backward(cpref.shard(grad_out, 2, group=group).mT.contiguous().mT)
        return [cpref.unshard(x, 2, group=group) for x in (out.detach(), *(x.grad for x in leaves))]

    for results in cpref.run_local(run, 4):
        for x, exactly in zip(results, exact, strict=True):
            close(x, exactly)


@strategies
def test_an_expanded_head_gets_the_sum_of_its_gradients(strategy):
    q, k, v, grad_out = draw(seq_len=16, heads=4, kv_heads=1)
    exact = judged(q, k, v, grad_out)

    def run(group):
        parts = [cpref.shard(x, 2, group=group).requires_grad_() for x in (q, k, v)]
        out = cpref.context_parallel_attention(
            parts[0],
            parts[1].expand(-1, 4, -1, -1),
            parts[2].expand(-1, 4, -1, -1),
            group=for_strategy(group, strategy),
            strategy=strategy,
        )
        out.backward(cpref.shard(grad_out, 2, group=group))
        return [cpref.unshard(x.grad, 2, group=group) for x in parts]

    for grads in cpref.run_local(run, 4):
        for x, exactly in zip(grads, exact[1:], strict=True):
            close(x, exactly)


@strategies
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_the_scale_is_that_of_the_scores(strategy, scale):
    tensors = draw(seq_len=21)
    exact = judged(*tensors, scale=scale)

    def run(group):
        return sharded(for_strategy(group, strategy), *tensors, strategy=strategy, scale=scale)

    for results in cpref.run_local(run, 4):
        for x, exactly in zip(results, exact, strict=True):
            close(x, exactly)


@pytest.mark.slow
@strategies
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("largest", [50.0, 100.0, 1e4])
def test_large_scores_neither_overflow_nor_are_nan(strategy, layout, dtype, largest):
    """The later half of the keys has scores of ±largest, the earlier half none to speak of."""
    q, k, v, grad_out = draw(dtype, seq_len=32, kv_heads=4)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    k[:, :, 16:] *= largest
    exact = judge(q, k, v, grad_out, mask=cpref.Full(), scale=1.0)

    def run(group):
        return sharded(
            for_strategy(group, strategy),
            q,
            k,
            v,
            grad_out,
            strategy=strategy,
            layout=layout,
            mask=cpref.Full(),
            scale=1.0,
        )

    # why: the scores themselves are rounded relative to their size
    bound = 8 * torch.finfo(dtype).eps * largest
    for results in cpref.run_local(run, 4):
        for x, exactly, size in zip(results, exact.results, exact.sizes, strict=True):
            assert x.isfinite().all()
            assert relative_error(x, exactly, size) < bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("accumulate", ["fp32", "exact"])
@strategies
def test_out_and_gradients_have_the_dtype_of_the_inputs_and_lse_that_of_sums(
    strategy, accumulate, dtype
):
    def run(group):
        q, k, v, grad_out = (cpref.shard(x, 2, group=group) for x in draw(dtype, seq_len=16))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = cpref.context_parallel_attention(
            *leaves,
            group=for_strategy(group, strategy),
            strategy=strategy,
            accumulate=accumulate,
            return_lse=True,
        )
        out.backward(grad_out)
        return [out.dtype, *(x.grad.dtype for x in leaves)], lse.dtype

    for dtypes, of_lse in cpref.run_local(run, 2):
        assert dtypes == [dtype] * 4
        assert of_lse == (torch.float64 if dtype == torch.float64 else torch.float32)


# -- the rest of torch ----------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention with its projections, from (B, S_local, 16)."""

    def __init__(self, strategy, seed=0):
        super().__init__()
        self.strategy = strategy
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.double()
        draw = torch.Generator().manual_seed(seed)  # why: ranks that are threads share torch's own
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=draw)

    def forward(self, x, group=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        if group is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = cpref.context_parallel_attention(
                q, k, v, group=for_strategy(group, self.strategy), strategy=self.strategy
            )
        return x + self.out(out.transpose(1, 2).flatten(2))


def tokens():
    draw = torch.Generator().manual_seed(6)
    return torch.randn(2, 16, 16, generator=draw, dtype=torch.float64)


def trained(group, strategy, wrap):
    """The gradients of all parameters and of x, from a loss over all tokens, for two layers."""
    x = tokens()
    layers = [Layer(strategy, seed) for seed in range(2)]
    x.requires_grad_()
    hidden = x if group is None else cpref.shard(x, 1, group=group)
    for layer in layers:
        hidden = wrap(layer, hidden, group)
    hidden.square().sum().backward()
    grads = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    return grads if group is None else [group.all_reduce(grad) for grad in grads]


def plainly(layer, x, group):
    return layer(x, group)


def checkpointed(layer, x, group):
    return checkpoint(layer, x, group, use_reentrant=False)


def checkpointed_reentrant(layer, x, group):
    return checkpoint(layer, x, group, use_reentrant=True)


@pytest.mark.slow
@strategies
@pytest.mark.parametrize("wrap", [plainly, checkpointed, checkpointed_reentrant])
def test_layers_train_as_on_one_rank_checkpointed_or_not(world, strategy, wrap):
    exact = trained(None, strategy, plainly)
    for grads in world(trained, 4, strategy, wrap):
        for grad, exactly in zip(grads, exact, strict=True):
            close(grad, exactly)


@strategies
def test_backward_twice_over_one_graph_gives_the_same_gradients(strategy):
    tensors = draw(seq_len=12)

    def run(group):
        q, k, v, grad_out = (cpref.shard(x, 2, group=group) for x in tensors)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = cpref.context_parallel_attention(
            *leaves, group=for_strategy(group, strategy), strategy=strategy
        )
        first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        second = torch.autograd.grad(out, leaves, grad_out)
        return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))

    assert all(cpref.run_local(run, 4))


@strategies
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_some_of_the_inputs_need_gradients(strategy, wanted):
    tensors = draw(seq_len=12)
    exact = judged(*tensors)

    def run(group):
        q, k, v, grad_out = (cpref.shard(x, 2, group=group) for x in tensors)
        parts = [x.requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
        out = cpref.context_parallel_attention(
            *parts, group=for_strategy(group, strategy), strategy=strategy
        )
        out.backward(grad_out)
        assert all((x.grad is not None) == (i in wanted) for i, x in enumerate(parts))
        return [cpref.unshard(parts[i].grad, 2, group=group) for i in wanted]

    for grads in cpref.run_local(run, 4):
        for grad, i in zip(grads, wanted, strict=True):
            close(grad, exact[i + 1])


@strategies
def test_the_gradient_may_be_of_lse_alone(strategy):
    q, k, v, _ = draw(seq_len=12)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT / math.sqrt(8)
    scores.logsumexp(-1).sum().backward()

    def run(group):
        parts = [cpref.shard(x, 2, group=group).requires_grad_() for x in (q, k, v)]
        _, lse = cpref.context_parallel_attention(
            *parts,
            group=for_strategy(group, strategy),
            strategy=strategy,
            mask=cpref.Full(),
            return_lse=True,
        )
        lse.sum().backward()
        return [cpref.unshard(x.grad, 2, group=group) for x in parts]

    for dq, dk, dv in cpref.run_local(run, 4):
        close(dq, leaves[0].grad)
        close(dk, leaves[1].grad)
        assert (dv == 0).all()


@strategies
def test_a_second_derivative_is_refused_not_wrong(strategy):
    def run(group):
        parts = [cpref.shard(x, 2, group=group).requires_grad_() for x in draw(seq_len=4)[:3]]
        out = cpref.context_parallel_attention(
            *parts, group=for_strategy(group, strategy), strategy=strategy
        )
        grads = torch.autograd.grad(out.sum(), parts, create_graph=True)
        penalty = out.sum() + sum(grad.square().sum() for grad in grads)
        with pytest.raises(RuntimeError, match="once, not twice"):
            penalty.backward()
        return [cpref.unshard(grad.detach(), 2, group=group) for grad in grads]

    exact = judged(*draw(seq_len=4)[:3], torch.ones(2, 4, 4, 8))
    for grads in cpref.run_local(run, 2):
        for grad, exactly in zip(grads, exact[1:], strict=True):
            close(grad, exactly)


@strategies
def test_autocast_computes_in_half_precision_and_gives_gradients_in_the_dtype_of_the_inputs(
    strategy,
):
    tensors = draw(torch.float32, batch=4, heads=4, seq_len=64)
    halves = [x.bfloat16() for x in tensors]
    case = Case(dtype=torch.bfloat16)
    exact = judged(*halves)

    def run(group):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(for_strategy(group, strategy), *leaves, strategy=strategy)
        assert out.dtype == torch.bfloat16
        out.backward(cpref.shard(halves[3], 2, group=group))
        assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
        grads = [group.all_reduce(leaf.grad) for leaf in leaves]
        return [cpref.unshard(out.detach(), 2, group=group), *grads]

    half = torch.finfo(case.dtype).eps
    for results in cpref.run_local(run, 4):
        for x, exactly in zip(results, exact, strict=True):
            close(x, exactly, half)


def test_autocast_leaves_float64_alone():
    def run(group):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(group, *draw(seq_len=8)[:3]).dtype

    assert cpref.run_local(run, 2) == [torch.float64] * 2


class Kept:
    """What is saved for backward: the sizes of the tensors."""

    def __init__(self):
        self.elements = []

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, x):
        self.elements.append(x.numel())
        return x


@strategies
def test_the_shards_are_saved_for_backward_and_nothing_else(strategy):
    def run(group):
        parts = [cpref.shard(x, 2, group=group).requires_grad_() for x in draw(seq_len=32)[:3]]
        with Kept() as kept:
            cpref.context_parallel_attention(
                *parts, group=for_strategy(group, strategy), strategy=strategy
            )
        return sorted(kept.elements), [x.numel() for x in parts]

    for kept, (q, k, v) in cpref.run_local(run, 4):
        if strategy in ("ring", "all_gather", "reduce_scatter"):
            assert kept == sorted([q, k, v, q, q // 8])  # q, k, v, out, lse
        else:  # all tokens of a share of the heads; K,V heads are as many as there are ranks
            repeated = 2 if strategy == "ulysses" else 1
            assert kept == sorted([q, repeated * k, repeated * v, q, q // 8])


@strategies
def test_without_grad_nothing_is_saved(strategy):
    def run(group):
        parts = [cpref.shard(x, 2, group=group).requires_grad_() for x in draw(seq_len=8)[:3]]
        with torch.no_grad(), Kept() as kept:
            out = cpref.context_parallel_attention(
                *parts, group=for_strategy(group, strategy), strategy=strategy
            )
        return kept.elements, out.requires_grad

    assert cpref.run_local(run, 4) == [([], False)] * 4


def test_in_inference_mode_the_numbers_are_the_same():
    tensors = draw(seq_len=12)

    def run(group):
        with torch.inference_mode():
            return cpref.unshard(attention(group, *tensors[:3]), 2, group=group)

    with torch.inference_mode():
        outs = cpref.run_local(run, 3)
    exact = judged(*tensors)[0]
    for out in outs:
        close(out, exact)


@pytest.mark.slow
def test_a_compiled_model_breaks_its_graph_at_the_attention_and_goes_on():
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module)
        return module.forward

    def compiled(layer, x, group):
        return torch.compile(layer, backend=backend)(x, group)

    exact = trained(None, "ring", plainly)
    grads = cpref.run_local(trained, 1, "ring", compiled)[0]
    for grad, exactly in zip(grads, exact, strict=True):
        close(grad, exactly)
    assert len(graphs) >= 2  # before the attention and after it


# -- the error does not grow with P ---------------------------------------------------------------


@pytest.mark.slow
@strategies
def test_the_error_of_exact_accumulation_does_not_grow_with_the_ranks(strategy):
    measured = {}
    for ranks in (2, 4, 8, 16, 32):
        case = Case(
            strategy=strategy,
            dtype=torch.bfloat16,
            heads=32 if strategy == "ulysses" else 2,  # why: its ranks share the heads
            kv_heads=1,
            head_dim=32,
            seq_len=256 if strategy == "ulysses" else 1024,
            accumulate="exact",
            neighbours=2,
        )
        measured[ranks] = cpref.run_local(lambda group, case=case: errors(case, group), ranks)[0]
        assert measured[ranks].within(bounds(case)), f"{ranks} ranks: {measured[ranks]}"
    for name in ("out", "dq", "dk", "dv"):
        of_ranks = [getattr(each, name) for each in measured.values()]
        # why: 1 % of an error that is itself the mean of 65,536 roundings or more
        assert max(of_ranks) <= 1.01 * of_ranks[0], (name, of_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seq_len"), [(2, 1024), (8, 2048), (32, 1024)])
def test_the_error_of_float32_accumulation_stays_within_its_bound(ranks, seq_len):
    case = Case(dtype=torch.bfloat16, heads=2, kv_heads=1, head_dim=32, seq_len=seq_len)
    measured = cpref.run_local(lambda group: errors(case, group), ranks)[0]
    assert measured.within(bounds(case)), measured
