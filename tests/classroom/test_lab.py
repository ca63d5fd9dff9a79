import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from cpref.cli import main

pytest.importorskip("jupyterlab", reason="the extra `lab` is not installed")

ADDRESS = re.compile(
    r"(http://127\.0\.0\.1:(\d+))/lab/tree/notebooks/00_start_here\.ipynb(\?token=\w+)"
)


@pytest.fixture
def taken_port():
    """The port that JupyterLab asks for first, held by somebody: by us, if by nobody else."""
    with socket.socket() as holder:
        if holder.connect_ex(("127.0.0.1", 8888)):
            holder.close()
            with socket.create_server(("127.0.0.1", 8888)):
                yield 8888
        else:
            yield 8888


@pytest.mark.slow
def test_lab_opens_lesson_00_on_localhost_and_one_interrupt_ends_it(tmp_path, taken_port):
    lab = subprocess.Popen(
        [sys.executable, "-m", "cpref", "lab"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "BROWSER": "true"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        found = next(filter(None, map(ADDRESS.search, lab.stdout)))
        server, port, token = found.groups()
        assert int(port) != taken_port
        for path in ("/lab/tree/notebooks/00_start_here.ipynb", "/api/contents/notebooks"):
            assert _status(server + path + token) == 200
        listening = [
            c.laddr for c in psutil.Process(lab.pid).net_connections() if c.status == "LISTEN"
        ]
        assert {address.ip for address in listening} == {"127.0.0.1"}
        lab.send_signal(signal.SIGINT)
        assert lab.wait(60) == 0
    finally:
        lab.kill()
        lab.communicate()
    assert not [p for p in psutil.process_iter() if _session(p.pid) == lab.pid]
    assert list(tmp_path.iterdir()) == []


def _status(address: str) -> int:
    for _ in range(300):  # why: JupyterLab names its address a moment before it listens there
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return answer.status
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.1)
    raise TimeoutError(f"nobody listens at {address}")


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def test_lab_without_the_lessons_says_where_they_are(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("cpref.classroom.lab._ROOT", Path(tmp_path))
    assert main(["lab"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("cpref lab: no notebooks/00_start_here.ipynb in ")
    assert "make setup" in said
