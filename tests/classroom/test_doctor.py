import json
import socket
import sys
from pathlib import Path

import pytest
from jupyter_client import kernelspec

from cpref.classroom import doctor
from cpref.cli import main


@pytest.mark.distributed
def test_the_doctor_finds_that_this_machine_works(capsys):
    status = main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in said["findings"]}
    wrong = [name for name, finding in findings.items() if not finding["ok"]]
    assert (status == 0) == said["ok"] == (not wrong)
    assert findings["ranks"]["ok"], findings["ranks"]
    assert {"Python", "torch", "backends", "accelerators", "cores", "free port"} <= set(findings)


def test_what_does_not_work_comes_with_a_remedy_and_status_1(capsys, monkeypatch):
    broken = [
        doctor.Finding("host name", "not known", False, "add it to /etc/hosts"),
        doctor.Finding("cores", "2"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(broken))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "NOT  host name" in said
    assert "-> add it to /etc/hosts" in said
    assert "1 of 2 would not work" in said


def test_a_look_that_breaks_hides_no_other(monkeypatch):
    def _broken():
        raise OSError("no such thing")
        yield

    for look in ("_torch", "_accelerators", "_machine", "_network", "_jupyter", "_pins", "_ranks"):
        monkeypatch.setattr(doctor, look, _broken)
    first, *others = doctor.examine()
    assert first.name == "Python"
    assert [finding.value for finding in others] == ["OSError: no such thing"] * 7
    assert not any(finding.ok for finding in others)


@pytest.mark.parametrize("address", [None, "192.0.2.1"])  # the latter is of no machine: RFC 5737
def test_a_host_name_that_is_not_of_this_machine_would_not_work(address, monkeypatch):
    def resolve(name):
        if address is None:
            raise socket.gaierror("Name or service not known")
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    name, port = doctor._network()
    assert not name.ok
    assert "/etc/hosts" in name.remedy
    assert port.ok


@pytest.mark.parametrize(
    ("program", "ok"),
    [(sys.executable, True), ("python", True), ("/somewhere/else/bin/python", False)],
)
def test_the_kernel_must_be_of_this_environment(program, ok, monkeypatch):
    spec = kernelspec.KernelSpec(argv=[program])
    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", lambda *_: spec)
    (kernel,) = doctor._jupyter()
    assert kernel.ok == ok


def test_another_environment_with_the_same_python_is_another_one(tmp_path, monkeypatch):
    linked = tmp_path / "bin" / "python"
    linked.parent.mkdir()
    linked.symlink_to(Path(sys.executable).resolve())
    spec = kernelspec.KernelSpec(argv=[str(linked)])
    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", lambda *_: spec)
    (kernel,) = doctor._jupyter()
    assert not kernel.ok
    assert "ipykernel install" in kernel.remedy


@pytest.mark.slow
@pytest.mark.distributed
def test_fit_prints_the_constants_of_this_machine_and_stores_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "examine", lambda: iter(()))
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--fit", "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    machine = finding["constants"]["machine"]
    assert machine["forward"]["pair"] > 0
    assert machine["backward"]["pair"] > machine["forward"]["pair"] / 2
    assert machine["link"]["bandwidth"] > 1e6
    assert "GFLOP/s" in finding["value"]
    assert not list(tmp_path.iterdir())
