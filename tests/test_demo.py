import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

import cpref
from cpref.classroom.launch import Kept, RanksFailed
from cpref.exactness import judge, relative_error

GOOD = {
    "strategy": "ring",
    "errors": dict.fromkeys(("out", "dq", "dk", "dv"), 1e-7),
    "loss_error": 0.0,
    "losses": [1.0, 0.5],
    **{"sent": [4, 4], "formula": 4, "saved": [1, 1], "saved_alone": 2},
    **{"seconds": 1.0, "seconds_alone": 1.0},
}
SMALL = ["--ranks", "2", "--seq-len", "96", "--steps", "3"]


def demo(*options, **kwargs):
    command = [sys.executable, "-m", "cpref", "demo", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)


@pytest.mark.distributed
def test_the_demo_shows_that_ranks_train_like_one(tmp_path):
    done = demo(*SMALL, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Shown: 2 ranks train on 96 tokens as one rank does" in done.stdout
    report = json.loads((tmp_path / "demo.json").read_text())
    names = [result["strategy"] for result in report["results"]]
    assert names == ["ring", "all_gather", "reduce_scatter", "ulysses"]
    for result in report["results"]:
        assert result["losses"] == pytest.approx(report["losses_of_one_rank"], rel=1e-5)
        assert result["sent"] == [result["formula"]] * 2
        assert len(result["saved"]) == 2
        assert max(result["saved"]) < 0.6 * result["saved_alone"]
    for name in ("losses.png", "saved_activations.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--document", "/nowhere"], "document /nowhere"),
        (["--ranks", "9", "--seq-len", "8"], "more than the 8 tokens"),
        (["--strategy", "rings"], "'rings'; it must be one of ring"),
        (["--layout", "zagzig"], "'zagzig'; it must be one of contiguous"),
        (["--steps", "0"], "--steps is 0"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--seq-len", "1"], "--seq-len is 1"),
        (["--seq-len", "four"], "--seq-len"),
        (["--strategy", "ulysses", "--ranks", "3"], "must divide the model's 4 heads"),
        (["--out", "/dev/null/results"], "--out is /dev/null/results"),
    ],
)
def test_bad_input_is_one_line_and_status_2(options, words, tmp_path, capsys, monkeypatch):
    from cpref.cli import main

    monkeypatch.chdir(tmp_path)
    try:
        status = main(["demo", *options])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 2
    assert words in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"errors": {"out": 2e-6, "dq": 0, "dk": 0, "dv": 0}}, "out 2.0e-06"),
        ({"errors": {"out": 0, "dq": 0, "dk": float("nan"), "dv": 0}}, "dk nan"),
        ({"loss_error": 1e-3}, "loss"),
        ({"sent": [4, 5]}, "bytes [4, 5] instead of 4"),
    ],
)
def test_a_number_out_of_its_bound_is_a_miss(changed, words):
    from cpref.demo.command import _misses
    from cpref.demo.job import Measured

    assert _misses(Measured(**GOOD)) == []
    (miss,) = _misses(Measured(**{**GOOD, **changed}))
    assert miss.startswith(words)


def run_with(results, monkeypatch, *options) -> int:
    """The status of `cpref demo` if the ranks hand over these results, or fail."""
    from cpref.cli import main
    from cpref.demo import command

    def launch(*args, **kwargs):
        if isinstance(results, Exception):
            raise results
        return Kept([{"results": results, "alone": [1.0, 0.5], "device": "cpu"}])

    monkeypatch.setattr(command, "launch", launch)
    return main(["demo", *SMALL, *options])


def test_all_within_bounds_is_shown_and_status_0(tmp_path, capsys, monkeypatch):
    assert run_with([GOOD], monkeypatch, "--out", str(tmp_path)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Shown: 2 ranks train on 96 tokens as one rank does")
    assert "each saves 50% of its activations" in last


def test_one_miss_is_not_shown_and_status_1(tmp_path, capsys, monkeypatch):
    missed = {**GOOD, "strategy": "all_gather", "sent": [4, 8]}
    assert run_with([GOOD, missed], monkeypatch, "--out", str(tmp_path)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "NOT shown: out of bounds are all_gather: bytes [4, 8] instead of 4."
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["misses"] == {"ring": [], "all_gather": ["bytes [4, 8] instead of 4"]}


def test_with_json_the_output_is_json_alone(tmp_path, capsys, monkeypatch):
    assert run_with([GOOD], monkeypatch, "--out", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"] == [GOOD]


def test_ranks_that_fail_are_status_1_and_their_error(tmp_path, capsys, monkeypatch):
    failure = RanksFailed("rank 1 of 2 failed:\nboom")
    assert run_with(failure, monkeypatch, "--out", str(tmp_path)) == 1
    shown = capsys.readouterr()
    assert "rank 1 of 2 failed" in shown.err
    assert shown.out == ""


def test_more_ranks_than_devices_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert run_with([GOOD], monkeypatch, "--out", str(tmp_path)) == 2
    assert "--ranks is 2, more than the 1 devices" in capsys.readouterr().err


def test_what_the_demo_compares_with_is_the_judge():
    from cpref.demo.job import Plan, _exact, _whole

    plan = Plan(ranks=1, seq_len=65, steps=1, strategy="ring", layout="zigzag", document=None)
    q, k, v, grad_out = _whole(plan, torch.device("cpu"))
    judged = judge(q, k, v, grad_out, mask=cpref.Causal())
    for x, exact in zip(_exact(q, k, v, grad_out), judged.results, strict=True):
        assert relative_error(x, exact) < 1e-13


@pytest.mark.distributed
def test_an_interrupt_ends_all_ranks(tmp_path):
    running = subprocess.Popen(
        [sys.executable, "-m", "cpref", "demo", *SMALL, "--steps", "50000", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.set_blocking(running.stderr.fileno(), False)
    seen, deadline = b"", time.monotonic() + 90
    while not re.search(rb"loss \d", seen) and time.monotonic() < deadline:
        assert running.poll() is None, seen.decode()
        seen += running.stderr.read() or b""
        time.sleep(0.1)
    family = psutil.Process(running.pid).children(recursive=True)
    assert len(family) >= 3, seen.decode()
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
