"""A world of threads behaves as one of processes, and says so when it cannot go on."""

import gc
import os
import signal
import threading
import time

import psutil
import pytest
import torch

import cpref
from cpref import LocalError, run_local

from .sharded import draw, judged, sharded, with_changing_documents


def ended(before):
    """Whether all threads but those of `before` end soon."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not set(threading.enumerate()) - before:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    assert ended(before)


def test_results_come_in_the_order_of_ranks_with_the_arguments_given():
    assert run_local(lambda group, a, b: (group.rank, group.size, a + b), 3, 4, 5) == [
        (0, 3, 9),
        (1, 3, 9),
        (2, 3, 9),
    ]


@pytest.mark.parametrize("ranks", [0, -1, 2.0, "2"])
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks):
    with pytest.raises(ValueError, match=f"ranks is {ranks!r}; it must be a whole number"):
        run_local(lambda group: None, ranks)


class Odd(Exception):
    """An exception with more arguments than a message, that cannot be rebuilt from its text."""

    def __init__(self, number, thing):
        super().__init__(f"{number} {thing}")
        self.number, self.thing = number, thing


def test_the_first_exception_is_raised_as_it_was_and_the_other_ranks_end():
    raised = Odd(7, object())

    def fail(group):
        if group.rank == 2:
            raise raised
        group.shift(torch.zeros(1)).wait()  # ranks 0 and 3 wait in vain
        group.all_gather(torch.zeros(1)).wait()

    with pytest.raises(Odd) as caught:
        run_local(fail, 4)
    assert caught.value is raised
    assert raised.__notes__ == ["raised on rank 2 of 4"]
    assert "fail" in [entry.name for entry in caught.traceback]


def test_an_exception_in_backward_ends_the_other_ranks():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rank):
            ctx.rank = rank
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.rank == 1:
                raise Odd(1, "backward")
            return grad, None

    def fail(group):
        x = torch.zeros(12, requires_grad=True)
        part = Broken.apply(cpref.shard(x, 0, group=group), group.rank)
        out = Broken.apply(cpref.unshard(part, 0, group=group), group.rank)
        out.sum().backward()  # the others wait for rank 1 in the backward of unshard

    with pytest.raises(Odd):
        run_local(fail, 3)


def test_ranks_that_make_different_moves_are_told_who_waits_for_whom():
    def disagree(group):
        if group.rank == 1:
            return group.all_gather(torch.zeros(1), label="the gathering").wait()
        return group.shift(torch.zeros(1), label="the shift").wait()

    with pytest.raises(LocalError) as caught:
        run_local(disagree, 2)
    assert str(caught.value) == (
        "no rank can go on: rank 0 waits in the shift for rank 1; "
        "rank 1 waits in the gathering for rank 0"
    )


def test_waiting_for_a_rank_that_has_ended_is_an_error():
    def leave_early(group):
        if group.rank == 0:
            return
        group.shift(torch.zeros(1), label="step 3").wait()

    with pytest.raises(LocalError, match="rank 1 waits in step 3 for rank 0, which has ended"):
        run_local(leave_early, 2)


def test_a_rank_that_waits_for_itself_alone_is_told():
    """Both post a send to the other's next message, and wait for one that nobody posts."""

    def second_first(group):
        if group.rank == 0:
            group.shift(torch.zeros(1))
        group.shift(torch.zeros(1), label="second").wait()

    with pytest.raises(LocalError, match="rank 0 waits in second for rank 1, which has ended"):
        run_local(second_first, 2)


@pytest.mark.parametrize("sent", [torch.zeros(3), torch.zeros(2).double()], ids=["size", "dtype"])
def test_a_message_of_another_size_or_dtype_is_an_error_not_garbage(sent):
    def mismatch(group):
        group.shift(sent if group.rank == 1 else torch.zeros(2), label="it").wait()

    said = r"rank \d expects \d numbers of torch.float\d\d from rank \d in it, and gets \d of"
    with pytest.raises(LocalError, match=said):
        run_local(mismatch, 2)


def test_ranks_share_no_memory_through_messages():
    def scribble(group):
        mine = torch.full((4,), float(group.rank))
        moves = [
            group.shift(mine),
            group.all_gather(mine),
            group.reduce_scatter([mine, mine]),
            group.all_to_all([mine, mine], [mine.shape, mine.shape]),
        ]
        mine.fill_(99)  # after it was sent
        came, parts, total, dealt = (move.wait() for move in moves)
        seen = [came.tolist(), [p.tolist() for p in parts], [p.tolist() for p in dealt]]
        for x in (came, *parts, total, *dealt):
            x.fill_(77)  # after it was received
        group.all_gather(torch.zeros(1)).wait()
        return seen, mine.tolist(), total.tolist()

    for rank, (seen, mine, _) in enumerate(run_local(scribble, 2)):
        zeros, ones = [0.0] * 4, [1.0] * 4
        assert seen == [[zeros, ones][1 - rank], [zeros, ones], [zeros, ones]]
        assert mine == [99.0] * 4


@pytest.mark.slow
def test_thirty_two_ranks_in_one_process():
    tensors = draw(torch.float64, batch=1, heads=2, kv_heads=1, seq_len=97)
    right = judged(*tensors)
    for results in run_local(sharded, 32, *tensors):
        for x, exactly in zip(results, right, strict=True):
            torch.testing.assert_close(x, exactly, rtol=1e-12, atol=1e-13)


def test_the_number_of_threads_is_as_before_also_after_an_error():
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            each = run_local(lambda group: torch.get_num_threads(), 4)
            assert each == [1] * 4
            assert torch.get_num_threads() == threads
            with pytest.raises(ZeroDivisionError):
                run_local(lambda group: 1 / 0, 2)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_grad_mode_of_the_caller_holds_on_all_ranks():
    assert run_local(lambda group: torch.is_grad_enabled(), 2) == [True, True]
    with torch.no_grad():
        assert run_local(lambda group: torch.is_grad_enabled(), 2) == [False, False]


def test_an_interrupt_ends_the_ranks_that_wait():
    stop = threading.Event()

    def wait(group):
        if group.rank == 0:
            stop.wait(30)
        group.shift(torch.zeros(1)).wait()

    def interrupt():
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = set(threading.enumerate())
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_local(wait, 3)
    stop.set()
    assert ended(before)


def test_a_thousand_ring_steps_leave_nothing_behind():
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    def go_round(group):
        block = torch.full((1000,), float(group.rank))
        for _ in range(1000):
            block = group.shift(block).wait()
        return block[0].item(), len(group._mail._boxes), len(group._mail._waiting)

    results = run_local(go_round, 3)
    assert [first for first, *_ in results] == [(rank - 1000) % 3 for rank in range(3)]
    assert results[-1][2] <= 3
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files


def test_a_subgroup_moves_among_its_members_only():
    def sum_of_parity(group):
        mine = group.subgroup(tuple(range(group.rank % 2, group.size, 2)))
        return mine.all_reduce(torch.tensor([float(group.rank)])).item()

    assert run_local(sum_of_parity, 5) == [6.0, 4.0, 6.0, 4.0, 6.0]


def test_a_rank_outside_a_subgroup_is_refused():
    with pytest.raises(ValueError, match=r"rank 2 is not among its members \(0, 1\)"):
        run_local(lambda group: group.subgroup((0, 1)), 3)


def test_two_groups_of_the_same_ranks_do_not_mix_their_messages():
    def in_any_order(group):
        first, second = group.subgroup((0, 1, 2)), group.subgroup((0, 1, 2))
        words = {"first": torch.tensor([1.0]), "second": torch.tensor([2.0])}
        moves = [("first", first), ("second", second), ("world", group)]
        words["world"] = torch.tensor([3.0])
        if group.rank == 1:
            moves.reverse()
        posted = {name: by.shift(words[name]) for name, by in moves}
        return {name: move.wait().item() for name, move in posted.items()}

    assert run_local(in_any_order, 3) == [{"first": 1, "second": 2, "world": 3}] * 3


def test_ranks_keep_the_modes_of_the_thread_that_starts_them():
    def product(group):
        x = torch.ones(2, 2, requires_grad=not torch.is_inference_mode_enabled())
        y = x @ x
        return y.dtype, y.requires_grad, y.is_inference()

    with torch.autocast("cpu", torch.bfloat16):
        assert run_local(product, 2) == [(torch.bfloat16, True, False)] * 2
        with torch.autocast("cpu", enabled=False):
            assert run_local(product, 2) == [(torch.float32, True, False)] * 2
    with torch.no_grad():
        assert run_local(product, 2) == [(torch.float32, False, False)] * 2
    with torch.inference_mode():
        assert run_local(product, 2) == [(torch.float32, False, True)] * 2
    assert run_local(product, 2) == [(torch.float32, True, False)] * 2


@pytest.mark.slow
def test_hundreds_of_attentions_with_other_documents_leave_nothing_behind():
    """An object that stayed for each call on each rank would be 1,200 more."""

    def objects():
        gc.collect()
        return len(gc.get_objects()), psutil.Process().num_fds(), threading.active_count()

    run_local(with_changing_documents, 3, 0, 200)  # fills what is remembered of earlier masks
    before = objects()
    run_local(with_changing_documents, 3, 200, 400)
    after = objects()
    assert after[0] - before[0] < 400
    assert after[1:] <= before[1:]
