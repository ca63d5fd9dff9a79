"""The drop-in: what runs inside is sharded, what is outside is as before."""

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.nn.attention.flex_attention import flex_attention
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
        leaves = [x.detach().requires_grad_() for x in buffers]
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


S_LOCAL = S // RANKS


def embedded(group, tokens):
    weight = torch.ones(S, 3, dtype=torch.float64, requires_grad=True)
    return F.embedding(tokens, weight), weight


def rotated(group, table):
    weight = torch.ones(S_LOCAL, dtype=torch.float64, requires_grad=True)
    return weight * table.cos(), weight


def multiplied(group, table):
    weight = torch.ones(S_LOCAL, dtype=torch.float64, requires_grad=True)
    return weight * table, weight


def of_a_view(group, table):
    weight = torch.ones(S_LOCAL - 1, dtype=torch.float64, requires_grad=True)
    return weight * table[1:], weight


def indexed(group, tokens):
    weight = torch.ones(2, S, dtype=torch.float64, requires_grad=True)
    return weight[:, tokens], weight


def joined(group, table):
    weight = torch.ones(S_LOCAL, dtype=torch.float64, requires_grad=True)
    return torch.einsum("i,i->i", [weight, table]), weight


def changed_first(group, table):
    weight = torch.ones(S_LOCAL, dtype=torch.float64, requires_grad=True)
    table *= 2
    table.unsqueeze_(0)
    return weight * table, weight


def checkpointed(group, table, *, use_reentrant, by_closure):
    weight = torch.ones(S_LOCAL, dtype=torch.float64, requires_grad=True)
    if by_closure:
        return checkpoint(lambda w: (w * table).sin(), weight, use_reentrant=use_reentrant), weight
    out = checkpoint(lambda w, t: (w * t).sin(), weight, table, use_reentrant=use_reentrant)
    return out, weight


def with_checkpoint(*, use_reentrant, by_closure):
    return lambda group, table: checkpointed(
        group, table, use_reentrant=use_reentrant, by_closure=by_closure
    )


KEEPING = {
    "an embedding": embedded,
    "a factor": multiplied,
    "a function of it": rotated,
    "a view of it": of_a_view,
    "an index": indexed,
    "one of a list": joined,
    "changed in place": changed_first,
    "a checkpoint's argument": with_checkpoint(use_reentrant=False, by_closure=False),
    "a checkpoint's closure": with_checkpoint(use_reentrant=False, by_closure=True),
    "a reentrant checkpoint's argument": with_checkpoint(use_reentrant=True, by_closure=False),
    "a reentrant checkpoint's closure": with_checkpoint(use_reentrant=True, by_closure=True),
}


@pytest.mark.parametrize("operation", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("fails", [False, True], ids=["", "left by an exception"])
def test_a_backward_after_the_context_is_of_the_shard_that_autograd_kept(operation, fails):
    """Autograd keeps a buffer itself, not a copy; and the buffer is whole again by then."""
    integer = operation in (embedded, indexed)

    def buffer():
        return torch.arange(S) if integer else torch.arange(float(S), dtype=torch.float64)

    def fn(group):
        whole, results = buffer(), []
        with (
            contextlib.suppress(KeyError),
            cpref.context_parallel(group, buffers=[whole], buffer_seq_dims=[0]),
        ):
            results.extend(operation(group, whole))
            if fails:
                raise KeyError
        assert torch.equal(whole, buffer())
        out, weight = results
        later = (whole.double() * torch.ones(S, requires_grad=True)).sum()
        exact, same_weight = operation(group, buffer()[cpref.local_positions(S, group=group)])
        exact.sum().backward()
        out.sum().backward()
        assert torch.equal(out, exact)
        assert torch.equal(weight.grad, same_weight.grad)
        later.backward()  # what was kept of the whole buffer is still that

    cpref.run_local(fn, RANKS)


def test_what_autograd_kept_of_the_whole_buffer_before_a_context_is_still_good_after_it():
    def fn(group):
        table, weight = torch.arange(float(S)), torch.ones(S, requires_grad=True)
        out = weight * table
        with cpref.context_parallel(group, buffers=[table], buffer_seq_dims=[0]):
            pass
        out.sum().backward()
        assert torch.equal(weight.grad, table)

    cpref.run_local(fn, 2)


def test_a_change_in_place_of_what_a_backward_needs_is_seen_as_without_a_context():
    def fn(group):
        table, weight = torch.arange(float(S)), torch.ones(S // 2, requires_grad=True)
        with cpref.context_parallel(group, buffers=[table], buffer_seq_dims=[0]):
            same = table
            out = weight * table
            table += 1
            assert table is same
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    cpref.run_local(fn, 2)


def test_a_function_of_ones_own_that_keeps_the_buffer_itself_gets_an_error_not_another_gradient():
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, table):
            ctx.save_for_backward(table)
            return weight * table

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

    def fn(group):
        table, weight = torch.arange(2.0), torch.ones(1, requires_grad=True)
        with cpref.context_parallel(group, buffers=[table], buffer_seq_dims=[0]):
            inside = Times.apply(weight, table)
            inside.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            inside.sum().backward()
        return weight.grad.item()

    assert cpref.run_local(fn, 2) == [0.0, 1.0]


def test_a_buffer_may_come_to_need_a_gradient_inside():
    def fn(group):
        table = torch.arange(float(S))
        with cpref.context_parallel(
            group, buffers=[table], buffer_seq_dims=[0], no_restore_buffers={table}
        ):
            table.requires_grad_()
            (table * 3).sum().backward()
        return table.grad.tolist()

    assert cpref.run_local(fn, 2) == [[3.0] * (S // 2)] * 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_written_into_a_shard_does_not_reach_the_whole_buffer(ranks, layout):
    def fn(group):
        tokens = torch.arange(S)
        with cpref.context_parallel(group, buffers=[tokens], buffer_seq_dims=[0], layout=layout):
            tokens.add_(1000)
            torch.add(tokens, 1, out=tokens)
            tokens[0] = -1
            assert tokens[0] == -1
            assert tokens[-1] > 1000
        assert torch.equal(tokens, torch.arange(S))

    cpref.run_local(fn, ranks)


class Encoder(nn.Module):
    """PyTorch's own layers, two of them, as a user stacks them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            32, 4, 48, dropout=0.0, batch_first=True, norm_first=True, dtype=torch.float64
        )
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, is_causal=True):
        if not is_causal:
            return self.stack(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.stack(x, mask=mask, is_causal=True)


class Multihead(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(32, 4, batch_first=batch_first, dtype=torch.float64)

    def forward(self, x, is_causal=True):
        mask = None
        if is_causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = x if self.batch_first else x.transpose(0, 1)
        out = self.attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=is_causal)[0]
        return out if self.batch_first else out.transpose(0, 1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("mode", ["training", "evaluation", "inference"])
@pytest.mark.parametrize(
    "module", [Encoder, Multihead, lambda: Multihead(False)], ids=["encoder", "first", "second"]
)
def test_the_attention_modules_of_pytorch_are_sharded_too(module, mode, is_causal):
    """They call scaled_dot_product_attention in a function that hides it, or a fused kernel."""
    model = module().train(mode == "training")
    x = torch.randn(2, S, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact_x = x.clone().requires_grad_()
    exact = model(exact_x, is_causal=is_causal)
    exact.square().sum().backward()
    model.zero_grad()

    def fn(group):
        mine = copy.deepcopy(model)
        leaf = cpref.shard(x, 1, group=group).requires_grad_()
        grad = torch.inference_mode if mode == "inference" else torch.enable_grad
        with grad(), cpref.context_parallel(group):
            out = mine(leaf, is_causal=is_causal)
        if mode == "inference":
            return cpref.context_parallel_unshard(group, [out], [1])
        out.square().sum().backward()
        return cpref.context_parallel_unshard(group, [out, leaf.grad], [1, 1])

    for got in cpref.run_local(fn, RANKS):
        for one, right in zip(got, (exact, exact_x.grad), strict=False):
            assert error(one, right) < 1e-13


from_another_module = F.scaled_dot_product_attention  # as `from torch.nn.functional import` has it


@pytest.mark.parametrize(
    "function",
    [
        from_another_module,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    ],
    ids=["imported before", "the packet", "the overload"],
)
def test_every_name_of_the_function_is_the_sharded_one(function):
    def body(q, k, v, is_causal, enable_gqa):
        return function(q, k, v, is_causal=is_causal)

    for whole in cpref.run_local(lambda group: sharded_run(group, body), 2):
        for got, exact in zip(whole, one_rank(), strict=True):
            assert error(got, exact) < 1e-13


def with_weights(x):
    return nn.MultiheadAttention(32, 4)(x, x, x)


def with_padding(x):
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
    return module(x, x, x, need_weights=False, key_padding_mask=hidden)


def with_an_option(**options):
    return lambda x: nn.MultiheadAttention(32, 4, **options)(x, x, x, need_weights=False)


def with_dropout(x):
    return nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)(x)


def with_flex(x):
    return flex_attention(*[x.unflatten(-1, (4, 8)).transpose(1, 2)] * 3)


def fused(x):
    weights = torch.zeros(96, 32), torch.zeros(96), torch.zeros(32, 32), torch.zeros(32)
    return torch._native_multi_head_attention(x, x, x, 32, 4, *weights)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (with_weights, "need_weights is True.*pass need_weights=False"),
        (with_padding, "key_padding_mask is a tensor"),
        (with_an_option(add_bias_kv=True), "bias_k is a tensor.*add_bias_kv=False"),
        (with_an_option(add_zero_attn=True), "add_zero_attn is True.*add_zero_attn=False"),
        (with_dropout, "dropout_p is 0.1"),
        (with_flex, "flex_attention would attend within this rank's shard only"),
        (fused, "_native_multi_head_attention would attend within this rank's shard only"),
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_attention_that_would_stay_within_the_shard_is_refused(call, words):
    def fn(group):
        with torch.no_grad(), cpref.context_parallel(group):
            call(torch.zeros(1, 8, 32))

    # why: flex_attention compiles itself, and the compiler passes an error on as one of its own
    with pytest.raises((NotImplementedError, Unsupported), match=words):
        cpref.run_local(fn, 2)


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
