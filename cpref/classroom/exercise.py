"""Exercises and submissions: which cells a notebook has, and what each of them is for.

The single source of an exercise is its notebook in `solutions/`. Its cells carry nbgrader's
metadata: each task is an answer cell, which the learner fills in, and a test cell with the points,
named like the answer with `-test` behind it. Cells that are locked and worth nothing set the stage
for all tasks. A markdown cell named like the answer with `-hints` behind it holds the hints.

Of a submission only the answer cells are read, by their names; everything else comes from here.
"""

import ast
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
SOLUTIONS = ROOT / "solutions"
EXERCISES = ROOT / "exercises"
_LARGEST = 20 << 20  # bytes of a notebook that is read
_HINT = re.compile(r"<details><summary>Hint \d+</summary>(.*?)(?=<details>|</details>)", re.S)


@dataclass(frozen=True)
class Task:
    """name: as the answer cell is named; stage: sources to run before it; points: to be had."""

    name: str
    points: int
    stage: tuple[str, ...]
    solution: str
    test: str
    hints: tuple[str, ...]


@dataclass(frozen=True)
class Exercise:
    """name: of its file, without the suffix; version: answers to another one are not graded."""

    name: str
    version: int
    tasks: tuple[Task, ...]

    @property
    def points(self) -> int:
        return sum(task.points for task in self.tasks)


@dataclass(frozen=True)
class Submission:
    """answers: for each task the source of its cell; problems: why there is none for the others."""

    exercise: Exercise
    answers: dict[str, str]
    problems: dict[str, str]


def names() -> list[str]:
    """The exercises that there are, in their order."""
    return sorted(path.stem for path in SOLUTIONS.glob("*.ipynb"))


@lru_cache(maxsize=64)
def load(name: str) -> Exercise:
    """The exercise of that name. Raises ValueError if there is none, or its source is damaged."""
    if name not in names():
        known = ", ".join(names()) or "none"
        raise ValueError(f"{name!r} is no exercise; there are: {known}")
    notebook = _read(SOLUTIONS / f"{name}.ipynb")
    cells = {id_of(cell): cell for cell in notebook.cells}
    tasks, stage = [], []
    for cell in notebook.cells:
        role = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and role.get("locked") and not role.get("grade"):
            stage.append(cell.source)
        if not role.get("solution"):
            continue
        answer = id_of(cell)
        test, hints = cells.get(f"{answer}-test"), cells.get(f"{answer}-hints")
        if test is None:
            raise ValueError(f"{name}: task {answer} has no cell {answer}-test")
        found = [] if hints is None else [" ".join(h.split()) for h in _HINT.findall(hints.source)]
        points = test.metadata.nbgrader.points
        tasks.append(Task(answer, points, tuple(stage), cell.source, test.source, tuple(found)))
    return Exercise(name, notebook.metadata.cpref.version, tuple(tasks))


def read_submission(path: Path) -> Submission:
    """The answers in a learner's notebook, which is only read.

    Raises ValueError, with one line that begins with the path, if the file is no notebook, no
    exercise of the course, or one of another version. What is wrong with one answer cell is a
    problem of that task alone.
    """
    notebook = _read(path)
    mark = notebook.metadata.get("cpref", {})
    name = mark.get("exercise") if isinstance(mark, dict) else None
    if name not in names():
        says = "" if name is None else f"; it says {name!r}"
        raise ValueError(f"{path} is no exercise of this course{says}; take one from exercises/")
    exercise = load(name)
    if mark.get("version") != exercise.version:
        raise ValueError(
            f"{path} is version {mark.get('version')} of {name}, but this course has version "
            f"{exercise.version}; copy your answers into a fresh exercises/{name}.ipynb"
        )
    answers, problems = {}, {}
    for task in exercise.tasks:
        same = [cell for cell in notebook.cells if id_of(cell) == task.name]
        found = list({cell.source: cell for cell in same if cell.cell_type == "code"}.values())
        if len(found) == 1:
            answers[task.name] = found[0].source
        elif found:
            problems[task.name] = (
                f"{len(found)} different cells are the answer {task.name!r}; keep one of them"
            )
        else:
            what = "is no code cell" if same else "is missing"
            problems[task.name] = (
                f"the answer cell {task.name!r} {what}; copy it from a fresh exercises/{name}.ipynb"
            )
    return Submission(exercise, answers, problems)


def id_of(cell: nbformat.NotebookNode) -> str | None:
    """The name that nbgrader knows a cell by; None if it has none."""
    role = cell.metadata.get("nbgrader")
    return role.get("grade_id") if isinstance(role, dict) else None


def defined(source: str) -> set[str]:
    """The names of the functions and classes that a source defines at its top level."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return set()
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def _read(path: Path) -> nbformat.NotebookNode:
    try:
        if path.stat().st_size > _LARGEST:
            limit = _LARGEST >> 20
            raise ValueError(f"{path} is larger than {limit} MiB; clear its outputs and save it")
        content = json.loads(path.read_text("utf-8"))
        notebook = nbformat.from_dict(nbformat.convert(nbformat.from_dict(content), 4))
        for cell in notebook.cells:
            cell.source = _text(cell.source)
            _ = cell.metadata.get, cell.cell_type
        _ = notebook.metadata.get
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is no notebook: it is not JSON") from None
    except (AttributeError, KeyError, TypeError, nbformat.reader.NotJSONError):
        raise ValueError(f"{path} is no notebook: it has no list of cells with sources") from None
    return notebook


def _text(source: object) -> str:
    """nbformat stores a source as one string or as its lines."""
    return source if isinstance(source, str) else "".join(source)
