"""Exercises made for a test, and `cpref` in a process of its own that takes them for the course."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil

_MARK = "CPREF_TEST_OF_GRADER"  # in the environment of all that a grader starts


def notebook(name: str, cells: dict[str, tuple[str, str]], stage: str) -> nbformat.NotebookNode:
    """An exercise with a task for each name: the source of its answer and of its test."""

    def cell(source: str, grade_id: str, **role: object) -> nbformat.NotebookNode:
        role = {"grade": False, "solution": False, "locked": False, "schema_version": 3} | role
        role["grade_id"] = grade_id
        return nbformat.v4.new_code_cell(source, metadata={"nbgrader": role})

    made = nbformat.v4.new_notebook(metadata={"cpref": {"exercise": name, "version": 1}})
    made.cells.append(cell(stage, "setup", locked=True))
    for task, (answer, test) in cells.items():
        made.cells.append(cell(answer, task, solution=True))
        made.cells.append(cell(test, f"{task}-test", grade=True, locked=True, points=1))
    return made


def run_by(folder: Path, words: list[str]) -> subprocess.Popen:
    """`cpref WORDS` with folder/solutions as the course; its temporary files are in folder/tmp."""
    script = (
        "import sys; from pathlib import Path; from cpref.classroom import exercise;"
        "exercise.SOLUTIONS = Path(sys.argv.pop(1)); from cpref.cli import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    (folder / "tmp").mkdir()
    own = {"CPREF_PROGRESS": str(folder / "progress.json"), "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder / "solutions"), *words],
        env=os.environ | own | {_MARK: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_of(folder: Path) -> list[str]:
    """What `run_by` has left behind: processes and temporary files."""
    found = [f"file {path.name}" for path in (folder / "tmp").iterdir()]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == str(folder):
                found.append(f"process {process.pid}: {process.cmdline()}")
    return found
