"""The grader: a solution has all points, a blank none, and bad input one clear line."""

import json
from pathlib import Path

import pytest

from cpref.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROOT = Path(__file__).parents[2]
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))


def graded(capsys, path: Path) -> tuple[int, dict]:
    status = main(["grade", "--json", str(path)])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_a_solution_scores_everything_and_its_blank_exercise_nothing(capsys, path):
    status, report = graded(capsys, path)
    assert status == 0 and report["score"] == report["max"] > 0
    blank = ROOT / "exercises" / path.name
    before = blank.read_bytes()
    status, report = graded(capsys, blank)
    assert status == 1 and report["score"] == 0 < report["max"]
    assert blank.read_bytes() == before


def test_what_is_no_exercise_is_one_clear_line(capsys, tmp_path):
    file = tmp_path / "a.ipynb"
    file.write_text("no JSON")
    assert main(["grade", str(file)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
