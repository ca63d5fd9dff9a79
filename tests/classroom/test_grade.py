"""`cpref grade` and `cpref progress`: what they print and write, and what they say of bad input."""

import csv
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from cpref.classroom.exercise import Task
from cpref.classroom.grade import TaskGrade
from cpref.classroom.progress import Progress
from cpref.cli import main

from .courses import left_of, notebook, run_by

ROOT = Path(__file__).parents[2]
BLANK = ROOT / "exercises" / "03_softmax_in_pieces.ipynb"
STAGE = "from cpref.classroom import expect"
TEST = "expect.equal('double(2)', double(2), 4)"
RIGHT, BLANKED = "def double(x):\n    return 2 * x", "def double(x):\n    raise NotImplementedError"
WRONG, FORMULA = "def double(x):\n    return x", "raise AssertionError('=HYPERLINK(1)')"


class Course:
    """A course of two small exercises in a folder, graded by many commands of one process."""

    def __init__(self, folder: Path):
        self.folder = folder
        for part in ("solutions", "exercises"):
            (folder / part).mkdir()
        for name in ("one", "two"):
            self.write(f"solutions/{name}.ipynb", name, RIGHT, RIGHT)

    def write(self, path: str, name: str, first: str, second: str, version: int = 1) -> Path:
        """A notebook with these two answers; the tasks of exercise NAME are NAME_a and NAME_b."""
        cells = {f"{name}_a": (first, TEST), f"{name}_b": (second, TEST)}
        made = notebook(name, cells, STAGE)
        made.metadata.cpref.version = version
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(made, target)
        return target

    def __call__(self, *commands: list[str]) -> list[tuple[int, str, str]]:
        """The status, output and errors of each command; after "not linux" it is another system."""
        script = """
import contextlib, io, json, sys
from pathlib import Path
from cpref.classroom import exercise, grade_command, grade_limits
from cpref.cli import main
exercise.SOLUTIONS = Path("solutions").absolute()
grade_command.EXERCISES = Path("exercises").absolute()
for command in json.load(sys.stdin):
    if command == ["not linux"]:
        grade_limits._LINUX = False
        continue
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(command)
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=json.dumps(commands),
            cwd=self.folder,
            env=os.environ | {"CPREF_PROGRESS": str(self.folder / "progress.json")},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def course(tmp_path) -> Course:
    return Course(tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
def test_bad_input_is_one_clear_line_and_no_file_is_written_to(course):
    folder = course.folder
    for name, text in {
        "text": "no JSON",
        "list": "[]",
        "cells": '{"cells": 3, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
        "deep": "[" * 100_000,
        "plain": nbformat.writes(nbformat.v4.new_notebook()),
    }.items():
        (folder / f"{name}.ipynb").write_text(text)
    (folder / "bytes.ipynb").write_bytes(b"\xff\xfe\x00")
    with (folder / "large.ipynb").open("wb") as file:
        file.truncate(21 << 20)
    course.write("other.ipynb", "three", RIGHT, RIGHT)
    course.write("old.ipynb", "one", RIGHT, RIGHT, version=7)
    course.write("mine.ipynb", "one", RIGHT, RIGHT)
    course.write("class/ann/one.ipynb", "one", RIGHT, RIGHT)
    (folder / "kept.csv").write_text("kept")
    (folder / "empty").mkdir()
    cases = {
        "text.ipynb": "is no notebook: it is not JSON",
        "list.ipynb": "is no notebook",
        "cells.ipynb": "is no notebook",
        "deep.ipynb": "is no notebook",
        "bytes.ipynb": "is no notebook: it is not JSON",
        "plain.ipynb": "is no exercise of this course",
        "other.ipynb": "it says 'three'",
        "old.ipynb": "version 7 of one, but this course has version 1",
        "large.ipynb": "larger than 20 MiB",
        "missing.ipynb": "cannot be read: No such file",
        "empty": "cannot be read: Is a directory",
        "mine.ipynb text.ipynb": "is no notebook",
        "mine.ipynb --task three": "'three' is no task of one; it has one_a, one_b",
        "": "nothing to grade",
        "--all": "nothing to grade",
        "mine.ipynb --timeout 0": "from 1 to 3600",
        "mine.ipynb --timeout nan": "from 1 to 3600",
        "mine.ipynb --memory 1": "at least 512 MiB",
        "mine.ipynb --csv a.csv": "--csv is for a class",
        "--class class": "takes --csv FILE",
        "--class class --csv a.csv --all": "takes --csv FILE",
        "--class nowhere --csv kept.csv": "must be a folder with one folder a learner",
        "--class empty --csv kept.csv": "no notebooks in the folders of empty",
        "--class class --csv nowhere/a.csv": "cannot be written: No such file",
        "--class class --csv empty": "cannot be written: Is a directory",
        "--class class --csv class/ann/one.ipynb": "must be no notebook",
    }
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    told = course(*[["grade", *case.split()] for case in cases])
    wrong = {
        case: answer
        for (case, words), answer in zip(cases.items(), told, strict=True)
        if answer[0] != 2 or words not in answer[2] or answer[2].count("\n") != 1 or answer[1]
    }
    assert wrong == {}
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_class_a_task_and_all_exercises(course):
    folder = course.folder
    course.write("class/ann/one.ipynb", "one", RIGHT, WRONG)
    course.write("class/=bob/one/one.ipynb", "one", FORMULA, BLANKED)
    course.write("class/cat/two.ipynb", "two", RIGHT, RIGHT, version=2)
    (folder / "class/cat/notes.ipynb").write_text("{")
    course.write("class/ann/.ipynb_checkpoints/one-checkpoint.ipynb", "one", RIGHT, RIGHT)
    course.write("exercises/one.ipynb", "one", RIGHT, RIGHT)
    (folder / "exercises/two.ipynb").write_text("broken")
    of_class, all_of_it, one_task, no_task, elsewhere = course(
        ["grade", "--class", "class", "--csv", "grades.csv"],
        ["grade", "--all", "--json"],
        ["grade", "--task", "one_b", "class/ann/one.ipynb"],
        ["grade", "--all", "--task", "nine"],
        ["not linux"],
        ["grade", "class/ann/one.ipynb"],
    )
    assert of_class[0] == 1  # why: notes.ipynb is no exercise
    with (folder / "grades.csv").open(newline="") as file:
        rows = [tuple(row.values()) for row in csv.DictReader(file)]
    assert [row[:5] for row in rows] == [
        ("'=bob", "one", "one_a", "0", "1"),
        ("'=bob", "one", "one_b", "0", "1"),
        ("ann", "one", "one_a", "1", "1"),
        ("ann", "one", "one_b", "0", "1"),
        ("cat", "notes", "", "0", "0"),
        ("cat", "two", "two_a", "0", "1"),
        ("cat", "two", "two_b", "0", "1"),
    ]
    reasons = [row[5] for row in rows]
    assert reasons[0].startswith("AssertionError: =HYPERLINK")
    assert reasons[1:4] == ["not attempted yet", "", "double(2) is 2; it must be 4"]
    assert "not JSON" in reasons[4] and "version 2" in reasons[5]

    # one damaged notebook does not keep the others from being graded
    assert all_of_it[0] == 2 and "two.ipynb is no notebook" in all_of_it[2]
    report = json.loads(all_of_it[1])
    assert (report["score"], report["max"]) == (2, 2)
    assert [(task["task"], task["points"], task["passed"]) for task in report["tasks"]] == [
        ("one_a", 1, True),
        ("one_b", 1, True),
    ]
    assert one_task[0] == 1 and "one_b  0 of 1  double(2) is 2" in one_task[1]
    assert "one_a" not in one_task[1] and "0 of 1 points" in one_task[1]
    assert no_task[0] == 2

    # where a system protects from less the grade is the same, and it is said
    assert elsewhere[0] == 1 and "1 of 2 points" in elsewhere[1]
    assert "does not limit the memory" in elsewhere[2] and elsewhere[2].count("\n") == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_an_interrupt_ends_the_grader_and_all_that_it_started(course):
    path = course.write("mine.ipynb", "one", "while True:\n    pass", RIGHT)
    with run_by(course.folder, ["grade", str(path)]) as grader:
        assert "mine.ipynb" in grader.stdout.readline()
        time.sleep(1)  # why: the loop runs, or will in a moment
        grader.send_signal(signal.SIGINT)
        assert grader.wait(30) == 130
        assert grader.stderr.read() == "cpref grade: interrupted\n"
    assert left_of(course.folder) == []


def test_without_fork_grading_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    path = ROOT / "cpref" / "classroom" / "grade_limits.py"
    spec = importlib.util.spec_from_file_location("limits_of_windows", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError, match="WSL"):
        module.missing()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_magic_grades_the_notebook_that_one_sits_in(tmp_path):
    from jupyter_client.manager import start_new_kernel

    path = tmp_path / "my copy.ipynb"
    shutil.copy(BLANK, path)
    environment = os.environ | {
        "CPREF_PROGRESS": str(tmp_path / "progress.json"),
        "JPY_SESSION_NAME": str(path),
    }
    manager, client = start_new_kernel(env=environment, cwd=str(tmp_path))
    try:
        printed = []

        def hear(message: dict) -> None:
            printed.append(message["content"].get("text", ""))

        for cell in ("%load_ext cpref", "%grade --task partial"):
            client.execute_interactive(cell, timeout=60, output_hook=hear)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    text = "".join(printed)
    assert "partial  0 of 2  not attempted yet" in text
    assert "0 of 2 points" in text


HINTED = Task("merge", 3, (), "", "", ("first", "second"))


def test_each_new_failing_answer_is_given_the_next_hint(tmp_path):
    progress = Progress(tmp_path / "progress.json")

    def note(answer: str, reason: str = "wrong", points: int = 0) -> str:
        return progress.note(TaskGrade("x", "merge", points, 3, reason, answer=answer), HINTED)

    assert note("blank", "not attempted yet") == ""
    assert [note("a"), note("a"), note("b")] == ["first", "first", "second"]
    progress.save()
    progress = Progress(tmp_path / "progress.json")
    assert [note("b"), note("c"), note("d", "", points=3), note("e")] == ["second"] * 2 + [
        "",
        "second",
    ]
    assert progress.points("x", HINTED) == 3  # the best that there was


def test_progress_is_a_table_and_a_bar(capsys, tmp_path, monkeypatch):
    file = tmp_path / "progress.json"
    monkeypatch.setenv("CPREF_PROGRESS", str(file))
    tasks = {"03_softmax_in_pieces/partial": {"points": 2}, "gone/x": {"points": 9}}
    file.write_text(json.dumps({"tasks": tasks}))
    assert main(["progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("03_softmax_in_pieces")]
    assert "███░░░░░" in line and " 2 of  5  open: merge" in line
    assert lines[-1].startswith("the course") and " 2 of " in lines[-1]
    assert main(["progress", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == 2
    for damage in ("{", '{"tasks": 3}', '{"tasks": {"x": {"points": "many"}}}'):
        file.write_text(damage)
        assert main(["progress"]) == 2
        assert "is damaged; remove it" in capsys.readouterr().err
