"""The %%torchrun cell, in a shell and in a real kernel."""

import errno
import io
import os
import re
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
from cpref.classroom.launch import Kept, RanksFailed, _unpacked, launch
from cpref.classroom.torchrun import _SHOWN, UsageError, _for_notebook, _Screen

START = "import os, torch, cpref\ncpref.init(timeout=60)\nrank = int(os.environ['RANK'])\n"
SLEEPER = "98765.4321"  # seconds; by this a process that a cell left behind is recognised
distributed = pytest.mark.distributed


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
    assert not processes_with(str(tmp_path))
    assert not processes_with(SLEEPER)
    assert not list(tmp_path.glob("cpref-*"))


def processes_with(word):
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(word in argument for argument in process.info["cmdline"] or ()):
            found.append(process)
    return found


def run(shell, options, cell):
    return shell.run_cell(f"%%torchrun {options}\n{cell}")


def failure(shell, options, cell):
    result = run(shell, options, cell)
    assert not result.success
    return str(result.error_in_exec)


@distributed
def test_rank_0_prints_and_its_values_come_back(shell, capfd):
    cell = START + (
        "x = torch.ones(2) + rank\ntorch.distributed.all_reduce(x)\n"
        "print('hello from', rank, sum(torch.tensor([1, 2])).item())\n"
        "cpref.keep(x=x, y=[1, {'a': 2}])"
    )
    assert run(shell, "-n 2", cell).success
    shown = capfd.readouterr()
    assert shown.out == "hello from 0 3\n"
    assert shown.err == ""  # no word of torchrun, nor of a group that was not destroyed
    assert torch.equal(shell.user_ns["x"], torch.tensor([3.0, 3.0]))
    assert shell.user_ns["y"] == [1, {"a": 2}]


@distributed
def test_each_shows_and_returns_every_rank_in_order(shell, capsys):
    left_behind = (
        "import subprocess, sys, threading, time\n"
        f"subprocess.Popen(['sleep', '{SLEEPER}'], start_new_session=True)\n"
        f"threading.Thread(target=time.sleep, args=({SLEEPER},)).start()\n"
    )
    cell = left_behind + START + "print('a', rank)\nprint('b', end='')\nif rank: cpref.keep(z=rank)"
    assert run(shell, "-n 3 --each", cell + "\nsys.exit()").success
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[rank {r}] {line}" for r in range(3) for line in (f"a {r}", "b")]
    assert shell.user_ns["z"] == [None, 1, 2]


@distributed
def test_the_first_failing_rank_is_shown_with_the_line_of_the_cell(shell):
    cell = START + "if rank == 1:\n    1 / 0\ntorch.distributed.barrier()"
    said = failure(shell, "-n 2", cell)
    assert said.startswith("rank 1 of 2 failed:\nTraceback")
    assert 'File "%%torchrun cell", line 6' in said  # the magic is line 1
    assert "    1 / 0" in said
    assert said.endswith("ZeroDivisionError: division by zero")
    assert said.count("Traceback") == 1


@distributed
def test_a_killed_rank_is_named_though_another_one_notices(shell):
    cell = START + "if rank == 1:\n    os.kill(os.getpid(), 9)\ntorch.distributed.barrier()"
    said = failure(shell, "-n 2", cell)
    assert said == "rank 1 of 2 was ended by SIGKILL, as by a lack of memory"


@distributed
def test_a_rank_that_left_is_named_though_another_one_notices(shell):
    cell = START + "if rank == 1:\n    os._exit(0)\ntorch.distributed.barrier()"
    assert failure(shell, "-n 2", cell) == "rank 1 of 2 left before its cell was done"


@distributed
def test_a_crash_is_shown_with_its_line(shell):
    said = failure(shell, "-n 1", "import ctypes\nctypes.string_at(0)")
    assert said == "rank 0 of 1 was ended by SIGSEGV, at line 3: ctypes.string_at(0)"


@distributed
def test_an_interrupt_ends_ranks_that_ignore_signals_and_says_where_each_was(shell, monkeypatch):
    """And output comes while the ranks run: the interrupt waits for it."""
    heard = set()
    monkeypatch.setattr(_Screen, "show", lambda self, rank, text: heard.add(rank))

    def interrupt():
        wait_until(lambda: heard == {0, 1})
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    deaf = "import signal\n" + "".join(
        f"signal.signal(signal.{name}, signal.SIG_IGN)\n" for name in ("SIGINT", "SIGTERM")
    )
    here = (
        "if rank == 0: print('begun', end=''); torch.distributed.barrier()\n"
        "if rank == 1:\n    while True: print('x' * 1000)"
    )
    result = run(shell, "-n 2", deaf + START + here)
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert str(result.error_in_exec).splitlines() == [
        "interrupted, all ranks ended:",
        "rank 0: at line 8: if rank == 0: print('begun', end=''); torch.distributed.barrier()",
        "rank 1: at line 10: while True: print('x' * 1000)",
    ]


@distributed
def test_a_rank_that_waits_inside_of_a_call_says_in_which_function(shell):
    late = "import os, time, cpref\nif os.environ['RANK'] == '1': time.sleep(600)\ncpref.init()"
    said = failure(shell, "-n 2 --timeout 5", late).splitlines()
    assert re.fullmatch(r"rank 0: at line 4: cpref.init\(\), in \w+", said[1]), said
    assert said[2] == "rank 1: at line 3: if os.environ['RANK'] == '1': time.sleep(600)"


@distributed
def test_no_rank_begins_before_the_last_one_was_forked(shell):
    source = (
        "import os, cpref\nstarted = os.listdir(os.environ['TMPDIR'])\ncpref.keep(started=started)"
    )
    run(shell, "-n 4 --each", source)
    for started in shell.user_ns["started"]:
        assert {f"pid.{rank}" for rank in range(4)} <= set(started)


@distributed
def test_a_timeout_ends_the_ranks_and_says_how_far_each_was(shell):
    said = failure(shell, "-n 2 --timeout 0.1", "while True: pass")
    assert said.splitlines() == [
        "not done after 0.1 s, all ranks ended:",
        "rank 0: not yet started",
        "rank 1: not yet started",
    ]


def test_a_value_that_only_its_cell_can_read_is_named(monkeypatch):
    class Local:
        pass

    Local.__module__, Local.__qualname__ = "__main__", "Local"
    monkeypatch.setattr(sys.modules["__main__"], "Local", Local, raising=False)
    packed = io.BytesIO()
    torch.save(Local(), packed)
    monkeypatch.undo()
    with pytest.raises(RanksFailed, match=r"keep: a cannot be read in the notebook .*Local"):
        _unpacked("a", packed.getvalue())


def test_a_value_that_rank_0_did_not_keep_is_named():
    kept = Kept([{"a": 1}, {"b": 2}])
    with pytest.raises(UsageError, match="b was kept by rank 1 and not by rank 0"):
        _for_notebook(kept, each=False)
    assert _for_notebook(kept, each=True) == {"a": [1, None], "b": [None, 2]}


def test_what_cannot_be_kept_is_named():
    with pytest.raises(TypeError, match="keep: f is function, which cannot be sent") as error:
        cpref.keep(f=lambda: 1)
    assert "0x" not in str(error.value)  # an address would differ from run to run


def test_more_ranks_than_files_can_be_opened_leave_none_open(monkeypatch):
    make, before = os.mkfifo, psutil.Process().num_fds()

    def make_two(path):
        if str(path).endswith("out.2"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        make(path)

    monkeypatch.setattr(os, "mkfifo", make_two)
    with pytest.raises(
        RanksFailed, match=r"^9 ranks cannot start: Too many open files; use fewer$"
    ):
        launch(9, cell="1")
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("prefixed", [True, False])
def test_long_output_is_cut(prefixed, capsys):
    screen = _Screen(2, prefixed=prefixed)
    for _ in range(300):
        for rank in (0, 1):
            screen.show(rank, "x" * 10_000)
    screen.finish()
    said = capsys.readouterr().out
    assert len(said) < 1.1 * _SHOWN
    assert said.count("... the rest of the output is not shown\n") == 2


def test_of_a_progress_bar_each_rank_shows_the_last_state(capsys):
    screen = _Screen(2, prefixed=True)
    for text in ("\r10 %", "\r20 %", "\r20 %\n\nend"):
        screen.show(1, text)
    screen.show(0, "whole\nhalf")
    assert capsys.readouterr().out == "[rank 0] whole\n"
    screen.finish()
    shown = ["[rank 0] half", "[rank 1] 20 %", "[rank 1] ", "[rank 1] end"]
    assert capsys.readouterr().out.splitlines() == shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-n 0", "-n is 0"),
        ("-n two", "invalid int value: 'two'"),
        ("-m 2", "unrecognized arguments: -m 2"),
        ("--timeout 0", "--timeout is 0"),
        ("--timeout nan", "--timeout is nan"),
        ("--timeout soon", "invalid float value"),
        ("-n 'two", "No closing quotation"),
    ],
)
def test_wrong_options_are_one_line(shell, options, words, capsys):
    said = failure(shell, options, "1")
    assert words in said
    assert capsys.readouterr().out.count("\n") == 1


def test_a_syntax_error_starts_no_rank(shell, monkeypatch):
    monkeypatch.setattr("cpref.classroom.torchrun.launch", None)
    said = failure(shell, "-n 2", "y = 1\nx = = 1")
    assert 'File "%%torchrun cell", line 3' in said
    assert "SyntaxError" in said


@distributed
@pytest.mark.parametrize("moment", ["agent", "ranks"])
def test_ranks_end_when_their_kernel_is_killed(moment, tmp_path):
    begun = tmp_path / "begun"
    cell = (
        "import os, subprocess, time\n"
        f"subprocess.Popen(['sleep', '{SLEEPER}'], start_new_session=True)\n"
        f"open({str(begun)!r} + os.environ['RANK'], 'w').close()\ntime.sleep({SLEEPER})"
    )
    source = f"from cpref.classroom.launch import launch\nlaunch(2, cell={cell!r})"
    kernel = subprocess.Popen([sys.executable, "-c", source])
    awaited = {
        "agent": lambda: processes_with(f"{tmp_path}/cpref-"),
        "ranks": lambda: len(list(tmp_path.glob("begun*"))) == 2,
    }
    wait_until(awaited[moment])
    kernel.kill()
    kernel.wait()
    # the fixture would come too early: they end by themselves, but after their kernel
    wait_until(lambda: not processes_with(f"{tmp_path}/cpref-") and not processes_with(SLEEPER))
    wait_until(lambda: not list(tmp_path.glob("cpref-*")))


def wait_until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@distributed
def test_a_real_kernel_runs_the_cell_and_sees_its_failure():
    cells = [
        "%load_ext cpref",
        "%%torchrun -n 1\nimport cpref\nprint('ran')\ncpref.keep(x=1)",
        "assert x == 1",
        # all ranks fail alike, rank 0 as the last of them
        "%%torchrun -n 2\nimport os, time\n"
        "time.sleep(0.1 * (os.environ['RANK'] == '0'))\nraise ValueError('on purpose')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="on purpose"):
        client.execute()
    assert [output.text for output in notebook.cells[1].outputs] == ["ran\n"]
    (shown,) = notebook.cells[3].outputs
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown.traceback))
    assert text.splitlines()[:3] == [
        "rank 0 of 2 failed:",
        "Traceback (most recent call last):",
        '  File "%%torchrun cell", line 4, in <module>',
    ]
