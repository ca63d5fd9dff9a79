"""How far a learner has come: the best grade of each task, kept beside the course.

`.progress.json` in the folder of the project; CPREF_PROGRESS names another file.
"""

import argparse
import contextlib
import json
import os
from pathlib import Path

from .exercise import ROOT, Task, load, names
from .grade import TaskGrade

_BAR = 24  # characters


class Progress:
    """What is known of each task: points, the last answer graded, and how many hints were shown."""

    def __init__(self, path: Path | None = None):
        self._path = path or Path(os.environ.get("CPREF_PROGRESS") or ROOT / ".progress.json")
        self._tasks: dict[str, dict] = {}
        with contextlib.suppress(FileNotFoundError):
            try:
                content = json.loads(self._path.read_text("utf-8"))
                self._tasks = {name: _entry(entry) for name, entry in content["tasks"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f"{self._path} is damaged; remove it to begin anew") from None

    def points(self, exercise: str, task: Task) -> int:
        """The most points that the task had; never more than it has now."""
        return min(self._tasks.get(f"{exercise}/{task.name}", _entry({}))["points"], task.points)

    def note(self, grade: TaskGrade, task: Task) -> str:
        """Remember a grade; the hint to show with it, the next one for each new failing answer."""
        entry = self._tasks.setdefault(f"{grade.exercise}/{grade.task}", _entry({}))
        entry["points"] = max(entry["points"], grade.points)
        if grade.passed or not grade.attempted or not task.hints:
            return ""
        if entry["answer"] != grade.answer:
            entry["hints"] = min(entry["hints"] + 1, len(task.hints))
            entry["answer"] = grade.answer
        return task.hints[max(0, min(entry["hints"], len(task.hints)) - 1)]

    def save(self) -> None:
        """Raises ValueError if the file cannot be written."""
        text = json.dumps({"tasks": self._tasks}, indent=1) + "\n"
        partial = self._path.with_suffix(".partial")
        try:
            partial.write_text(text)
            partial.replace(self._path)
        except OSError as error:
            raise ValueError(f"{self._path} cannot be written: {error.strerror}") from None


def _entry(stored: dict) -> dict:
    """points: the most so far; hints: how many were shown; answer: for which one the last was."""
    counts = {name: int(stored.get(name, 0)) for name in ("points", "hints")}
    return counts | {"answer": str(stored.get("answer", ""))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print numbers for another program")


def run(args: argparse.Namespace) -> int:
    """Print the points of each exercise and a bar over the course."""
    progress = Progress()
    rows = []
    for name in names():
        exercise = load(name)
        tasks = {task.name: progress.points(name, task) for task in exercise.tasks}
        rows.append((name, tasks, sum(tasks.values()), exercise.points))
    if not rows:
        raise ValueError(f"there are no exercises in {ROOT}; use a clone of the project")
    score, most = sum(row[2] for row in rows), sum(row[3] for row in rows)
    if args.json:
        exercises = [
            {"exercise": name, "score": points, "max": full, "tasks": tasks}
            for name, tasks, points, full in rows
        ]
        print(json.dumps({"score": score, "max": most, "exercises": exercises}, indent=1))
        return 0
    width = max(len(name) for name, *_ in rows)
    for name, tasks, points, full in rows:
        open_tasks = [task.name for task in load(name).tasks if tasks[task.name] < task.points]
        state = "done" if not open_tasks else f"open: {', '.join(open_tasks)}"
        print(f"{name:{width}}  {bar(points, full, 8)}  {points:2} of {full:2}  {state}")
    print(f"\n{'the course':{width}}  {bar(score, most, _BAR)}  {score} of {most} points")
    return 0


def bar(part: int, whole: int, width: int) -> str:
    """A bar that is full only when all of it is there."""
    filled = width * part // whole if whole else 0
    return "█" * filled + "░" * (width - filled)
