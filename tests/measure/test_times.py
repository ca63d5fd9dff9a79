"""The model of time: its bytes are those of the formulas, its schedules those drawn by hand."""

import pytest

import cpref
from cpref.measure.cost import Shape, backward_sent, forward_sent
from cpref.measure.times import Link, Machine, Rates, backward_pass, forward_pass
from cpref.measure.work import attention_work

pytestmark = pytest.mark.slow

# A pair takes a second in forward and two in backward where B·H·D is 1; nothing else takes time.
COMPUTE = Rates(pair=1), Rates(pair=2)
FREE = Link(latency=0, bandwidth=float("inf"))


def shape_of(ranks, neighbours=1, heads=8, kv_heads=8, seq_len=96):
    return Shape(2, seq_len, heads, kv_heads, 16, ranks, 2, neighbours=neighbours)


def joined(strategy, shape):
    return {"ulysses": shape.ranks, "hybrid": shape.neighbours}.get(strategy, 1)


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize(
    ("strategy", "ranks", "neighbours"),
    [
        *((name, p, 1) for name in ("ring", "all_gather", "reduce_scatter") for p in (1, 2, 4)),
        ("ulysses", 4, 1),
        ("hybrid", 4, 2),
        ("hybrid", 8, 4),
        ("hybrid", 4, 1),
    ],
)
def test_the_schedules_move_the_bytes_of_the_formulas(strategy, ranks, neighbours, kv_heads):
    shape = shape_of(ranks, neighbours, kv_heads=kv_heads)
    work = attention_work(96, ranks, joined=joined(strategy, shape))
    machine = Machine(*COMPUTE, Link(1.0, 1000.0))
    for modelled, formula in (
        (forward_pass(strategy, shape, work, machine), forward_sent(strategy, shape)),
        (backward_pass(strategy, shape, work, machine), backward_sent(strategy, shape)),
    ):
        assert modelled.sent == formula
        assert modelled.transfer == pytest.approx(formula.messages + formula.bytes / 1000)
        assert max(modelled.compute, modelled.transfer) <= modelled.total * (1 + 1e-12)
        assert modelled.total <= (modelled.compute + modelled.transfer) * (1 + 1e-12)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "reduce_scatter", "ulysses"])
def test_over_a_free_link_a_balanced_layout_takes_the_time_of_its_pairs(strategy):
    shape = Shape(1, 96, 4, 4, 1, 4, 4)
    work = attention_work(96, 4, joined=joined(strategy, shape))
    machine = Machine(*COMPUTE, FREE)
    pairs = 4 * 96 * 97 / 2 / 4  # heads, and a fourth of the pairs
    assert forward_pass(strategy, shape, work, machine).total == pytest.approx(pairs)
    assert backward_pass(strategy, shape, work, machine).total == pytest.approx(2 * pairs)


def test_the_ring_waits_for_the_rank_that_has_most_to_do():
    """Contiguous and causal: the last rank has a full tile at each step but its own."""
    shape = Shape(1, 64, 1, 1, 1, 4, 4)
    machine = Machine(*COMPUTE, FREE)
    contiguous = forward_pass("ring", shape, attention_work(64, 4, "contiguous"), machine)
    assert contiguous.total == 16 * 17 / 2 + 3 * 16 * 16
    assert contiguous.exposed == 0  # the last rank itself waits for nobody


def test_a_ring_that_overlaps_takes_the_longer_and_one_that_does_not_the_sum():
    shape, work = Shape(1, 64, 1, 1, 1, 4, 4), attention_work(64, 4, mask=cpref.Full())
    tile, block = 16 * 16, 2 * 16 * 4
    for hop in (tile // 4, tile * 4):
        machine = Machine(*COMPUTE, Link(0, block / hop))
        forward = forward_pass("ring", shape, work, machine)
        assert forward.total == 3 * max(tile, hop) + tile
        alone = forward_pass("ring", shape, work, machine, overlap=False)
        assert alone.total == 3 * (tile + hop) + tile
        backward = backward_pass("ring", shape, work, machine, overlap=False)
        assert backward.total == 4 * 2 * tile + 3 * 2 * hop


def test_a_backward_that_overlaps_hides_all_but_the_first_hop_when_tiles_take_longer():
    shape, work = Shape(1, 64, 1, 1, 1, 4, 4), attention_work(64, 4, mask=cpref.Full())
    machine = Machine(*COMPUTE, Link(0, 2 * 16 * 4 / 10))
    assert backward_pass("ring", shape, work, machine).total == 4 * 2 * 16 * 16 + 10


def test_an_all_gather_hides_behind_a_ranks_own_tile_alone():
    shape, work = Shape(1, 64, 1, 1, 1, 4, 4), attention_work(64, 4, mask=cpref.Full())
    machine = Machine(*COMPUTE, Link(0, 2 * 16 * 4 / 200))  # 200 seconds a block, 256 a tile
    assert forward_pass("all_gather", shape, work, machine).total == 600 + 3 * 256
    assert backward_pass("all_gather", shape, work, machine).total == 600 + 3 * 512 + 600


def test_steps_in_which_no_rank_has_work_are_passed_over():
    shape = Shape(1, 64, 1, 1, 1, 8, 4)
    near = attention_work(64, 8, "contiguous", cpref.SlidingWindow(4))
    machine = Machine(*COMPUTE, Link(1, float("inf")))
    assert forward_pass("ring", shape, near, machine).sent.messages == 1
    assert backward_pass("ring", shape, near, machine).sent.messages == 2


def test_a_row_on_the_diagonal_takes_its_time():
    shape, work = Shape(2, 64, 4, 2, 8, 4, 4), attention_work(64, 4)
    machine = Machine(Rates(0, edge=1), Rates(0, edge=3), FREE)
    assert forward_pass("ring", shape, work, machine).total == 2 * 4 * 8 * 16
    assert backward_pass("ring", shape, work, machine).total == 3 * 2 * 4 * 8 * 16


def test_calls_rows_and_the_start_take_their_time():
    shape, work = Shape(2, 64, 4, 2, 8, 1, 4), attention_work(64, 1)
    forward, backward = Rates(0, 0, 1, 100, 10_000), Rates(0, 0, 1, 100, 20_000)
    machine = Machine(forward, backward, FREE)
    assert forward_pass("ring", shape, work, machine).total == 10_000 + 100 + 2 * 4 * 8 * 64
    sums = 2 * 64 * (4 * 8 + 2 * 16)
    assert backward_pass("ring", shape, work, machine).total == 20_000 + 100 + sums
