"""What each strategy computes, sends, and leaves out."""

import math

import pytest
import torch

import cpref
from cpref.attention import STRATEGIES
from cpref.comm import resolve
from cpref.exactness import relative_error
from cpref.layout import LAYOUTS
from cpref.matrix import MASKS
from cpref.measure import cost

from .sharded import attention, draw, for_strategy, judged, sharded

strategies = pytest.mark.parametrize("strategy", STRATEGIES)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def close(computed, exact):
    for x, exactly in zip(computed, exact, strict=True):
        torch.testing.assert_close(x, exactly, rtol=1e-12, atol=1e-13)


def strategy_sharded(group, strategy, tensors, **options):
    return sharded(for_strategy(group, strategy), *tensors, strategy=strategy, **options)


@strategies
@layouts
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("ranks", "seq_len"), [(3, 41), pytest.param(4, 3, marks=pytest.mark.slow)]
)
def test_every_mask_under_every_strategy_and_layout(strategy, layout, name, ranks, seq_len):
    mask, kv_seq_len = MASKS[name](seq_len)
    tensors = draw(seq_len=seq_len, kv_seq_len=kv_seq_len, heads=2 * ranks, kv_heads=2)
    exact = judged(*tensors, mask=mask)
    for results in cpref.run_local(
        lambda group: strategy_sharded(group, strategy, tensors, layout=layout, mask=mask), ranks
    ):
        close(results, exact)


# From reports about other implementations: documents that begin and end anywhere.
@pytest.mark.slow
@strategies
@layouts
@pytest.mark.parametrize(
    ("lengths", "ranks", "inner"),
    [
        ([3, 5], 2, cpref.Causal()),
        ([5, 3, 9], 2, cpref.Full()),
        ([5, 3, 9], 3, cpref.Causal()),
        ([1] * 11, 3, cpref.Full()),  # one document per token
        ([2, 21, 1], 4, cpref.Causal()),  # one longer than two shards
        ([2, 21, 1], 4, cpref.SlidingWindow(4)),
        ([7], 2, cpref.Causal()),  # 7 tokens stay 7
        ([9, 15], 2, cpref.Causal()),  # the second starts inside the first shard
        ([13, 11], 2, cpref.Causal()),  # the second starts inside the second shard
    ],
    ids=str,
)
def test_documents_of_any_length_anywhere(strategy, layout, lengths, ranks, inner):
    mask = cpref.Documents(lengths, inner)
    tensors = draw(seq_len=sum(lengths), heads=6 if ranks == 3 else 4, kv_heads=2)
    exact = judged(*tensors, mask=mask)
    for results in cpref.run_local(
        lambda group: strategy_sharded(group, strategy, tensors, layout=layout, mask=mask), ranks
    ):
        close(results, exact)


@strategies
@layouts
def test_a_window_of_three_over_sixteen_tokens_on_four_ranks(strategy, layout):
    """Some tiles are wholly masked, and most blocks hold nothing for most queries."""
    tensors, mask = draw(seq_len=16), cpref.SlidingWindow(3)
    exact = judged(*tensors, mask=mask)
    for results in cpref.run_local(
        lambda group: strategy_sharded(group, strategy, tensors, layout=layout, mask=mask), 4
    ):
        close(results, exact)


@strategies
def test_large_gradients_do_not_overflow_float16_where_delta_does(strategy):
    """rowsum(grad_out·out) passes float16's largest number long before any gradient does."""
    q, k, v, grad_out = draw(torch.float16, seq_len=32, kv_heads=4, head_dim=64)
    v, grad_out = 1 + v / 8, 2000 + grad_out
    out, *exact = judged(q, k, v, grad_out)
    assert (grad_out.double() * out).sum(-1).min() > 65504

    def error(strategy):
        def run(group):
            return strategy_sharded(group, strategy, (q, k, v, grad_out))[1:]

        return [
            relative_error(x, e) for x, e in zip(cpref.run_local(run, 2)[0], exact, strict=True)
        ]

    for of_strategy, of_ring in zip(error(strategy), error("ring"), strict=True):
        assert of_strategy < 1.15 * of_ring


@pytest.mark.slow
@strategies
@layouts
@pytest.mark.parametrize(
    ("seq_len", "ranks"),
    [(17, 4), (10, 4), (2, 2), (1, 4), pytest.param(3, 8, marks=pytest.mark.slow), (1, 1)],
)
def test_lengths_that_do_not_divide(strategy, layout, seq_len, ranks):
    tensors = draw(seq_len=seq_len, heads=8)
    exact = judged(*tensors)
    for results in cpref.run_local(
        lambda group: strategy_sharded(group, strategy, tensors, layout=layout), ranks
    ):
        close(results, exact)


def with_lse(group, strategy, tensors, grad_lse, mask, layout):
    """Whole lse, and the gradients of a loss in out and lse."""
    q, k, v, grad_out = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention(
        for_strategy(group, strategy),
        *leaves,
        strategy=strategy,
        layout=layout,
        mask=mask,
        return_lse=True,
    )
    parts = [cpref.shard(x, 2, group=group, layout=layout) for x in (grad_out, grad_lse)]
    torch.autograd.backward([out, lse], parts)
    grads = [resolve(group).all_reduce(leaf.grad) for leaf in leaves]
    whole = cpref.unshard(lse.detach(), 2, group=group, layout=layout, seq_len=q.shape[2])
    return whole, *grads


@strategies
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("full", "contiguous"),
        ("causal", "zigzag"),
        ("causal", "striped"),
        ("window", "striped"),
        ("documents", "contiguous"),
        ("full, more keys", "zigzag"),
    ],
)
@pytest.mark.slow
def test_lse_is_that_of_the_whole_row_and_differentiable(strategy, layout, name):
    mask, kv_seq_len = MASKS[name](23)
    tensors = draw(seq_len=23, kv_seq_len=kv_seq_len, v_head_dim=8 if layout == "zigzag" else 5)
    q, k, v, grad_out = (x.requires_grad_(i < 3) for i, x in enumerate(tensors))
    allowed = mask.allowed(torch.arange(23)[:, None], torch.arange(k.shape[2])[None])
    scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
    lse = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    grad_lse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(3), dtype=lse.dtype)
    out = cpref.reference_attention(q, k, v, mask=mask)
    exact = lse.detach(), *torch.autograd.grad([out, lse], [q, k, v], [grad_out, grad_lse])
    whole = [x.detach() for x in tensors]
    for results in cpref.run_local(with_lse, 4, strategy, whole, grad_lse, mask, layout):
        close(results, exact)


@strategies
def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity(world, strategy):
    for out, lse, dq in world(blind_rows, 4, strategy):
        blind = torch.arange(20) % 2 == 1
        assert (out[:, :, blind] == 0).all()
        assert (lse[:, :, blind] == -torch.inf).all()
        assert (dq[:, :, blind] == 0).all()
        assert out.isfinite().all()
        assert dq.isfinite().all()
        assert lse[:, :, ~blind].isfinite().all()


def only_even_rows(q_index, kv_index):
    return (q_index % 2 == 0) & (kv_index < 3)


def blind_rows(group, strategy):
    q, k, v, grad_out = draw(seq_len=20)
    leaf = q.clone().requires_grad_()
    out, lse = attention(
        for_strategy(group, strategy),
        leaf,
        k,
        v,
        strategy=strategy,
        mask=only_even_rows,
        return_lse=True,
    )
    out.backward(cpref.shard(grad_out, 2, group=group))
    out, lse = (cpref.unshard(x.detach(), 2, group=group) for x in (out, lse))
    return out, lse, group.all_reduce(leaf.grad)


@strategies
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_a_mask_that_lets_nobody_see_anything(strategy, layout):
    tensors = draw(seq_len=11)

    def run(group):
        mask = cpref.MaskMod(lambda q, kv: q < 0)
        return strategy_sharded(group, strategy, tensors, mask=mask, layout=layout)

    for results in cpref.run_local(run, 4):
        assert all((x == 0).all() for x in results)


# -- what is sent ---------------------------------------------------------------------------------

B, H, HKV, D, DV = 2, 8, 4, 8, 16


def sent(group, strategy, layout, mask, seq_len, dtype):
    """(bytes, messages) that this rank sends, forward and backward."""
    moves = for_strategy(group, strategy)
    traffic = resolve(moves).traffic
    q, k, v, grad_out = (
        cpref.shard(x, 2, group=group, layout=layout)
        for x in draw(
            dtype, batch=B, heads=H, kv_heads=HKV, seq_len=seq_len, head_dim=D, v_head_dim=DV
        )
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    traffic.reset()
    out = cpref.context_parallel_attention(
        *leaves,
        group=moves,
        strategy=strategy,
        layout=layout,
        mask=mask,
        seq_len=seq_len,
    )
    forward = traffic.bytes, traffic.messages
    traffic.reset()
    out.backward(grad_out)
    return forward, (traffic.bytes, traffic.messages)


def formula(strategy, ranks, seq_len, e):
    """The bytes and messages of each strategy, as its docstring has them, for P > 1."""
    shard, others = seq_len // ranks, ranks - 1
    a = 8 if e == 8 else 4  # bytes of an element of the accumulator
    kv_block = B * HKV * shard * (D + DV)
    if strategy == "ring":
        return (kv_block * e * others, others), (kv_block * (e + a) * others, 2 * others)
    if strategy == "all_gather":
        return (kv_block * e * others, others), (kv_block * (e + a) * others, 2 * others)
    if strategy == "reduce_scatter":
        queries, lse = B * H * shard, B * H * seq_len
        there = (queries * (D * e + DV * a) + lse * a) * others
        back = queries * ((D + DV) * e + 2 * a + D * a) * others
        return (there, 3 * others), (back, 3 * others)
    if strategy == "ulysses":
        each = ulysses(ranks, shard, e)
        return (each, 2 * others), (each, 2 * others)
    neighbours, rows = 2, ranks // 2
    swap = ulysses(neighbours, shard, e)
    hops = rows - 1
    there, back = kv_block * e * hops, kv_block * (e + a) * hops
    return (swap + there, 2 + hops), (swap + back, 2 + 2 * hops)


def ulysses(ranks, shard, e):
    return B * shard * (H * D + HKV * D + HKV * DV + H * DV) * e * (ranks - 1) // ranks


@strategies
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("layout", "mask"), [("zigzag", cpref.Causal()), ("contiguous", cpref.Full())], ids=str
)
@pytest.mark.slow
def test_bytes_and_messages_are_those_of_the_formulas(world, strategy, ranks, dtype, layout, mask):
    expected = formula(strategy, ranks, 64, dtype.itemsize)
    for counted in world(sent, ranks, strategy, layout, mask, 64, dtype):
        assert counted == expected


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "reduce_scatter", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_cost_model_has_the_same_formulas(strategy, ranks, dtype):
    shape = cost.Shape(
        batch=B,
        seq_len=64,
        heads=H,
        kv_heads=HKV,
        head_dim=D,
        v_head_dim=DV,
        ranks=ranks,
        bytes_each=dtype.itemsize,
    )
    passes = cost.forward_sent(strategy, shape), cost.backward_sent(strategy, shape)
    expected = formula(strategy, ranks, 64, dtype.itemsize)
    assert tuple((each.bytes, each.messages) for each in passes) == expected


@strategies
def test_one_rank_sends_nothing(world, strategy):
    for layout in LAYOUTS:
        counted = world(sent, 1, strategy, layout, cpref.Causal(), 64, torch.float32)
        assert counted == [((0, 0), (0, 0))]


def sent_with_few_kv_heads(group, kv_heads):
    tensors = draw(torch.float32, heads=8, kv_heads=kv_heads, seq_len=32)
    parts = [cpref.shard(x, 2, group=group).requires_grad_() for x in tensors[:3]]
    group.traffic.reset()
    cpref.context_parallel_attention(*parts, group=group, strategy="ulysses")
    return group.traffic.bytes


@pytest.mark.parametrize(("kv_heads", "on_the_wire"), [(8, 8), (4, 4), (2, 4), (1, 4)])
def test_ulysses_repeats_heads_just_often_enough(kv_heads, on_the_wire):
    shard, head = 2 * 32 // 4, 8 * 4
    expected = shard * head * (8 + 2 * on_the_wire + 8) * 3 // 4
    assert cpref.run_local(sent_with_few_kv_heads, 4, kv_heads) == [expected] * 4


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 33, 64, 128])
@pytest.mark.slow
def test_the_ring_of_a_window_stops_after_the_last_step_that_holds_anything(world, size):
    """128 tokens in contiguous shards of 16 on 8 ranks."""
    mask, hops = cpref.SlidingWindow(size), min(8, math.ceil((size - 1) / 16) + 1) - 1
    for forward, backward in world(sent, 8, "ring", "contiguous", mask, 128, torch.float32):
        assert forward[1] == hops
        assert backward[1] == 2 * hops


def test_documents_that_do_not_cross_shards_send_nothing_around_the_ring(world):
    mask = cpref.Documents([16, 16, 16, 16])
    counted = world(sent, 4, "ring", "contiguous", mask, 64, torch.float32)
    assert counted == [((0, 0), (0, 0))] * 4


# -- what is computed -----------------------------------------------------------------------------


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the (query, key) positions handed to the flash kernel of the CPU."""

    def __init__(self):
        super().__init__()
        self.calls = self.cells = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "flash_attention_for_cpu" in str(function):
            q, k = args[1:3] if "backward" in str(function) else args[:2]
            self.calls += 1
            self.cells += q.shape[2] * k.shape[2]
        return function(*args, **(kwargs or {}))


def kernel_calls(group, strategy, layout, mask, seq_len):
    tensors = draw(seq_len=seq_len)
    with Counter() as counter:
        sharded(
            for_strategy(group, strategy), *tensors, strategy=strategy, layout=layout, mask=mask
        )
    return counter.calls, counter.cells


@strategies
@pytest.mark.slow
def test_a_tile_that_the_mask_leaves_empty_is_not_computed(strategy):
    """Contiguous causal shards: the first rank's queries see one block, the last rank's all."""

    def run(group):
        return kernel_calls(group, strategy, "contiguous", cpref.Causal(), 256)

    calls = [calls for calls, _ in cpref.run_local(run, 4)]
    expected = {
        "ring": [2, 4, 6, 8],
        "all_gather": [2, 4, 6, 8],
        "reduce_scatter": [8, 6, 4, 2],  # keys stay: the first rank's are seen by all
        "ulysses": [2] * 4,
        "hybrid": [2, 2, 4, 4],  # two rows of two ranks
    }
    assert calls == expected[strategy]


def test_a_tile_that_a_function_leaves_empty_is_not_computed():
    """Nothing is known of a mask_mod beforehand, but an empty tile needs no kernel."""

    def own_sixteen(q_index, kv_index):
        return q_index // 16 == kv_index // 16

    def run(group):
        return kernel_calls(group, "all_gather", "contiguous", own_sixteen, 64)

    assert [calls for calls, _ in cpref.run_local(run, 4)] == [2] * 4


@strategies
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.slow
def test_all_ranks_together_compute_what_is_needed(strategy, layout):
    """Under a causal mask the tiles on the diagonal, and one of two of the others."""

    def run(group):
        return kernel_calls(group, strategy, layout, cpref.Causal(), 256)

    cells = sum(cells for _, cells in cpref.run_local(run, 4))
    shards, head_shares = {"ulysses": (1, 4), "hybrid": (2, 2)}.get(strategy, (4, 1))
    share = (shards + 1) / (2 * shards)
    forward_and_backward = 2
    assert cells == forward_and_backward * head_shares * 256 * 256 * share


# -- the same numbers -----------------------------------------------------------------------------


def twice(group, strategy, dtype, overlap_again):
    tensors = draw(dtype, seq_len=101)
    moves = for_strategy(group, strategy)
    first = sharded(moves, *tensors, strategy=strategy)
    second = sharded(moves, *tensors, strategy=strategy, overlap=overlap_again)
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.slow
@strategies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_call_gives_the_same_bits(world, strategy, dtype):
    for _ in range(2):
        assert all(world(twice, 4, strategy, dtype, True))


@strategies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.slow
def test_overlap_changes_no_bit(world, strategy, dtype):
    assert all(world(twice, 4, strategy, dtype, False))
