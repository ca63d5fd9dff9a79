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


def test_importing_the_package_imports_no_notebook_machinery():
    check = (
        "import sys, cpref; print([m for m in sys.modules if m.startswith(('IPython', 'jupyter'))])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
