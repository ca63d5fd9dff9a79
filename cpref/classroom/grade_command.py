"""`cpref grade`: grade a notebook, all of them, or those of a class."""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, fields, replace
from pathlib import Path

from .exercise import EXERCISES, Submission, Task, read_submission
from .grade import Row, TaskGrade, grade, grade_class, notebooks_of, select
from .grade_limits import Limits, missing
from .grade_run import Runner
from .progress import Progress

_MEGABYTE = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    parser.add_argument("file", nargs="*", type=Path, help="notebooks to grade")
    parser.add_argument("--all", action="store_true", help="all notebooks of exercises/")
    parser.add_argument("--task", action="append", default=[], help="grade this task only")
    parser.add_argument("--class", dest="folder", type=Path, help="a folder with one a learner")
    parser.add_argument("--csv", type=Path, help="where a class's grades go, a row for each task")
    parser.add_argument("--json", action="store_true", help="print numbers for another program")
    parser.add_argument(
        "--timeout", type=float, default=limits.seconds, help="seconds for each task (%(default)g)"
    )
    parser.add_argument(
        "--memory", type=int, default=limits.memory // _MEGABYTE, help="MiB for it (%(default)d)"
    )


def run(args: argparse.Namespace) -> int:
    """Grade; 0 if every point was reached (for a class: if all was graded), else 1."""
    if not 1 <= args.timeout <= 3600:
        raise ValueError(f"--timeout is {args.timeout:g}; it must be from 1 to 3600 seconds")
    if args.memory < 512:
        raise ValueError(f"--memory is {args.memory}; it must be at least 512 MiB")
    limits = Limits(seconds=args.timeout, memory=args.memory * _MEGABYTE)
    if words := missing():
        _note(words)
    if args.folder is not None:
        return _class(args, limits)
    if args.csv is not None:
        raise ValueError("--csv is for a class; name its folder with --class")
    paths = args.file + (sorted(EXERCISES.glob("*.ipynb")) if args.all else [])
    if not paths:
        raise ValueError("nothing to grade; name a notebook, or use --all")
    return _files(paths, args, limits)


def _files(paths: list[Path], args: argparse.Namespace, limits: Limits) -> int:
    progress = Progress()
    grades: list[tuple[Path, TaskGrade]] = []
    with Runner(limits) as runner:  # why first: no test is in the memory that it forks
        chosen, unreadable = _chosen(paths, args)
        for path, submission, tasks in chosen:
            if not args.json:
                print(_head(path, tasks), flush=True)
            for task, of_task in zip(tasks, grade(submission, tasks, runner), strict=True):
                noted = replace(of_task, hint=progress.note(of_task, task))
                grades.append((path, noted))
                if not args.json:
                    print(_line(noted, max(len(t.name) for t in tasks)), flush=True)
            progress.save()
    score, most = sum(g.points for _, g in grades), sum(g.max for _, g in grades)
    if args.json:
        tasks = [{"file": str(path), **asdict(g), "passed": g.passed} for path, g in grades]
        for task in tasks:
            del task["answer"]
        print(json.dumps({"score": score, "max": most, "tasks": tasks}, indent=1))
    else:
        print(f"{score} of {most} points")
    for error in unreadable:
        _note(error)
    return 2 if unreadable else 0 if score == most else 1


_Chosen = list[tuple[Path, Submission, list[Task]]]


def _chosen(paths: list[Path], args: argparse.Namespace) -> tuple[_Chosen, list[ValueError]]:
    """The notebooks with the tasks to grade, and what is wrong with others.

    Raises ValueError for the first notebook that cannot be graded; with --all only if none can.
    """
    chosen, wrong = [], []
    for path in paths:
        try:
            submission = read_submission(path)
        except ValueError as error:
            wrong.append(error)
            continue
        try:
            chosen.append((path, submission, select(submission, args.task)))
        except ValueError as error:
            if not args.all:  # why: --all --task grades the exercises that have the task
                wrong.append(error)
    if not chosen and args.task and not wrong:
        raise ValueError(f"no exercise has the task {' or '.join(map(repr, args.task))}")
    if wrong and not (args.all and chosen):
        raise wrong[0]
    return chosen, wrong


def _head(path: Path, tasks: list[Task]) -> str:
    return f"{path}, {sum(task.points for task in tasks)} points"


def _line(grade: TaskGrade, width: int) -> str:
    line = f"  {grade.task:{width}}  {grade.points} of {grade.max}"
    if grade.reason:
        line += f"  {grade.reason}"
    if grade.hint:
        line += f"\n  {'':{width}}  hint: {grade.hint}"
    return line


def _note(words: object) -> None:
    print(f"cpref grade: {words}", file=sys.stderr)


def _class(args: argparse.Namespace, limits: Limits) -> int:
    if args.file or args.all or args.task or args.csv is None:
        raise ValueError("--class DIR takes --csv FILE, and neither notebooks, --all nor --task")
    if args.csv.suffix == ".ipynb":
        raise ValueError(f"--csv is {args.csv}; it must be no notebook")
    notebooks_of(args.folder)  # why: before the table is written
    with Runner(limits) as runner, _table(args.csv) as write:
        rows = []
        for row in grade_class(args.folder, runner):
            rows.append(row)
            write(row)
            if not args.json:
                name = f"{row.exercise}/{row.task}".rstrip("/")
                print(f"{row.learner}  {name}  {row.points} of {row.max}  {row.reason}", flush=True)
    if args.json:
        score, most = sum(row.points for row in rows), sum(row.max for row in rows)
        print(
            json.dumps({"score": score, "max": most, "tasks": [asdict(r) for r in rows]}, indent=1)
        )
    return 0 if all(row.task for row in rows) else 1


@contextmanager
def _table(path: Path) -> Iterator[Callable[[Row], None]]:
    """Writes rows as they come, so that what was graded is kept. Raises ValueError if it cannot."""
    try:
        file = path.open("w", newline="", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"--csv is {path}; it cannot be written: {error.strerror}") from None
    with file:
        table = csv.writer(file)
        table.writerow(field.name for field in fields(Row))

        def write(row: Row) -> None:
            table.writerow([_harmless(cell) for cell in astuple(row)])
            file.flush()

        yield write


def _harmless(cell: str | int) -> str | int:
    """A spreadsheet would take for a formula what begins so."""
    formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{cell}" if formula else cell
