"""The files around the package: versions stand in one place, and the README says what is true."""

import configparser
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import cpref

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in wanted}


def environment():
    """environment.yml without a YAML parser: (the plain dependencies, those of pip)."""
    _, _, listed = (ROOT / "environment.yml").read_text().partition("dependencies:\n")
    plain = re.findall(r"^  - (\S+)$", listed, re.M)
    return plain, re.findall(r"^      - (.+)$", listed, re.M)


def test_constraints_pin_one_version_each():
    for requirement in pins().values():
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        assert "*" not in specifier.version


@pytest.mark.parametrize("extra", ["", "lab", "test", "book", "browser", "exercises"])
def test_what_the_project_needs_is_pinned_within_its_bounds(extra):
    for line in EXTRAS[extra] if extra else PROJECT["dependencies"]:
        wanted = Requirement(line)
        (pinned,) = pins()[canonicalize_name(wanted.name)].specifier
        assert wanted.specifier.contains(pinned.version), line


def test_everything_that_comes_along_is_pinned_too():
    """The needs of the needs: what is installed here because the project asked for it."""
    todo, seen = ["cpref"], set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        for line in requires(name) or []:
            need = Requirement(line)
            extras = ("lab", "test") if name == "cpref" else ("",)
            if any(not need.marker or need.marker.evaluate({"extra": e}) for e in extras):
                todo.append(need.name)
    seen.discard("cpref")
    with_cuda = ("nvidia", "cuda", "triton")  # why: torch itself pins what its CUDA build brings
    missing = {name for name in seen - set(pins()) if not name.startswith(with_cuda)}
    assert not missing


def test_conda_reads_the_same_pins():
    plain, pip = environment()
    assert "pip" in plain
    assert "-c constraints.txt" in pip
    assert "-e .[lab,test]" in pip
    assert not any("==" in line for line in [*plain, *pip])
    (python,) = [line for line in plain if line.startswith("python")]
    asked = SpecifierSet(python.removeprefix("python"))
    setup = (ROOT / ".ci" / "setup").read_text()
    bounds = set(re.findall(r"\(3, (\d+)\) <= sys\.version_info\[:2\] <= \(3, (\d+)\)", setup))
    ((lowest, highest),) = bounds
    for minor in range(8, 20):
        fits = int(lowest) <= minor <= int(highest)
        assert asked.contains(f"3.{minor}") == fits
        assert not fits or SpecifierSet(PROJECT["requires-python"]).contains(f"3.{minor}")


FAKE_PYTHON = """#!/bin/sh
echo "$*" >> calls
case "$*" in
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo made > .venv/pyvenv.cfg ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """What a setup reads, in a folder with a space in its name, and a Python that only notes."""
    folder = tmp_path / "a clone"
    (folder / ".ci").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/setup"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "python").write_text(FAKE_PYTHON)
    (folder / "python").chmod(0o755)
    return folder


def make_setup(clone, **variables):
    """What `make setup` notes in calls; each call starts with an empty one."""
    (clone / "calls").write_text("")
    asked = {"PYTHON": str(clone / "python")} | variables
    words = ["make", "-C", str(clone), "setup", *(f"{k}={v}" for k, v in asked.items())]
    hidden = ("TORCH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    return done, (clone / "calls").read_text()


def test_a_second_setup_does_nothing(clone):
    done, calls = make_setup(clone)
    assert done.returncode == 0, done.stderr
    assert "-m venv" in calls and "-m pip install" in calls
    done, calls = make_setup(clone, PYTHON="")
    assert (done.returncode, calls) == (0, "")


def test_a_changed_pin_is_installed_into_the_same_venv(clone):
    make_setup(clone)
    with (clone / "constraints.txt").open("a") as pinned:
        pinned.write("another==1.0\n")
    done, calls = make_setup(clone)
    assert done.returncode == 0, done.stderr
    assert "-m pip install" in calls and "-m venv" not in calls
    assert "another==1.0" in (clone / ".venv" / "constraints.txt").read_text()


def test_another_torch_makes_another_venv_that_later_setups_keep(clone):
    make_setup(clone)
    make_setup(clone, TORCH="system")
    (clone / ".venv" / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    done, calls = make_setup(clone)
    assert (done.returncode, calls) == (0, "")
    done, calls = make_setup(clone, TORCH="pinned")
    assert "-m venv --clear .venv" in calls


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [("PYTHON", "python-of-nobody", "no 'python-of-nobody' found"), ("TORCH", "mine", "'mine'")],
)
def test_what_setup_cannot_use_is_one_line(clone, variable, value, says):
    done, _ = make_setup(clone, **{variable: value})
    said, make_says = done.stderr.splitlines()
    assert done.returncode == 2
    assert says in said
    assert make_says.startswith("make")
    assert not (clone / ".venv").exists()


def test_make_help_lists_every_target():
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)
    for target in phony.split():
        assert re.search(rf"^{target}\s+\S", listed, re.M), target


def test_the_readme_names_what_exists():
    readme = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", readme, re.M):
        assert f"\n{target}:" in makefile, target
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    ("output", "compared"),
    [
        ("hello from rank 0 of 2\r\n", "hello from rank 0 of 2\r\n"),
        ("error 3.1e-07, 12 tokens, 5 MiB\n", "error 3.1e-07, 12 tokens, 5 MiB\n"),
        ("took 1.25 s or 12 ms\n", "took TIME or TIME\n"),
        ("[W1201 13:00:00.12 socket.cpp:7] waits\nhello\n", "hello\n"),
        ("W1201 13:00:00.12 4711 torch/run.py:9] waits\nhello\n", "hello\n"),
    ],
)
def test_notebooks_are_compared_but_for_times_and_log_lines(output, compared):
    rules = configparser.RawConfigParser()
    rules.read(ROOT / "tests" / "nbval_sanitize.cfg")
    for name in rules.sections():
        output = re.sub(rules[name]["regex"], rules[name]["replace"], output)
    assert output == compared


@pytest.mark.distributed
def test_the_example_of_the_readme_runs(tmp_path):
    (code,) = re.findall(
        r"```python\n(import torch\n.+?)```", (ROOT / "README.md").read_text(), re.S
    )
    program = tmp_path / "first.py"
    program.write_text(code.replace("4096", "64"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", str(program)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([1, 8, 32, 64])") == 2


def test_the_public_surface_is_documented():
    for name in cpref.__all__:
        assert getattr(cpref, name).__doc__, name
