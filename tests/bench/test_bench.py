import json

import pytest

from cpref.bench.contenders import contenders
from cpref.bench.timing import _rotated
from cpref.cli import main
from cpref.measure.cost import Shape, backward_sent, forward_sent

SMALL = ["--seq-len", "64", "--heads", "4", "--head-dim", "8", "--rounds", "2"]


@pytest.mark.distributed
def test_the_benchmark_measures_everyone_in_one_run(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert main(["bench", *SMALL, "--out", str(out), "--figures", str(tmp_path)]) == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text())
    (table,) = report["tables"]
    results = {result["name"]: result for result in table["results"]}
    assert next(iter(results)) == "one process, SDPA"
    assert {c.name for c in contenders(2, 4)} == set(results)
    for name, result in results.items():
        assert len(result["seconds"]) == 2
        assert result["peak_bytes"] > 0
        if name.startswith(("cpref", "one process", "PyTorch")):
            assert all(error < 3e-6 for error in result["error"].values()), name
    shape = Shape(1, 64, 4, 4, 8, 2, 4)
    for strategy in ("ring", "all_gather", "reduce_scatter", "ulysses"):
        sent = (forward_sent(strategy, shape) + backward_sent(strategy, shape)).bytes
        agreed = 16  # the length and the digest of what the ranks agree on
        assert results[f"cpref {strategy}, zigzag"]["sent_bytes"] == sent + agreed
    assert "ratio: median over 2 rounds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq-len", "63"], "--seq-len is 63"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--dtype", "int8"], "'int8'; it must be float32"),
        (["--out", "/proc/none/bench.json"], "--out is /proc/none"),
        (["--figures", "/proc/none"], "--figures is /proc/none"),
    ],
)
def test_bad_input_is_one_line_and_status_2(options, words, capsys):
    assert main(["bench", *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.distributed
def test_the_judge_takes_no_more_tokens_than_all_can_share(capsys):
    small = ["--heads", "3", "--head-dim", "8", "--rounds", "1", "--only", "ring, zigzag"]
    assert main(["bench", "--ranks", "3", "--seq-len", "1536", *small]) == 0
    assert "against float64, at 1020 tokens" in capsys.readouterr().out


def test_every_contender_is_first_in_some_round():
    field = list(range(5))
    rounds = [_rotated(field, turn) for turn in range(10)]
    assert all(sorted(order) == field for order in rounds)
    assert {order[0] for order in rounds} == set(field)
