"""The command `cpref verify`."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from cpref import cli, verify
from cpref.exactness import Case, Errors


@pytest.fixture
def few(monkeypatch):
    """A matrix of three cases."""
    chosen = [Case(), Case(strategy="ulysses"), Case(dtype=torch.bfloat16, seq_len=128)]
    monkeypatch.setattr(verify, "cases", lambda ranks, full=False: chosen)
    return chosen


def test_all_within_their_bounds_is_status_0_and_a_table(few, capsys):
    assert cli.main(["verify", "--local", "--ranks", "2", "4"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:3] for line in out.splitlines() if line[:4] in ("ring", "ulys")]
    assert rows == [
        ["ring", "float32", "2"],
        ["ring", "bfloat16", "2"],
        ["ulysses", "float32", "2"],
    ]
    assert "Exact: all 6 cases on 2, 4 ranks are within their bounds." in out


def test_a_missed_bound_is_status_1_and_named(few, capsys, monkeypatch):
    right = verify.errors

    def wrong(case, group, **options):
        measured = right(case, group, **options)
        return Errors(measured.out, measured.dq, 4e-6, measured.dv)

    monkeypatch.setattr(verify, "errors", wrong)
    assert cli.main(["verify", "--local", "--ranks", "2"]) == 1
    out = capsys.readouterr().out
    assert "MISSED on 2 ranks: ring zigzag fp32, Causal(), float32" in out
    assert "dk 4.00e-06 of 3.00e-06" in out
    assert "NOT exact: 2 of 3 cases miss a bound." in out


def test_json_has_every_number(few, capsys):
    assert cli.main(["verify", "--local", "--ranks", "3", "--json"]) == 2
    assert "cannot share" in capsys.readouterr().err  # 4 heads on 3 ranks under ulysses
    assert cli.main(["verify", "--local", "--ranks", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["case"]["strategy"] for result in results] == ["ring", "ulysses", "ring"]
    for result in results:
        assert result["ranks"] == 2
        assert result["within"]
        assert all(result["errors"][x] <= result["bounds"][x] for x in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["--ranks", "2", "-1"], "--ranks is -1; it must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(words, message, capsys):
    assert cli.main(["verify", *words]) == 2
    assert capsys.readouterr().err == f"cpref verify: {message}\n"


def test_what_is_no_number_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", "--ranks", "two"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_matrix_has_every_strategy_with_every_dtype_and_length():
    met = {(case.strategy, case.dtype, case.seq_len) for case in verify.cases(4)}
    assert len(met) == 5 * 4 * 4


@pytest.mark.distributed
@pytest.mark.slow
def test_on_real_ranks_every_case_is_within_its_bounds():
    done = subprocess.run(
        [sys.executable, "-m", "cpref", "verify", "--ranks", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == len(verify.cases(2))
    assert all(result["within"] for result in results)


def below(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.distributed
@pytest.mark.slow
def test_an_interrupt_leaves_no_process():
    command = subprocess.Popen(
        [sys.executable, "-m", "cpref", "verify", "--ranks", "2", "--full"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        deadline = time.monotonic() + 200
        while len(below(command.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)  # until torchrun and two ranks are there
        started = below(command.pid)
        assert len(started) >= 3
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=120)
    finally:
        command.kill()
    assert command.returncode == 130
    assert said.splitlines()[-1] == "cpref verify: interrupted"
    assert not psutil.wait_procs(started, timeout=5)[1]
