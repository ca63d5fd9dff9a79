import subprocess
import sys

import pytest

from cpref.cli import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert COMMANDS[command][1].split(",")[0] in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("words", [[], ["nothing"], ["doctor", "--nothing"]])
def test_unknown_words_are_one_line_and_status_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.startswith("cpref")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("ranks is 0; it must be at least 1"), 2, "ranks is 0; it must be at least 1"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_a_command_is_one_line_and_its_status(error, status, said, capsys, monkeypatch):
    def fail(args):
        raise error

    monkeypatch.setattr("cpref.classroom.doctor.run", fail)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == f"cpref doctor: {said}\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error_of_the_command():
    chatty = (
        "import cpref.cli, cpref.classroom.doctor as doctor\n"
        "doctor.run = lambda args: print('x' * 1_000_000)\n"
        "raise SystemExit(cpref.cli.main(['doctor']))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", chatty], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    command.stdout.close()
    assert command.stderr.read() == ""
    command.stderr.close()
    assert command.wait() == 141


@pytest.mark.slow
def test_importing_the_package_imports_no_notebook_machinery():
    check = (
        "import sys, cpref; print([m for m in sys.modules if m.startswith(('IPython', 'jupyter'))])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
