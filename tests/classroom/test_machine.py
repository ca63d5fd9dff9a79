import psutil
import pytest

from cpref.classroom import machine

HALF = 1 << 19


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "usable"),
    [
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 8),
        ("max 100000", 8),
        (None, 8),
    ],
)
def test_a_container_may_use_the_cores_of_its_quota(quota, usable, group, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)), raising=False)
    if quota:
        (group / "cpu.max").write_text(f"{quota}\n")
    assert machine.cores() == usable


def test_a_container_may_use_what_is_left_of_its_memory(group):
    (group / "memory.max").write_text(f"{2 * HALF}\n")
    (group / "memory.current").write_text(f"{HALF}\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 1000\n")
    assert machine.free_memory() == HALF + 1000


def test_without_a_limit_the_memory_is_the_machine_s(group, monkeypatch):
    (group / "memory.max").write_text("max\n")
    available = psutil.virtual_memory()._replace(available=12345)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    assert machine.free_memory() == 12345
