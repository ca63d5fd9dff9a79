"""The cases in which sharded losses, labels and counts have gone wrong elsewhere."""

import pytest
import torch
import torch.nn.functional as F

import cpref
from cpref.loss import IGNORE, next_token_loss, next_token_loss_by_parts, shift_labels
from cpref.measure.peak import PeakMemory

S, VOCAB = 16, 11


def logits_and_labels(ignored=()):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, S, VOCAB, dtype=torch.float64, generator=generator)
    labels = torch.randint(VOCAB, (2, S), generator=generator)
    labels[:, list(ignored)] = IGNORE
    return logits, labels


def sharded(logits, labels, ranks, layout="contiguous"):
    """Each rank's loss, and the gradient of the whole logits summed over the ranks."""

    def fn(group):
        leaf = cpref.shard(logits, 1, group=group, layout=layout).requires_grad_()
        mine = cpref.shard(labels, 1, group=group, layout=layout)
        loss = next_token_loss(leaf, mine, group=group)
        loss.backward()
        grad = cpref.unshard(leaf.grad, 1, group=group, layout=layout, seq_len=S)
        return loss.detach(), grad

    return cpref.run_local(fn, ranks)


def one_rank(logits, labels):
    leaf = logits.clone().requires_grad_()
    supervised = (labels != IGNORE).sum()
    loss = F.cross_entropy(
        leaf.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = loss / supervised.clamp(min=1)
    loss.backward()
    return loss.detach(), leaf.grad


IGNORED = {
    "nothing": [],
    "the first of two shards": range(8),
    "the second of two shards": range(8, 16),
    "all but one token of the second shard": range(9, 16),
    "a long padded tail": range(3, 16),
    "everything": range(16),
}


@pytest.mark.parametrize("ignored", IGNORED.values(), ids=IGNORED)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loss_and_gradient_are_those_of_one_rank(ranks, layout, ignored):
    logits, labels = logits_and_labels(ignored)
    exact, exact_grad = one_rank(logits, labels)
    for loss, grad in sharded(logits, labels, ranks, layout):
        assert torch.allclose(loss, exact, rtol=1e-13, atol=0)
        assert torch.allclose(grad, exact_grad, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("ranks", [3, 5])
def test_all_ranks_return_the_same_bits(ranks):
    """Ranks whose losses differ in the last bit decide differently, when to stop for instance."""

    def fn(group):
        losses = []
        for seed in range(40):
            draw = torch.Generator().manual_seed(8 * seed + group.rank)
            logits = torch.randn(1, 4, VOCAB, generator=draw)
            labels = torch.randint(VOCAB, (1, 4), generator=draw)
            labels[:, 4 - (seed + group.rank) % 4 :] = IGNORE  # unequal shares of the sum
            losses.append(next_token_loss(logits, labels, group=group).item())
        return losses

    first, *others = cpref.run_local(fn, ranks)
    assert others == [first] * (ranks - 1)


def test_seven_tokens_on_one_rank_and_one_on_the_other_count_as_eight():
    logits, labels = logits_and_labels(ignored=[0, *range(9, 16)])
    per_token = F.cross_entropy(logits[0], labels[0], ignore_index=IGNORE, reduction="none")
    of_two = [per_token[1:8].mean(), per_token[8]]
    for loss, _ in sharded(logits[:1], labels[:1], 2):
        assert torch.allclose(loss, per_token.sum() / 8)
        assert not torch.allclose(loss, (of_two[0] + of_two[1]) / 2)


def test_the_last_token_of_a_shard_predicts_the_first_of_the_next():
    tokens = torch.arange(8).view(1, 8)
    labels = shift_labels(tokens)
    parts = cpref.run_local(
        lambda group: cpref.shard(labels, 1, group=group, layout="contiguous"), 2
    )
    assert parts[0].tolist() == [[1, 2, 3, 4]]
    assert parts[1].tolist() == [[5, 6, 7, IGNORE]]


def test_nothing_supervised_gives_zero_and_finite_gradients():
    logits, labels = logits_and_labels(ignored=range(S))
    for loss, grad in sharded(logits, labels, 2):
        assert loss.item() == 0
        assert torch.equal(grad, torch.zeros_like(grad))


def test_a_rank_without_any_token_takes_part():
    logits, labels = logits_and_labels()
    logits, labels = logits[:, :2], labels[:, :2]

    def fn(group):
        leaf = cpref.shard(logits, 1, group=group).requires_grad_()
        loss = next_token_loss(leaf, cpref.shard(labels, 1, group=group), group=group)
        loss.backward()
        return loss.item(), leaf.grad.shape

    exact = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    results = cpref.run_local(fn, 3)
    assert [round(loss, 12) for loss, _ in results] == [round(exact, 12)] * 3
    assert sum(shape[1] for _, shape in results) == 2


def test_half_precision_logits_are_summed_in_float32():
    logits, labels = logits_and_labels()
    for loss, _ in sharded(logits.bfloat16(), labels, 2):
        assert loss.dtype == torch.float32


def test_shapes_that_do_not_fit_on_one_rank_are_refused_on_all():
    def fn(group):
        labels = torch.zeros(1, 4 + group.rank, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"on rank 1: logits has shape \(1, 4, 8\) and labels"):
            next_token_loss(torch.zeros(1, 4, 8), labels, group=group)

    cpref.run_local(fn, 2)


@pytest.mark.parametrize("at_once", [1, 5, 100])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_loss_by_parts_is_the_loss(ranks, at_once):
    x, labels = torch.randn(2, S, 6, dtype=torch.float64), logits_and_labels([3])[1]
    weight = torch.randn(VOCAB, 6, dtype=torch.float64)

    def fn(group, by_parts):
        leaves = cpref.shard(x, 1, group=group).requires_grad_(), weight.clone().requires_grad_()
        mine = cpref.shard(labels, 1, group=group)
        if by_parts:
            loss = next_token_loss_by_parts(
                leaves[0], lambda x: x @ leaves[1].T, mine, at_once=at_once, group=group
            )
        else:
            loss = next_token_loss(leaves[0] @ leaves[1].T, mine, group=group)
        loss.backward()
        return loss.detach(), *(leaf.grad for leaf in leaves)

    for parts, whole in zip(
        cpref.run_local(fn, ranks, True), cpref.run_local(fn, ranks, False), strict=True
    ):
        torch.testing.assert_close(parts, whole)


def test_the_loss_by_parts_holds_the_logits_of_a_part():
    x, labels = torch.randn(1, 1024, 8, requires_grad=True), torch.zeros(1, 1024, dtype=torch.int64)
    weight = torch.randn(500, 8, requires_grad=True)

    def peak(group, at_once):
        with PeakMemory() as memory:
            next_token_loss_by_parts(
                x, lambda x: x @ weight.T, labels, at_once=at_once, group=group
            ).backward()
        return memory.peak_bytes

    whole, part = (cpref.run_local(peak, 1, at_once)[0] for at_once in (1024, 32))
    logits = 1024 * 500 * 4
    assert whole > 2 * logits and part < logits / 2


def test_no_token_at_once_is_refused():
    labels = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="at_once is 0; it must be at least 1 token"):
        cpref.run_local(
            lambda group: next_token_loss_by_parts(
                torch.randn(1, 4, 2), torch.nn.Identity(), labels, at_once=0, group=group
            ),
            2,
        )
