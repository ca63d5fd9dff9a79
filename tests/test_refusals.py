"""What cannot work is refused at the call, on every rank, in words that say what to do."""

import pytest
import torch

import cpref

X = torch.randn(1, 4, 8, 16)


def attention(group, q=X, k=X, v=X, **options):
    return cpref.context_parallel_attention(q, k, v, group=group, **options)


REFUSED = {
    "three dimensions": (lambda g: attention(g, X[0]), ValueError, "q has shape"),
    "whole numbers": (lambda g: attention(g, X.int()), TypeError, "q is torch.int32"),
    "complex": (lambda g: attention(g, X.cfloat()), TypeError, "q is torch.complex64"),
    "eight bits": (lambda g: attention(g, X.to(torch.float8_e4m3fn)), TypeError, "float8"),
    "no tensor": (lambda g: attention(g, None), TypeError, "q is NoneType"),
    "no batch": (lambda g: attention(g, *[X[:0]] * 3), ValueError, "at least 1"),
    "no token": (lambda g: attention(g, *[X[:, :, :0]] * 3), ValueError, "seq_len is 0"),
    "a length in words": (lambda g: attention(g, seq_len="16"), ValueError, "seq_len is '16'"),
    "half a token": (lambda g: attention(g, seq_len=16.5), ValueError, "seq_len is 16.5"),
    "a scale that is none": (
        lambda g: attention(g, scale=float("nan")),
        ValueError,
        "scale is nan",
    ),
    "a scale in words": (lambda g: attention(g, scale="1"), ValueError, "scale is '1'"),
    "a mask in words": (lambda g: attention(g, mask="causal"), TypeError, "mask is 'causal'"),
    "a class as mask": (lambda g: attention(g, mask=cpref.Causal), TypeError, "mask is <class"),
    "a mask_mod of four": (
        lambda g: attention(g, mask=lambda b, h, i, j: i >= j),
        TypeError,
        r"takes \(q_index, kv_index\)",
    ),
    "a mask_mod of numbers": (
        lambda g: attention(g, mask=lambda i, j: i - j),
        TypeError,
        "must return bool",
    ),
    "a mask_mod with and": (
        lambda g: attention(g, mask=lambda i, j: i >= j and j >= 0),
        ValueError,
        "tensor operators",
    ),
    "an unknown strategy": (lambda g: attention(g, strategy="rings"), ValueError, "one of ring"),
    "an unknown layout": (lambda g: attention(g, layout=None), ValueError, "one of contiguous"),
    "an unknown sum": (lambda g: attention(g, accumulate="fp8"), ValueError, "one of fp32"),
    "hybrid on a line": (lambda g: attention(g, strategy="hybrid"), ValueError, "two dimensions"),
    "a number as group": (lambda g: attention(3), TypeError, "group is int"),
    "no such dimension": (lambda g: cpref.shard(X, 7, group=g), IndexError, "dim is 7"),
    "nowhere to unshard": (lambda g: cpref.unshard(X, -5, group=g), IndexError, "dim is -5"),
    "documents in words": (lambda g: cpref.Documents("ab"), ValueError, "at least 1 token"),
}


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_work_is_refused(call, kind, words, ranks):
    def fn(group):
        with pytest.raises(kind, match=words):
            call(group)
        return True

    assert all(cpref.run_local(fn, ranks))


def first_half(q, kv):
    return (q >= 0) & (kv < 8)


def second_half(q, kv):
    return (q >= 0) & (kv >= 8)


first_half.__qualname__ = second_half.__qualname__ = "half"


def test_two_mask_mods_of_one_name_are_told_apart():
    def fn(group):
        with pytest.raises(
            ValueError, match=r"mask is MaskMod\(half\) with checksum \w+ on rank 0"
        ):
            attention(group, mask=second_half if group.rank else first_half)

    cpref.run_local(fn, 2)


def test_ranks_of_which_one_needs_a_gradient_are_refused_before_they_wait_for_each_other():
    def fn(group):
        x = X.clone().requires_grad_(group.rank == 1)
        with pytest.raises(ValueError, match="requires_grad is False on rank 0, True on rank 1"):
            cpref.unshard(x, 2, group=group)

    cpref.run_local(fn, 2)


def test_a_refused_call_has_sent_nothing():
    def fn(group):
        x = X[:, :, : 8 - group.rank]
        with pytest.raises(ValueError, match="on rank 1: q has 7 tokens"):
            attention(group, x, x, x, seq_len=16)
        return group.traffic.bytes

    assert cpref.run_local(fn, 2) == [0, 0]


def test_the_judge_refuses_what_it_would_compute_wrongly():
    with pytest.raises(ValueError, match="q has 4 heads and k 3"):
        cpref.reference_attention(X, X[:, :3], X[:, :3], mask=cpref.Full())
    with pytest.raises(ValueError, match="as many keys as queries"):
        cpref.reference_attention(X, X[:, :, :4], X[:, :, :4], mask=cpref.Causal())


def test_one_rank_with_a_bad_argument_raises_on_all():
    def fn(group):
        v = X.double() if group.rank == 1 else X
        with pytest.raises(TypeError, match=r"on rank 1: v is torch\.float64"):
            attention(group, v=v)
        return attention(group).shape  # and nothing is lost: the next call works

    assert cpref.run_local(fn, 3) == [X.shape] * 3


def test_lengths_may_be_numbers_of_other_libraries():
    numpy = pytest.importorskip("numpy")
    shapes = cpref.run_local(lambda g: attention(g, seq_len=numpy.int64(16)).shape, 2)
    assert shapes == [X.shape] * 2
    assert cpref.Documents(torch.tensor([10, 6])) == cpref.Documents((10, 6))
