import json

import pytest

from cpref.classroom import doctor
from cpref.cli import main


@pytest.mark.distributed
def test_the_doctor_finds_that_this_machine_works(capsys):
    status = main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in said["findings"]}
    wrong = [name for name, finding in findings.items() if not finding["ok"]]
    assert (status == 0) == said["ok"] == (not wrong)
    assert findings["two ranks"]["ok"], findings["two ranks"]
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
