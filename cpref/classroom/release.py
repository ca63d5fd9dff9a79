"""Make the exercises out of their solutions, with nbgrader's own preprocessors.

    python -m cpref.classroom.release            write exercises/
    python -m cpref.classroom.release --check    compare only; exit status 1 if they differ

The same steps as `nbgrader generate_assignment`, without its server and database: solutions and
hidden tests are cut out, cells locked, and checksums stored, so that an instructor may use the
notebooks of either folder in an nbgrader course.
"""

import argparse
import sys
from pathlib import Path

import nbformat
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearHiddenTests,
    ClearOutput,
    ClearSolutions,
    ComputeChecksums,
    LockCells,
)

from .exercise import EXERCISES, SOLUTIONS

_STEPS = (
    LockCells,
    ClearSolutions,
    ClearOutput,
    CheckCellMetadata,
    ClearHiddenTests,
    ComputeChecksums,
    CheckCellMetadata,
)


def released(path: Path) -> str:
    """The text of the exercise that a solution generates; the same text every time."""
    notebook = nbformat.read(path, as_version=4)
    for step in _STEPS:
        notebook, _ = step().preprocess(notebook, {"unique_key": path.stem})
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main(check: bool) -> int:
    texts = {EXERCISES / path.name: released(path) for path in sorted(SOLUTIONS.glob("*.ipynb"))}
    there = set(EXERCISES.glob("*.ipynb"))
    stale = [path for path, text in texts.items() if path not in there or path.read_text() != text]
    stale += sorted(there - set(texts))
    if check:
        for path in stale:
            print(f"exercises/{path.name} is not what solutions/ generates; make exercises")
        return 1 if stale else 0
    EXERCISES.mkdir(exist_ok=True)
    for path in stale:
        if path in texts:
            path.write_text(texts[path])
            print(f"written: exercises/{path.name}")
        else:
            path.unlink()
            print(f"removed: exercises/{path.name}, which has no solution")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make exercises/ out of solutions/.")
    parser.add_argument("--check", action="store_true", help="only say whether they differ")
    sys.exit(main(parser.parse_args().check))
