"""The planner: its bookkeeping against other counts, its choices, and what it refuses."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

import cpref
from cpref.cli import main
from cpref.measure.choices import STRATEGIES, Fixed, divisions, lightest, variants
from cpref.measure.cost import backward_sent, forward_sent
from cpref.measure.detector import DETECTORS, data_parallel
from cpref.measure.division import Division, memory, saved_by_layer, stage_parameters
from cpref.measure.hardware import gpu_named, network_named
from cpref.measure.memory import measure_memory
from cpref.measure.plan import SAME, DoesNotFit, Plan, option, plan, request
from cpref.measure.published import PUBLISHED, compared
from cpref.measure.reasons import reasons, verdict
from cpref.measure.shapes import ModelShape, model_shape
from cpref.measure.step import attention_of, least_time, model_flops, time
from cpref.model import Config, Decoder
from cpref.plan_command import _tokens
from cpref.train import sharded_attention

K, M = 2**10, 2**20


def asked(model="8b", seq_len=M, gpus=64, **others):
    return request(model_shape(model), seq_len, gpus, **others)


@cache
def planned(model="8b", seq_len=M, gpus=64) -> Plan:
    return plan(asked(model, seq_len, gpus))


# What a division holds and takes


WAYS = [
    Division(8, 4, 2, 1, "ring"),
    Division(8, 1, 1, 8, "all_gather", shard_all=True),
    Division(16, 2, 1, 2, "reduce_scatter", recompute=True),
    Division(4, 8, 1, 2, "ulysses", micro=2),
    Division(16, 2, 2, 1, "hybrid", 4, interleave=16),
    Division(1, 8, 2, 4),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.strategy)
def test_the_parts_add_up_and_none_is_negative(way):
    for parts in (memory(asked(), way), time(asked(), way)):
        assert min(vars(parts).values()) >= 0
        assert parts.total == pytest.approx(math.fsum(vars(parts).values()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tp", [1, 4])
def test_bytes_are_those_of_the_formulas(strategy, tp):
    way = Division(8, tp, 1, 1, strategy, 4 if strategy == "hybrid" else 1)
    shape = way.attention(asked())
    sent = forward_sent(strategy, shape) + backward_sent(strategy, shape)
    assert attention_of(asked(), way).sent == sent
    assert sent.bytes > 0


def test_states_of_one_gpu_are_18_bytes_of_each_parameter():
    alone, model = memory(asked(gpus=1), Division(1, 1, 1, 1)), model_shape("8b")
    states = alone.parameters + alone.gradients + alone.optimizer
    assert states == pytest.approx(18 * model.parameters, rel=1e-4)  # but for the last norm


def test_sharding_divides_the_states_by_all_ranks_that_share():
    whole = memory(asked(), Division(8, 1, 1, 8))
    shared = memory(asked(), Division(8, 1, 1, 8, shard_all=True))
    assert shared.parameters == whole.parameters / 64
    assert shared.gradients == whole.gradients / 64
    assert shared.optimizer == whole.optimizer
    assert shared.gathered > 0 == whole.gathered


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_fall_as_one_over_cp(recompute):
    of = [memory(asked(), Division(cp, 1, 1, 1, recompute=recompute)) for cp in (1, 2, 4, 8)]
    first = of[0].activations
    assert [first / one.activations for one in of] == pytest.approx([1, 2, 4, 8])


def test_what_a_pipeline_keeps_grows_with_its_stages_and_not_beyond_the_micro_batches():
    one = memory(asked(), Division(1, 1, 1, 1)).activations
    staged = memory(asked(), Division(1, 1, 4, 1)).activations
    assert staged == pytest.approx(one)  # a quarter of the layers, of 4 micro-batches
    few = memory(asked(), Division(1, 1, 8, 1)).activations
    assert few == pytest.approx(one / 2)  # an eighth, and there are only 4 micro-batches


def test_time_is_that_of_the_flops_at_the_assumed_part_of_the_peak():
    wanted = asked(gpus=1, seq_len=128 * K)
    alone, reached = time(wanted, Division(1, 1, 1, 1)), wanted.achieved
    peak = wanted.gpu.flops
    products = model_flops(wanted) - attention_flops(wanted)
    assert alone.products == pytest.approx(products / (reached.matmul * peak))
    parts = 1 / reached.attention_forward + 2.5 / reached.attention_backward
    assert alone.attention == pytest.approx(attention_flops(wanted) / 3 * parts / peak, rel=0.01)


def attention_flops(wanted):
    model, length = wanted.model, wanted.seq_len
    pairs = length * (length + 1) // 2
    return 3 * 4 * wanted.batch * model.layers * model.heads * model.head_dim * pairs


def test_the_bubble_is_that_of_the_schedule():
    wanted = asked(gpus=4, batch_tokens=8 * M)
    hop = 2 * wanted.network.inside.seconds(M * 4096 * 2)  # there in forward, back in backward
    for runs in (1, 8):
        of = time(wanted, Division(1, 1, 4, 1, interleave=runs))
        idle = of.pipeline - (3 + 8 * runs) * hop
        assert idle / (of.total - of.pipeline) == pytest.approx(3 / (8 * runs))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bound_is_below_the_time_and_exact_without_cp(strategy):
    for way in divisions(asked(seq_len=64 * K, gpus=16), Fixed(strategy=strategy)):
        wanted = asked(seq_len=64 * K, gpus=16)
        bound, real = least_time(wanted, way).total, time(wanted, way).total
        assert bound <= real * (1 + 1e-12)
        if way.cp == 1:
            assert bound == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_longer_sequences_more_work_and_slower_links_cost_more(strategy):
    way = Division(8, 1, 1, 8, strategy)
    times = [time(asked(seq_len=n * K, batch_tokens=8 * n * K), way).total for n in (64, 128, 256)]
    assert times == sorted(times) and times[2] > 4 * times[0]
    slow = time(asked(link="infiniband-ndr"), replace(way, dp=1))
    fast = time(asked(link="nvlink4"), replace(way, dp=1))
    assert slow.context >= fast.context
    assert slow.attention == fast.attention


# What is chosen


def test_the_plan_is_the_fastest_of_all_that_fit_or_as_good():
    """Against a search that models every division in full."""
    wanted = asked(seq_len=128 * K, gpus=16)
    every = [one for way in divisions(wanted, Fixed()) for one in variants(wanted, way)]
    assert len(every) > 100
    options = [option(wanted, way) for way in every]
    found = plan(wanted)
    fastest = min(one.time.total for one in options)
    assert found.best.time.total <= (1 + SAME) * fastest
    assert found.best.memory.total <= wanted.room
    by_cp = {one.way.cp for one in options}
    assert set(found.by_cp) == by_cp
    for cp, one in found.by_cp.items():
        assert one.time.total == min(each.time.total for each in options if each.way.cp == cp)
    alike = [each for each in options if each.way.cp == found.best.way.cp]
    for name, one in found.by_strategy.items():
        assert one.time.total == min(each.time.total for each in alike if each.way.strategy == name)


def test_what_variants_leave_out_is_never_faster():
    wanted, way = asked(seq_len=64 * K, gpus=8), Division(2, 2, 1, 2)
    kept = [option(wanted, one).time.total for one in variants(wanted, way)]
    for recompute in (False, True):
        for shard_all in (False, True):
            other = replace(way, recompute=recompute, shard_all=shard_all)
            if memory(wanted, other).total <= wanted.room:
                assert time(wanted, other).total >= min(kept)


@pytest.mark.parametrize(("seq_len", "gpus"), [(2 * K, 8), (4 * K, 8), (8 * K, 64)])
def test_short_sequences_are_not_divided(seq_len, gpus):
    found = planned("8b", seq_len, gpus)
    assert found.best.way.cp == 1
    assert verdict(found) == "Do not use context parallelism for this job."


def test_a_million_tokens_are_divided_and_it_says_what_would_be_without():
    found = planned()
    assert found.best.way.cp > 1
    assert found.by_cp[1].time.total > 1.5 * found.best.time.total
    assert "without CP" in reasons(found)[0] and "times as long" in reasons(found)[0]
    assert found.runner_up is not None and found.runner_up.choice != found.best.choice


def test_cp_pays_more_the_longer_the_sequence():
    gains = []
    for length in (8, 128, 1024):
        found = planned("8b", length * K, 64)
        least = min(one.time.total for one in found.by_cp.values())
        gains.append(found.by_cp[1].time.total / least)
    assert gains == sorted(gains)
    assert gains[0] < 1.01 and gains[2] > 1.5


@pytest.mark.parametrize("gpus", [7, 48, 64])
def test_every_division_uses_all_gpus_and_shares_heads_layers_and_sequences(gpus):
    wanted = asked(seq_len=64 * K, gpus=gpus, batch_tokens=48 * 64 * K)
    every = list(divisions(wanted, Fixed()))
    impossible = {"ulysses", "hybrid"} if gpus == 7 else set()
    assert {way.strategy for way in every} == set(STRATEGIES) - impossible
    for way in every:
        assert way.gpus == gpus
        assert wanted.model.kv_heads % way.tp == 0 == wanted.batch % way.dp
        assert way.pp <= wanted.model.layers
        heads = wanted.model.heads // way.tp
        if way.cp > 1 and way.strategy == "ulysses":
            assert heads % way.cp == 0
        if way.strategy == "hybrid" and way.cp > 1:
            assert 1 < way.row < way.cp and heads % way.row == 0 == way.cp % way.row


@pytest.mark.parametrize("fixed", [Fixed(cp=8), Fixed(tp=4, pp=2), Fixed(strategy="ulysses", cp=8)])
def test_what_is_fixed_stays(fixed):
    way = plan(asked(seq_len=256 * K), fixed).best.way
    for name, value in vars(fixed).items():
        assert value in (None, getattr(way, name))
    assert way.gpus == 64


def test_without_a_fitting_division_it_says_which_limit_breaks_and_by_how_much():
    with pytest.raises(DoesNotFit) as error:
        plan(asked(gpus=1))
    found = error.value
    assert found.missing == found.memory.total - found.request.room > 0
    assert memory(found.request, found.least) == found.memory
    enough = asked(gpus=found.enough)
    assert plan(enough).best.memory.total <= enough.room
    half = asked(gpus=found.enough // 2)
    assert all(memory(half, lightest(way)).total > half.room for way in divisions(half, Fixed()))


def test_a_detector_takes_little_memory_and_hides_its_gradients_behind_few_images():
    gpu = gpu_named("h100-80gb")
    for detector in DETECTORS.values():
        assert detector.positions == 400
        assert detector.states < 0.015 * gpu.memory
        way = data_parallel(detector, 8, gpu, network_named("nvlink+ib", gpu))
        assert way.images * way.image >= way.gradients > (way.images - 1.01) * way.image
        assert data_parallel(detector, 1, gpu, network_named("nvlink4", gpu)).gradients == 0


# What was published


def test_the_published_rows_are_divisions_of_their_gpus():
    for row in PUBLISHED:
        assert row.tp * row.cp * row.pp * row.dp == row.gpus, row
        assert row.batch % row.dp == 0
        assert row.cp == 1 or row.seq_len >= 32 * K
    (stage,) = [row for row in PUBLISHED if row.seq_len == 131_072 and row.source == "llama3"]
    assert (stage.gpus, stage.tp, stage.cp, stage.pp, stage.dp) == (16384, 8, 16, 16, 8)
    nemo = [row for row in PUBLISHED if row.source == "nemo"]
    assert [row.seq_len // K for row in nemo] == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    gains = [round(row.tflops / row.without_cp, 2) for row in nemo]
    assert gains == [1.0, 1.0, 1.0, 1.03, 1.07, 1.31, 1.4, 5.28, 20.23]


@pytest.mark.slow
def test_the_model_uses_cp_from_the_length_on_from_which_nemo_gains_by_it():
    """And the gains are those that were published within a factor of 1.5, from 1 to 20."""
    rows = [compared(row) for row in PUBLISHED if row.source == "nemo"]
    assert all(one.agrees for one in rows)
    for one in rows:
        assert one.theirs is not None
        assert 1 / 1.5 < one.speedup / one.published_speedup < 1.5, one.row
    assert [one.row.seq_len // K for one in rows if one.speedup > 1.02] == [32, 128, 256, 512, 1024]


@pytest.mark.slow
def test_the_long_context_stage_of_llama_3_is_nearly_what_is_planned():
    (row,) = [row for row in PUBLISHED if row.seq_len == 131_072 and row.source == "llama3"]
    one = compared(row)
    best = one.plan.best.way
    assert (best.tp, best.pp, best.cp, best.dp) == (8, 16, 2 * row.cp, row.dp // 2)
    assert one.theirs.way.recompute and not one.unbounded.way.recompute
    assert one.plan.tflops(one.unbounded) == pytest.approx(row.tflops, rel=0.1)
    assert "fits only with recomputation" in one.why


# The command


def run(capsys, *words):
    status = main(["plan", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


JOB = ("--model", "8b", "--seq-len", "128K", "--gpus", "16")


def test_it_prints_memory_time_and_reasons_and_that_they_are_modelled(capsys):
    status, out, _ = run(capsys, *JOB)
    assert status == 0
    for word in ("Use context parallelism", "Why:", "Next best:", "Modelled from datasheets"):
        assert word in out
    for part in (
        "parameters",
        "optimizer",
        "activations",
        "products of matrices",
        "waiting for CP",
    ):
        assert part in out


def test_its_numbers_come_as_json(capsys):
    status, out, _ = run(capsys, *JOB, "--json")
    report = json.loads(out)
    assert status == 0 and report["modelled"] is True
    parts = report["best"]["memory_bytes"]
    assert parts.pop("total") == pytest.approx(sum(parts.values()))
    assert report["by_cp"]["1"]["seconds"]["total"] > report["best"]["seconds"]["total"]


def test_its_figures_are_written(capsys, tmp_path):
    assert run(capsys, *JOB, "--figures", str(tmp_path / "new"))[0] == 0
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["plan_memory.png", "plan_time.png"]


def test_a_vision_model_is_told_to_use_data_parallelism(capsys):
    status, out, _ = run(capsys, "--model", "yolo11n", "--gpus", "8")
    assert status == 0
    assert "Do not use context parallelism" in out and "DP = 8" in out
    _, out, _ = run(capsys, "--model", "yolo11n", "--gpus", "8", "--json")
    assert json.loads(out)["use_cp"] is False


@pytest.mark.parametrize("as_json", [False, True])
def test_an_impossible_job_is_status_1_with_the_limit(capsys, as_json):
    words = ("--model", "8b", "--seq-len", "1M", "--gpus", "1")
    status, out, _ = run(capsys, *words, *["--json"] * as_json)
    assert status == 1
    assert "the memory of the GPU is the limit" in out and "too much" in out
    assert not as_json or json.loads(out)["fits"] is False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "9b"), "model is '9b'; it must be one of 1b, 8b, 70b, 405b"),
        (("--gpu", "v100"), "gpu is 'v100'; it must be one of a100-80gb"),
        (("--link", "modem"), "link is 'modem'; it must be one of nvlink3"),
        (("--seq-len", "long"), "--seq-len is 'long'; it must be a whole number"),
        (("--seq-len", "1.5M"), "--seq-len is '1.5M'; it must be a whole number"),
        (("--seq-len", "-4"), "--seq-len is '-4'; it must be a whole number"),
        (("--seq-len", "0"), "seq_len is 0; it must be at least 1"),
        (("--gpus", "0"), "gpus is 0; it must be at least 1"),
        (("--global-batch-tokens", "x"), "--global-batch-tokens is 'x'"),
        (("--global-batch-tokens", "1K"), "it must be at least one sequence, 131072"),
        (("--seq-len", "8", "--global-batch-tokens", "8"), "at least one token for each"),
        (("--seq-len", "8", "--cp", "16"), "cp is 16; it must be at most 8"),
        (("--cp", "3"), "cp is 3; it must divide the 16 GPUs"),
        (("--tp", "16"), "tp is 16; it must be at most 8: the 8 K,V heads of 8b"),
        (("--dp", "16", "--seq-len", "1M"), "dp is 16; it must be at most 4: the 4 sequences"),
        (("--strategy", "star"), "strategy is 'star'; it must be one of ring, all_gather"),
        (
            ("--gpus", "64", "--cp", "64", "--strategy", "ulysses"),
            "8b has 32 heads for each TP part, which 64 ranks cannot share",
        ),
        (("--cp", "4", "--tp", "2", "--pp", "1", "--dp", "1"), "no division of 16 GPUs has cp 4"),
        (("--cp", "2", "--strategy", "hybrid"), "hybrid needs at least 2 rows of at least 2 ranks"),
        (("--gpu", "a100-80gb", "--fp8"), "which has no float8 tensor cores"),
        (("--figures", "/proc/nothing"), "--figures is /proc/nothing"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(words, says, capsys):
    status, out, said = run(capsys, *JOB, *words)
    assert (status, out) == (2, "")
    assert says in said and said.count("\n") == 1


def test_what_is_missing_is_named(capsys):
    assert "--model is missing" in run(capsys)[2]
    assert "--gpus is missing" in run(capsys, "--model", "8b")[2]
    assert "--seq-len is None" in run(capsys, "--model", "8b", "--gpus", "8")[2]


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("128K", 131_072), ("1m", M)])
def test_lengths_may_be_in_powers_of_1024(text, tokens):
    assert _tokens("--seq-len", text) == tokens


@pytest.mark.slow
def test_the_published_set_ups_are_compared(capsys, monkeypatch):
    few = [row for row in PUBLISHED if row.gpus in (16, 32)]
    monkeypatch.setattr("cpref.plan_command.PUBLISHED", few)
    status, out, _ = run(capsys, "--published")
    assert status == 0
    assert out.count("agrees") == 2 and "float8 reaches less of its peak" in out
    rows = json.loads(run(capsys, "--published", "--json")[1])
    assert [row["published"]["cp"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_a_block_of_the_decoder_saves_what_is_counted_and_what_its_pieces_keep_more():
    """Measured in float32, for a block more; with norms and SwiGLU in pieces it keeps of a token
    three vectors, silu(gate) and the sizes of two vectors more."""
    config, tokens = Config(), 256

    def saved(group, layers):
        model = Decoder(replace(config, layers=layers))
        positions = torch.arange(tokens)
        attention = sharded_attention(group, "ring", "zigzag", tokens)
        with measure_memory(model.parameters()) as seen:
            model(positions.view(1, -1) % config.vocab, positions, attention).sum()
        return seen.saved_bytes

    one, two = (cpref.run_local(saved, 1, layers)[0] for layers in (1, 2))
    sizes = config.heads, config.kv_heads, config.head_dim, config.hidden, config.vocab
    counted = saved_by_layer(ModelShape("small", 1, config.width, *sizes)) - 4 * config.heads
    numbers = (two - one) / tokens / 4 - config.heads
    assert numbers == counted / 2 + 3 * config.width + config.hidden + 2


def test_a_stage_has_its_layers_and_the_first_one_the_embedding():
    assert stage_parameters(asked(), Division(1, 1, 2, 1)) == pytest.approx(
        16 * model_shape("8b").layer_parameters + 128_256 * 4096
    )
