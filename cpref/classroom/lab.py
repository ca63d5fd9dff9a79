"""JupyterLab on the first lesson, with all it writes kept below this environment."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

_FIRST = Path("notebooks/00_start_here.ipynb")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: what JupyterLab itself takes is set in its own configuration."""


def run(args: argparse.Namespace) -> int:
    """Start JupyterLab on localhost until Ctrl-C; returns the exit status.

    Prints its address with the token that opens it. Takes the next free port if the usual one is
    taken; opens a browser if there is one; works as root. Settings and caches go into the
    environment's own folder, so nothing is written to the home folder.
    """
    if not _FIRST.exists():
        print(f"no {_FIRST} here; run this in the project's folder", file=sys.stderr)
        return 2
    home = Path(sys.prefix) / "home"
    folders = {
        "JUPYTER_CONFIG_DIR": home / "jupyter",
        "JUPYTER_DATA_DIR": home / "jupyter" / "data",
        "JUPYTER_RUNTIME_DIR": home / "jupyter" / "runtime",
        "IPYTHONDIR": home / "ipython",
        "MPLCONFIGDIR": home / "matplotlib",
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", str(_FIRST), "--ip=127.0.0.1"),
        "--ServerApp.allow_root=True",
        "--ServerApp.answer_yes=True",  # why: one Ctrl-C ends it, without a question
    ]
    environment = {**{name: str(path) for name, path in folders.items()}, **os.environ}
    lab = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return lab.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(lab)


def _end(lab: subprocess.Popen) -> None:
    """Ask once, as Ctrl-C does, and end what does not listen with the kernels it has started."""
    for how, patience in ((signal.SIGINT, 10), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        if lab.poll() is not None:
            return
        os.killpg(lab.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            lab.wait(patience)
