"""The check that tests leave no process behind can fail."""

import os
import subprocess
import sys

import pytest

from .ranks import Ranks, left_over

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def pid(group):
    return os.getpid()


def test_a_child_that_runs_is_seen_and_one_that_has_ended_is_not():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        (seen,) = [one for one in left_over(0) if one.startswith(f"{child.pid} ")]
        assert "time.sleep(100)" in seen
    finally:
        child.kill()  # not waited for: a zombie does not run
    assert not [one for one in left_over() if one.startswith(f"{child.pid} ")]
    child.wait()


def test_a_rank_that_runs_is_seen_and_one_that_was_closed_is_not():
    ranks = Ranks(2)
    pids = [str(one) for one in ranks(pid)]
    assert set(pids) <= {one.split()[0] for one in left_over(0)}
    ranks.close()
    assert not set(pids) & {one.split()[0] for one in left_over(0)}


LEAVES_A_CHILD = """
import subprocess, sys
from tests import conftest
from tests.conftest import no_process_left
from tests.distributed.ranks import left_over

conftest.left_over = lambda: left_over(0)

def test_that_passes():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep({seconds})"])
"""


@pytest.mark.parametrize(("seconds", "said"), [(30, "still running: ["), (0, "1 passed")])
def test_a_run_of_tests_that_leaves_a_child_fails(tmp_path, seconds, said):
    file = tmp_path / "test_it.py"
    text = LEAVES_A_CHILD.format(seconds=seconds)
    file.write_text(text if seconds else text.replace("left_over(0)", "left_over()"))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert said in run.stdout, run.stdout + run.stderr
    assert run.returncode == (1 if seconds else 0)
