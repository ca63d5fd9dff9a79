"""Each exercise: its solution has all points, its blank none, classic mistakes hear what is wrong.

A wrong answer is tests/wrong_answers/EXERCISE/TASK.MISTAKE.py: the source of the answer cell, under
a first line `# says: WORDS` with words of the reason that the grader gives for it.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from cpref.classroom.exercise import EXERCISES, SOLUTIONS, id_of, load, names

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

WRONG = Path(__file__).parents[1] / "wrong_answers"
WRONG_ANSWERS = sorted(path.relative_to(WRONG) for path in WRONG.glob("*/*.py"))


def task_of(answer: Path) -> str:
    return answer.name.split(".")[0]


def file_of(answer: Path) -> str:
    """The n-th wrong answers to all tasks of an exercise are graded together."""
    same = [a for a in WRONG_ANSWERS if (a.parent, task_of(a)) == (answer.parent, task_of(answer))]
    return f"{answer.parent}-{same.index(answer)}.ipynb"


def write_submissions(answers: list[Path], folder: Path) -> list[Path]:
    """The exercises with these wrong answers in them."""
    notebooks: dict[Path, nbformat.NotebookNode] = {}
    for answer in answers:
        path = folder / file_of(answer)
        if path not in notebooks:
            notebooks[path] = nbformat.read(EXERCISES / f"{answer.parent}.ipynb", 4)
        cells = [cell for cell in notebooks[path].cells if id_of(cell) == task_of(answer)]
        assert len(cells) == 1, f"{answer} is for no task of {answer.parent}"
        cells[0].source = (WRONG / answer).read_text()
    for path, notebook in notebooks.items():
        nbformat.write(notebook, path)
    return list(notebooks)


@pytest.fixture(scope="session")
def grades(request, tmp_path_factory) -> dict[str, dict[str, dict]]:
    """By path and task: what one run of the grader says of all that the selected tests ask for."""
    folder = tmp_path_factory.mktemp("submissions")
    paths, answers = [], []
    for item in request.session.items:
        if item.path != Path(__file__) or not hasattr(item, "callspec"):
            continue
        wanted = item.callspec.params
        if "name" in wanted:
            paths += [SOLUTIONS / f"{wanted['name']}.ipynb", EXERCISES / f"{wanted['name']}.ipynb"]
        else:
            answers.append(wanted["answer"])
    paths += write_submissions(answers, folder)
    command = [sys.executable, "-m", "cpref", "grade", "--json", *map(str, dict.fromkeys(paths))]
    environment = os.environ | {"CPREF_PROGRESS": str(folder / "progress.json")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.stderr == ""
    found: dict[str, dict[str, dict]] = {}
    for task in json.loads(done.stdout)["tasks"]:
        found.setdefault(task["file"], {})[task["task"]] = task
    return found


@pytest.mark.parametrize("name", names())
def test_the_solution_scores_everything(grades, name):
    tasks = grades[str(SOLUTIONS / f"{name}.ipynb")].values()
    assert [task["reason"] for task in tasks] == [""] * len(load(name).tasks)
    assert sum(task["points"] for task in tasks) == load(name).points > 0


@pytest.mark.parametrize("name", names())
def test_the_blank_exercise_scores_nothing(grades, name):
    tasks = grades[str(EXERCISES / f"{name}.ipynb")].values()
    assert [task["reason"] for task in tasks] == ["not attempted yet"] * len(load(name).tasks)
    assert all(task["points"] == 0 for task in tasks)


@pytest.mark.parametrize(
    "answer", WRONG_ANSWERS, ids=lambda answer: f"{answer.parent}-{answer.stem}"
)
def test_a_wrong_answer_hears_what_is_wrong_with_it(grades, answer):
    first = (WRONG / answer).read_text().splitlines()[0]
    assert first.startswith("# says: ")
    task = grades[next(path for path in grades if Path(path).name == file_of(answer))][
        task_of(answer)
    ]
    assert task["points"] == 0
    assert first.removeprefix("# says: ") in task["reason"]


def test_each_task_has_two_wrong_answers_and_two_hints():
    wrong = Counter((str(answer.parent), task_of(answer)) for answer in WRONG_ANSWERS)
    for name in names():
        for task in load(name).tasks:
            assert wrong[name, task.name] >= 2, (name, task.name)
            assert len(task.hints) >= 2, (name, task.name)
