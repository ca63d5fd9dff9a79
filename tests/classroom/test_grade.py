"""The grader: bad input is one clear line."""

import pytest

from cpref.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_what_is_no_exercise_is_one_clear_line(capsys, tmp_path):
    file = tmp_path / "a.ipynb"
    file.write_text("no JSON")
    assert main(["grade", str(file)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
