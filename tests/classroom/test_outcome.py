import json

import pytest

from cpref.classroom.outcome import first_failure


@pytest.mark.parametrize(
    ("errors", "code", "left", "shown"),
    [
        (
            {0: (True, 1.0), 1: (False, 2.0), 2: (False, 3.0)},
            {0: 1},
            None,
            "rank 1 of 3 failed:\nerror 1",
        ),
        ({0: (True, 1.0), 2: (True, 3.0)}, {0: 1}, None, "rank 0 of 3 failed:\nerror 0"),
        ({0: (True, 1.0), 2: (True, 3.0)}, {0: 1}, 1, "rank 1 of 3 left before its cell was done"),
        ({0: (True, 1.0), 2: (False, 3.0)}, {0: 1}, 1, "rank 2 of 3 failed:\nerror 2"),
        ({0: (True, 1.0)}, {1: -9}, 1, "rank 1 of 3 was ended by SIGKILL, as by a lack of memory"),
        ({0: (False, 1.0)}, {1: -15}, 1, "rank 0 of 3 failed:\nerror 0"),
        ({}, {2: 7}, 2, "rank 2 of 3 exited with 7"),
        ({}, None, 2, "rank 2 of 3 left before its cell was done"),
    ],
)
def test_what_failed_first_is_shown(errors, code, left, shown, tmp_path):
    for rank, (secondary, when) in errors.items():
        error = {"secondary": secondary, "when": when, "text": f"error {rank}"}
        (tmp_path / f"error.{rank}").write_text(json.dumps(error))
    if code:
        (tmp_path / "failed").write_text(json.dumps(code))
    assert first_failure(tmp_path, 3, left) == shown


def test_of_ranks_that_fail_alike_always_the_same_is_shown(tmp_path):
    for rank, when in enumerate((4.0, 3.0, 2.0)):
        error = {"secondary": False, "when": when, "text": f"error {max(1, rank) - 1}"}
        (tmp_path / f"error.{rank}").write_text(json.dumps(error))
    assert first_failure(tmp_path, 3) == "rank 2 of 3 failed:\nerror 1"
    (tmp_path / "error.2").unlink()
    assert first_failure(tmp_path, 3) == "rank 0 of 3 failed:\nerror 0"


@pytest.mark.parametrize(
    ("log", "shown"), [("no port is free\n", "no port is free"), ("", "its agent is gone")]
)
def test_a_failure_of_torchrun_itself_is_told(log, shown, tmp_path):
    (tmp_path / "agent.log").write_text(log)
    assert first_failure(tmp_path, 2).startswith(f"torchrun failed:\n{shown}")
