"""The %%torchrun cell, in a shell and in a real kernel."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.distributed

START = "import cpref, torch\ncpref.init(timeout=60)\nrank = cpref.comm.resolve(None).rank\n"


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "cpref")
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = set(psutil.Process().children(recursive=True))
    folders = set(Path(tempfile.gettempdir()).glob("cpref-*"))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in left if "cpref.classroom" in " ".join(p.cmdline())]
    assert set(Path(tempfile.gettempdir()).glob("cpref-*")) == folders


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


def test_a_timeout_says_where_each_rank_was(shell):
    cell = START + "if rank == 0:\n    torch.distributed.barrier()\nwhile True:\n    pass"
    said = str(run(shell, "-n 2 --timeout 15", cell).error_in_exec)
    assert "not done after 15 s" in said
    assert "rank 0: at line 6: torch.distributed.barrier()" in said
    assert "rank 1: at line 8: pass" in said or "rank 1: at line 7: while True:" in said


def test_a_rank_that_does_not_listen_to_signals_is_ended(shell):
    cell = "import signal, time\n" + "\n".join(
        f"signal.signal(signal.{name}, signal.SIG_IGN)" for name in ("SIGINT", "SIGTERM")
    )
    result = run(shell, "-n 1 --timeout 8", cell + "\ntime.sleep(1000)")
    assert "at line 5: time.sleep(1000)" in str(result.error_in_exec)


def test_a_killed_rank_is_named(shell):
    said = str(run(shell, "-n 1", "import os\nos.kill(os.getpid(), 9)").error_in_exec)
    assert said == "rank 0 of 1 was ended by SIGKILL"


def test_what_cannot_be_kept_is_named(shell):
    said = str(run(shell, "-n 1", "import cpref\ncpref.keep(f=lambda: 1)").error_in_exec)
    assert "keep: f is function, which cannot be sent" in said


def test_long_output_is_cut(shell, capsys):
    assert run(shell, "-n 1", "for _ in range(3000):\n    print('x' * 1000)").success
    said = capsys.readouterr().out
    assert len(said) < 1.1 * 2**20
    assert said.endswith("... the rest of the output is not shown\n")


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
        ranks = [p for p in family if "cpref.classroom.rank" in p.cmdline()[1:3]]
        time.sleep(0.2)
    kernel.kill()
    kernel.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert len(ranks) == 2
    assert not alive
    for folder in Path(tempfile.gettempdir()).glob("cpref-*"):  # nobody was left to remove it
        subprocess.run(["rm", "-r", str(folder)], check=True)


def test_a_real_kernel_runs_the_cell_and_sees_its_failure():
    cells = [
        "%load_ext cpref",
        "%%torchrun -n 2\nimport cpref\ncpref.init()\ncpref.keep(answer=42)\nprint('ran')",
        "answer",
        "%%torchrun -n 1\nraise ValueError('on purpose')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="on purpose"):
        client.execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[1][0].text == "ran\n"
    assert outputs[2][0].data["text/plain"] == "42"
    assert "line 2" in "".join(outputs[3][0].traceback)
