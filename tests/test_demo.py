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
from cpref.exactness import judge, relative_error

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

    good = {
        "strategy": "ring",
        "errors": dict.fromkeys(("out", "dq", "dk", "dv"), 1e-7),
        "loss_error": 0.0,
        "losses": [1.0],
        **{"sent": [4, 4], "formula": 4, "saved": [1, 1], "saved_alone": 2},
        **{"seconds": 1.0, "seconds_alone": 1.0},
    }
    assert _misses(Measured(**good)) == []
    (miss,) = _misses(Measured(**{**good, **changed}))
    assert miss.startswith(words)


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
        [sys.executable, "-m", "cpref", "demo", "--steps", "5000", "--out", str(tmp_path)],
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
    assert len(family) >= 4, seen.decode()
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
