"""The %%torchrun cell, in a shell and in a real kernel."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import nbclient
import nbformat
import psutil
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import cpref
from cpref.classroom.launch import _whole_characters
from cpref.classroom.torchrun import _Screen

pytestmark = pytest.mark.distributed

START = "import cpref, torch\ncpref.init(timeout=60)\nrank = cpref.comm.resolve(None).rank\n"


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "cpref")
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    left = psutil.Process().children(recursive=True)
    assert not [p for p in left if "cpref.classroom" in " ".join(p.cmdline())]
    assert not list(tmp_path.glob("cpref-*"))


def run(shell, options, cell):
    return shell.run_cell(f"%%torchrun {options}\n{cell}")


def test_rank_0_prints_and_its_values_come_back(shell, capsys):
    cell = START + "print('hello from', rank)\ncpref.keep(x=torch.ones(2) + rank, y=[1, {'a': 2}])"
    assert run(shell, "-n 2", cell).success
    assert capsys.readouterr().out == "hello from 0\n"
    assert torch.equal(shell.user_ns["x"], torch.ones(2))
    assert shell.user_ns["y"] == [1, {"a": 2}]


def test_each_shows_and_returns_every_rank(shell, capsys):
    cell = START + "print('a', rank)\nprint('b', end='')\nif rank: cpref.keep(z=rank)"
    assert run(shell, "-n 2 --each", cell).success
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] a {rank}", f"[rank {rank}] b"]
    assert shell.user_ns["z"] == [None, 1]


def test_the_first_failing_rank_is_shown_with_the_line_of_the_cell(shell, capsys):
    cell = START + "if rank == 1:\n    1 / 0\ntorch.distributed.barrier()"
    result = run(shell, "-n 2", cell)
    assert not result.success
    said = str(result.error_in_exec)
    assert said.startswith("rank 1 of 2 failed:\nTraceback")
    assert 'File "%%torchrun cell", line 6' in said  # the magic is line 1
    assert "    1 / 0" in said
    assert said.endswith("ZeroDivisionError: division by zero")
    assert said.count("Traceback") == 1


def test_a_timeout_ends_ranks_that_ignore_signals_and_says_where_each_was(shell):
    deaf = "import signal\n" + "".join(
        f"signal.signal(signal.{name}, signal.SIG_IGN)\n" for name in ("SIGINT", "SIGTERM")
    )
    cell = deaf + START + "if rank == 0:\n    torch.distributed.barrier()\nwhile True:\n    pass"
    said = str(run(shell, "-n 2 --timeout 15", cell).error_in_exec)
    assert "not done after 15 s" in said
    assert "rank 0: at line 9: torch.distributed.barrier()" in said
    assert "rank 1: at line 11: pass" in said or "rank 1: at line 10: while True:" in said


def test_a_killed_rank_is_named(shell):
    said = str(run(shell, "-n 1", "import os\nos.kill(os.getpid(), 9)").error_in_exec)
    assert said == "rank 0 of 1 was ended by SIGKILL"


def test_what_cannot_be_kept_is_named():
    with pytest.raises(TypeError, match="keep: f is function, which cannot be sent"):
        cpref.keep(f=lambda: 1)


def test_long_output_is_cut(capsys):
    screen = _Screen(1, prefixed=False)
    for _ in range(300):
        screen.show(0, "x" * 10_000)
    said = capsys.readouterr().out
    assert len(said) < 1.1 * 2**20
    assert said.endswith("... the rest of the output is not shown\n")


def test_characters_that_arrive_in_pieces_are_put_together():
    text = "a·é€𝄞".encode()
    for end in range(len(text) + 1):
        whole = _whole_characters(text[:end])
        text[:whole].decode()
        assert end - whole < 4
    assert _whole_characters(text) == len(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-n 0", "-n is 0"),
        ("-n two", "invalid int value: 'two'"),
        ("-m 2", "unrecognized arguments: -m 2"),
        ("--timeout 0", "--timeout is 0"),
        ("--timeout soon", "invalid float value"),
    ],
)
def test_wrong_options_are_one_line(shell, options, words, capsys):
    result = run(shell, options, "1")
    assert not result.success
    assert words in str(result.error_in_exec)
    assert str(result.error_in_exec).count("\n") == 0


def test_a_syntax_error_starts_no_rank(shell):
    start = time.monotonic()
    said = str(run(shell, "-n 2", "x = = 1").error_in_exec)
    assert 'File "%%torchrun cell", line 2' in said
    assert "SyntaxError" in said
    assert time.monotonic() - start < 2


def test_an_interrupt_ends_the_ranks(shell):
    threading.Timer(6, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    result = run(shell, "-n 2", "import time\ntime.sleep(1000)")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)


def test_ranks_end_when_their_kernel_is_killed():
    source = (
        "from cpref.classroom.launch import launch\nlaunch(2, cell='import time; time.sleep(1000)')"
    )
    kernel = subprocess.Popen([sys.executable, "-c", source])
    top = psutil.Process(kernel.pid)
    deadline = time.monotonic() + 60
    ranks = []
    while len(ranks) < 2 and time.monotonic() < deadline:
        family = top.children(recursive=True)
        lines = [" ".join(p.cmdline()) for p in family]
        ranks = [line for line in lines if "cpref.classroom.rank" in line and "agent" not in line]
        time.sleep(0.2)
    kernel.kill()
    kernel.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert len(ranks) == 2
    assert not alive


def test_a_real_kernel_runs_the_cell_and_sees_its_failure():
    cells = [
        "%load_ext cpref",
        "%%torchrun -n 1\nprint('ran')\nraise ValueError('on purpose')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="on purpose"):
        client.execute()
    printed, failure = notebook.cells[1].outputs
    assert printed.text == "ran\n"
    assert "line 3" in "".join(failure.traceback)
