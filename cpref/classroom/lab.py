"""JupyterLab on the first lesson; all that it writes stays in the project's folder."""

import argparse
import os
import sys
import webbrowser
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FIRST = "notebooks/00_start_here.ipynb"
_HOME = _ROOT / ".venv" / "home"
_FOLDERS = {
    "IPYTHONDIR": "ipython",
    "JUPYTER_CONFIG_DIR": "jupyter",
    "JUPYTER_DATA_DIR": "jupyter/data",
    "JUPYTER_RUNTIME_DIR": "jupyter/runtime",
    "MPLCONFIGDIR": "matplotlib",
    "XDG_CACHE_HOME": "cache",
}
_OPTIONS = (
    "--ip=127.0.0.1",
    "--ServerApp.allow_root=True",
    "--ServerApp.answer_yes=True",  # why: one Ctrl-C ends it, without a question
    "--Application.log_level=WARN",  # why: the address should not drown in the log
    # why: the rest would look for news on the network, or run npm, which writes into the home
    "--LabApp.extension_manager=readonly",
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    "--LanguageServerManager.autodetect=False",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: what JupyterLab itself takes is set in its own configuration."""


def run(args: argparse.Namespace) -> int:
    """Become JupyterLab on localhost, until Ctrl-C.

    Prints its address with the token that opens it. Takes the next free port if the usual one is
    taken; opens a browser if there is one; works as root.
    """
    if not (_ROOT / _FIRST).exists():
        raise ValueError(f"no {_FIRST} in {_ROOT}; install the project from its clone: make setup")
    if find_spec("jupyterlab") is None:
        raise ValueError("JupyterLab is not installed; make setup, or pip install -e '.[lab]'")
    folders = {name: str(_HOME / folder) for name, folder in _FOLDERS.items()}
    # why: kernels and settings of another installation would go before this one's
    foreign = ("JUPYTER_PATH", "JUPYTER_CONFIG_PATH")
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    lesson = (f"--ServerApp.root_dir={_ROOT}", f"--LabApp.default_url=/lab/tree/{_FIRST}")
    browser = () if _has_browser() else ("--no-browser",)
    print("JupyterLab starts; Ctrl-C here ends it", flush=True)
    os.chdir(_ROOT)
    # why exec: signals and the end of the terminal reach JupyterLab itself, nothing in between
    command = [sys.executable, "-m", "jupyterlab", *_OPTIONS, *lesson, *browser]
    os.execve(sys.executable, command, inherited | folders)


def _has_browser() -> bool:
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
