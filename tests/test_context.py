"""The drop-in: what runs inside is sharded, what is outside is as before."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import cpref

pytestmark = pytest.mark.slow

RANKS, S = 4, 64


def inputs(seq_len=S, kv_heads=4):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, seq_len, 8), (2, kv_heads, seq_len, 8), (2, kv_heads, seq_len, 8)]
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def error(x, exact):
    return ((x - exact).norm() / exact.norm()).item()


def sharded_run(group, body, *, seq_len=S, kv_heads=4, is_causal=True, **options):
    """out and the gradients of F.scaled_dot_product_attention inside the context, unsharded."""
    buffers = inputs(seq_len, kv_heads)
    grad_out = torch.ones_like(buffers[0]).cumsum(2).sin()
    with cpref.context_parallel(group, buffers=buffers, buffer_seq_dims=[2, 2, 2], **options):
        leaves = [x.clone().requires_grad_() for x in buffers]
        out = body(*leaves, is_causal=is_causal, enable_gqa=kv_heads != 4)
        shard_of_grad = cpref.shard(
            grad_out, 2, group=group, layout=options.get("layout", "zigzag")
        )
    out.backward(shard_of_grad)  # outside: a backward needs no context
    parts = [out, *(leaf.grad for leaf in leaves)]
    return cpref.context_parallel_unshard(
        group, parts, [2] * 4, layout=options.get("layout", "zigzag")
    )


def one_rank(seq_len=S, kv_heads=4, is_causal=True):
    leaves = [x.requires_grad_() for x in inputs(seq_len, kv_heads)]
    mask = cpref.Causal() if is_causal else cpref.Full()
    out = cpref.reference_attention(*leaves, mask=mask)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(2).sin())]


def attention(q, k, v, **kwargs):
    return F.scaled_dot_product_attention(q, k, v, **kwargs)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_len", [S, 17])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_inside_attention_is_that_of_the_whole_sequence(layout, seq_len, kv_heads, is_causal):
    options = {"seq_len": seq_len, "kv_heads": kv_heads, "is_causal": is_causal}
    for whole in cpref.run_local(
        lambda group: sharded_run(group, attention, layout=layout, **options), RANKS
    ):
        for got, exact in zip(whole, one_rank(**options), strict=True):
            assert error(got, exact) < 1e-13


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_in_its_context_after_the_context_has_ended(use_reentrant):
    def body(q, k, v, **kwargs):
        return checkpoint(attention, q, k, v, use_reentrant=use_reentrant, **kwargs)

    def reentrant_body(q, k, v, is_causal, enable_gqa):
        return checkpoint(
            lambda q, k, v: attention(q, k, v, is_causal=is_causal), q, k, v, use_reentrant=True
        )

    chosen = reentrant_body if use_reentrant else body
    for whole in cpref.run_local(lambda group: sharded_run(group, chosen), RANKS):
        for got, exact in zip(whole, one_rank(), strict=True):
            assert error(got, exact) < 1e-13


def test_a_checkpoint_around_the_context_works_too():
    def fn(group):
        q, k, v = (cpref.shard(x, 2, group=group).requires_grad_() for x in inputs())

        def block(q, k, v):
            with cpref.context_parallel(group):
                return attention(q, k, v, is_causal=True)

        out = checkpoint(block, q, k, v, use_reentrant=False)
        out.sum().backward()
        return cpref.context_parallel_unshard(group, [q.grad], [2])[0]

    leaves = [x.requires_grad_() for x in inputs()]
    exact = cpref.reference_attention(*leaves, mask=cpref.Causal())
    dq = torch.autograd.grad(exact.sum(), leaves[0])[0]
    for got in cpref.run_local(fn, RANKS):
        assert error(got, dq) < 1e-13


def test_buffers_are_sharded_inside_and_restored_outside():
    def fn(group):
        tokens, table = torch.arange(S).repeat(2, 1), torch.arange(S * 3.0).view(S, 3)
        before = tokens.clone(), table.clone()
        with cpref.context_parallel(group, buffers=[tokens, table], buffer_seq_dims=[1, 0]):
            positions = cpref.local_positions(S, group=group)
            assert torch.equal(tokens, positions.repeat(2, 1))
            assert torch.equal(table, before[1][positions])
        assert torch.equal(tokens, before[0])
        assert torch.equal(table, before[1])

    cpref.run_local(fn, RANKS)


def test_buffers_are_restored_after_an_exception():
    def fn(group):
        tokens = torch.arange(S)
        with (
            pytest.raises(KeyError),
            cpref.context_parallel(group, buffers=[tokens], buffer_seq_dims=[0]),
        ):
            raise KeyError
        assert torch.equal(tokens, torch.arange(S))
        q, k, v = inputs()
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert plain.shape == q.shape

    cpref.run_local(fn, RANKS)


def test_a_buffer_that_is_a_view_leaves_its_base_alone():
    def fn(group):
        base = torch.arange(S + 1)
        tokens = base[:-1]
        with cpref.context_parallel(group, buffers=[tokens], buffer_seq_dims=[0]):
            assert len(tokens) == S // RANKS
            tokens += 1000
        assert torch.equal(base, torch.arange(S + 1))
        assert torch.equal(tokens, torch.arange(S))

    cpref.run_local(fn, RANKS)


def test_a_no_restore_buffer_stays_sharded():
    def fn(group):
        tokens, labels = torch.arange(S), torch.arange(S)
        with cpref.context_parallel(
            group, buffers=[tokens, labels], buffer_seq_dims=[0, 0], no_restore_buffers={labels}
        ):
            pass
        assert len(tokens) == S
        assert torch.equal(labels, cpref.local_positions(S, group=group))

    cpref.run_local(fn, RANKS)


def test_other_threads_and_code_outside_see_plain_attention():
    q, k, v = inputs()
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def fn(group):
        seen = []
        with cpref.context_parallel(group):
            thread = threading.Thread(
                target=lambda: seen.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            )
            thread.start()
            thread.join()
        seen.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return seen

    for seen in cpref.run_local(fn, 2):
        assert len(seen) == 2
        assert all(torch.equal(one, plain) for one in seen)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, NotImplementedError, "mask="),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout"),
    ],
)
def test_what_is_not_supported_says_what_to_do(kwargs, error, words):
    def fn(group):
        q, k, v = (cpref.shard(x, 2, group=group) for x in inputs())
        with cpref.context_parallel(group):
            F.scaled_dot_product_attention(q, k, v, **kwargs)

    with pytest.raises(error, match=words):
        cpref.run_local(fn, 2)


@pytest.mark.parametrize(
    ("buffers", "dims", "kept", "words"),
    [
        ([torch.zeros(4)], [], set(), "1 buffers and 0"),
        ([torch.zeros(4)], [1], set(), r"buffer_seq_dims\[0\] is 1"),
        ([torch.zeros(4, requires_grad=True)], [0], set(), "requires grad"),
        ([torch.nn.Parameter(torch.zeros(4))], [0], set(), "requires grad"),
        ([torch.zeros(4)], [0], {torch.zeros(4)}, "not among buffers"),
    ],
)
def test_buffers_that_cannot_be_sharded_are_refused(buffers, dims, kept, words):
    def fn(group):
        with cpref.context_parallel(
            group, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept
        ):
            pass

    with pytest.raises(ValueError, match=words):
        cpref.run_local(fn, 2)
