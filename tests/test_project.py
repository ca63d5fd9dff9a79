"""The files around the package: versions stand in one place, and the README says what is true."""

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


@pytest.mark.parametrize("extra", ["", "lab", "test"])
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
    seen -= {"cpref", "setuptools"}
    missing = {name for name in seen if name not in pins() and not name.startswith("nvidia")}
    assert not missing


def test_conda_reads_the_same_pins():
    plain, pip = environment()
    assert "pip" in plain
    assert "-c constraints.txt" in pip
    assert "-e .[lab,test]" in pip
    assert not any("==" in line for line in [*plain, *pip])
    (python,) = [line for line in plain if line.startswith("python")]
    asked = SpecifierSet(python.removeprefix("python"))
    lowest = SpecifierSet(PROJECT["requires-python"])
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert asked.contains(version) == lowest.contains(version)


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
