"""Grade submissions: points for each task, why one fails, and a hint."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .exercise import Submission, Task, load, names, read_submission
from .grade_run import Outcome, Runner


@dataclass(frozen=True)
class TaskGrade:
    """points: of max; reason: why it failed, else empty; answer: a digest of what was graded."""

    exercise: str
    task: str
    points: int
    max: int
    reason: str = ""
    hint: str = ""
    answer: str = ""

    @property
    def passed(self) -> bool:
        return self.points == self.max

    @property
    def attempted(self) -> bool:
        return self.reason != "not attempted yet"


def select(submission: Submission, wanted: list[str]) -> list[Task]:
    """The tasks to grade; all if none is wanted by name. ValueError if one is unknown."""
    tasks = submission.exercise.tasks
    for name in wanted:
        if name not in [task.name for task in tasks]:
            known = ", ".join(task.name for task in tasks)
            raise ValueError(f"{name!r} is no task of {submission.exercise.name}; it has {known}")
    return [task for task in tasks if not wanted or task.name in wanted]


def grade(submission: Submission, tasks: list[Task], runner: Runner) -> Iterator[TaskGrade]:
    """The grades of these tasks, one as soon as it is known after the other."""
    for task in tasks:
        answer = submission.answers.get(task.name)
        if answer is None:
            outcome, digest = Outcome(False, submission.problems[task.name]), ""
        else:
            outcome = runner.run(task, answer)
            digest = hashlib.blake2b(answer.encode("utf-8", "replace"), digest_size=8).hexdigest()
        points = task.points if outcome.passed else 0
        exercise = submission.exercise.name
        yield TaskGrade(exercise, task.name, points, task.points, outcome.reason, answer=digest)


@dataclass(frozen=True)
class Row:
    """One line of a class: a learner and a task; task is empty where a file is no exercise."""

    learner: str
    exercise: str
    task: str
    points: int
    max: int
    reason: str


def notebooks_of(folder: Path) -> list[Path]:
    """folder/LEARNER/.../NN_name.ipynb, as nbgrader collects them, too. ValueError if none is."""
    if not folder.is_dir():
        raise ValueError(f"--class is {folder}; it must be a folder with one folder a learner")
    found = sorted(p for p in folder.glob("*/**/*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    if not found:
        raise ValueError(f"no notebooks in the folders of {folder}; it takes LEARNER/NN_name.ipynb")
    return found


def grade_class(folder: Path, runner: Runner) -> Iterator[Row]:
    """The grades of all notebooks in the folders of the learners.

    What cannot be graded is a row with 0 points for each task, and stops nobody else's grading.
    """
    for path in notebooks_of(folder):
        learner = path.relative_to(folder).parts[0]
        try:
            submission = read_submission(path)
        except ValueError as error:
            reason = str(error).removeprefix(f"{path} ")
            tasks = load(path.stem).tasks if path.stem in names() else ()
            for task in tasks:
                yield Row(learner, path.stem, task.name, 0, task.points, reason)
            if not tasks:
                yield Row(learner, path.stem, "", 0, 0, reason)
            continue
        for g in grade(submission, list(submission.exercise.tasks), runner):
            yield Row(learner, g.exercise, g.task, g.points, g.max, g.reason)
