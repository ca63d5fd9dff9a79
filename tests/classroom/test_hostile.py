"""What a submission may do to the grader: other tasks are graded right, and nothing is left behind.

All of it goes through few runs of `cpref grade`, in exercises made here that have a task for each
hostile answer, and for right answers between them.
"""

import json
import sys
import time
from pathlib import Path

import nbformat
import pytest

from .courses import left_of, notebook, run_by

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SECONDS = 6  # for each task; twice that where real ranks have to meet
RIGHT = "def double(x):\n    return 2 * x"
WRONG = "def double(x):\n    return x"
STAGE = "import torch\nfrom cpref.classroom import expect\n\ndef exact(x):\n    return x + x"
TEST = """
for n in (1, 3):
    x = torch.arange(n) + 1.0
    expect.same("double(x)", double(x), exact(x))
    assert torch.equal(double(x), exact(x)), "not doubled"
assert double(21) == 42  # SECRET
"""

# task: (answer, words of the reason; empty if it is right)
PLAIN = {
    # torch wraps torch.manual_seed when this is imported, which is no harm
    "importer": (f"import torch._dynamo\n{RIGHT}", ""),
    # what can be seen before the test has come: the working folder, what was run, who called
    "reader": (
        "import inspect, os, pathlib, __main__\n"
        "seen = [p.read_bytes() for p in pathlib.Path('..').rglob('*') if p.is_file()]\n"
        "seen += [repr((In, Out, vars(__main__))).encode(), repr(os.environ).encode()]\n"
        "seen += [repr(f.frame.f_locals).encode() for f in inspect.stack()]\n"
        "seen += [str(getattr(x, 'test', '')).encode()\n"
        "         for x in __import__('gc').get_objects() if type(x).__name__ == 'Task']\n"
        "word = b'SEC' + b'RET'\n"
        f"assert not any(word in text for text in seen), 'seen'\n{RIGHT}",
        "",
    ),
    "loop": ("while True:\n    pass", f"not done after {SECONDS} s"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", "ended its kernel (SIGKILL)"),
    "right_after_a_kill": (RIGHT, ""),
    "sys_exit": ("import sys\nsys.exit(0)", "SystemExit"),
    "exit_in_the_test": ("def double(x):\n    raise SystemExit(0)", "SystemExit"),
    "os_exit": ("import os\ndef double(x):\n    os._exit(0)", "ended its kernel (exit status 0)"),
    "warden": (
        "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(9)",
        "ended the process that grades it",
    ),
    "right_after_the_warden": (RIGHT, ""),
    "left_thread": (
        f"import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\n{RIGHT}",
        "",
    ),
    "left_process": (f"import subprocess\nsubprocess.Popen(['sleep', '98'])\n{RIGHT}", ""),
    "left_daemon": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(97)\n"
        f"    os._exit(0)\n{RIGHT}",
        "",
    ),
    "output": (
        "for _ in range(100):\n"
        "    print('x' * (1 << 20))\n"
        "import os\n"
        f"os.write(1, b'x' * (1 << 20))\n{RIGHT}",
        "",
    ),
    "long_error": ("raise ValueError('x' * (20 << 20))", "ValueError: xxx"),
    "fork_bomb": (
        "import os, time\n"
        "for _ in range(200):\n"  # why: at most so many, even if nothing stops them
        "    if os.fork() == 0:\n"
        "        time.sleep(20)\n"
        "        os._exit(0)\n"
        "time.sleep(20)",
        "more than",
    ),
    "hog": (
        "held = [bytearray(b'x' * (16 << 20)) for _ in range(60)]",  # why: 960 MiB at most
        "MemoryError",
    ),
    "hogs": (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(b'x' * (150 << 20))\n"
        "        time.sleep(20)\n"
        "        os._exit(0)\n"
        "time.sleep(20)",
        "took more than 512 MiB",
    ),
    "file": (
        "with open('big', 'wb') as file:\n"
        "    for _ in range(80):\n"
        "        file.write(bytes(1 << 20))",
        "File too large",
    ),
    "right_after_limits": (RIGHT, ""),
    "patched_expect": (f"expect.same = lambda *a, **k: None\n{WRONG}", "leave it as it is"),
    "patched_vars": (
        f"vars(expect)['same'] = lambda *a, **k: None\n{WRONG}",
        "changes expect.same",
    ),
    "patched_code": (
        f"expect.same.__code__ = (lambda *a, **k: None).__code__\n{WRONG}",
        "changes expect.same",
    ),
    "patched_torch": (f"torch.equal = lambda *a: True\n{WRONG}", "changes torch.equal"),
    "patched_in_the_test": (
        "def double(x):\n    torch.equal = lambda *a: True\n    return 2 * x",
        "changes torch.equal",
    ),
    "patched_builtins": (
        f"import builtins\nbuiltins.all = lambda *a: True\n{WRONG}",
        "changes builtins.all",
    ),
    "patched_helper": (f"def exact(x):\n    return x\n{WRONG}", "changes exact"),
    "tracer": (f"import sys\nsys.settrace(lambda *a: None)\n{WRONG}", "changes sys.settrace"),
    "transformer": (
        f"get_ipython().input_transformers_cleanup.append(lambda lines: lines[-1:])\n{WRONG}",
        "double(x)",
    ),
    "kernel": (
        "async def do(*a, **k):\n    return {'status': 'ok'}\n"
        f"get_ipython().kernel.do_execute = do\n{WRONG}",
        "changes kernel.do_execute",
    ),
    "liar": (
        "class Yes(torch.Tensor):\n"
        "    @classmethod\n"
        "    def __torch_function__(cls, *a, **k):\n"
        "        return torch.tensor(0.0)\n"
        "def double(x):\n    return torch.ones(1).as_subclass(Yes)",
        "it must be a tensor",
    ),
    "right_at_the_end": (RIGHT, ""),
}

RIGHT_ON_RANKS = "def total(x, group):\n    return group.all_reduce(x)"
RANKS_STAGE = "import torch\nfrom cpref.classroom import expect"
RANKS_TEST = """
def check(group):
    x = torch.full((2,), float(group.rank + 1))
    exact = torch.full((2,), group.size * (group.size + 1) / 2)
    expect.same("the total", total(x, group), exact)

expect.on_ranks(check, 2, 3)
"""


def on_real_rank(number: int, harm: str) -> str:
    """An answer that is right on local ranks, and does harm on this real one."""
    return (
        "import os, time\nimport cpref\n"
        "def total(x, group):\n"
        "    real = not isinstance(group, cpref.local.LocalGroup)\n"
        f"    if real and group.rank == {number}:\n"
        f"        {harm}\n"
        "    return group.all_reduce(x)"
    )


RANKS = {
    "deadlock": (
        "def total(x, group):\n"
        "    if group.rank == 0:\n        group.shift(x).wait()\n"
        "    return group.all_reduce(x)",
        "deadlock on",
    ),
    "raises": (
        "def total(x, group):\n"
        "    if group.rank == 1:\n        raise ValueError('not me')\n"
        "    return group.all_reduce(x)",
        "not me",
    ),
    "raises_on_a_real_one": (
        on_real_rank(1, "raise ValueError('not me')"),
        "on 3 real ranks: rank 1 of 3: ValueError: not me, at line 6 of your cell",
    ),
    "killed": (
        on_real_rank(2, "os.kill(os.getpid(), 9)"),
        "on 3 real ranks: rank 2 has ended without a word (SIGKILL)",
    ),
    "exits": (
        on_real_rank(0, "os._exit(0)"),
        "on 3 real ranks: rank 0 has ended without a word (exit status 0)",
    ),
    "waits": (
        on_real_rank(1, "time.sleep(60)"),
        "on 3 real ranks: they wait for ever:",
    ),
    "wrong_on_a_real_one": (
        on_real_rank(1, "x = x + 1"),
        "on 3 real ranks: rank 0 of 3: the total",
    ),
    "right": (RIGHT_ON_RANKS, ""),
}


def graded(folder: Path, path: Path, seconds: int, *options: str) -> dict[str, dict]:
    """What `cpref grade` says of each task, with folder/solutions as the exercises."""
    words = ["grade", "--json", "--timeout", str(seconds), *options, str(path)]
    with run_by(folder, words) as grader:
        out, err = grader.communicate(timeout=240)
    assert (grader.returncode, err) == (1, "")
    assert left_of(folder) == []
    return {task["task"]: task for task in json.loads(out)["tasks"]}


def check(tasks: dict[str, dict], expected: dict[str, tuple[str, str]]) -> None:
    """Every task, so that one run says all that is wrong."""
    assert set(tasks) == set(expected)
    wrong = {
        name: tasks[name]["reason"]
        for name, (_, words) in expected.items()
        if tasks[name]["passed"] != (words == "") or words not in tasks[name]["reason"]
    }
    assert wrong == {}


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
def test_answers_that_hang_or_end_real_ranks(tmp_path):
    cells = {task: (answer, RANKS_TEST) for task, (answer, _) in RANKS.items()}
    solutions = {task: (RIGHT_ON_RANKS, RANKS_TEST) for task in RANKS}
    (tmp_path / "solutions").mkdir()
    path = tmp_path / "ours.ipynb"
    nbformat.write(notebook("ranks", solutions, RANKS_STAGE), tmp_path / "solutions/ranks.ipynb")
    nbformat.write(notebook("ranks", cells, RANKS_STAGE), path)
    check(graded(tmp_path, path, 2 * SECONDS), RANKS)


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
def test_a_hostile_answer_costs_nobody_else_a_point(tmp_path):
    (tmp_path / "solutions").mkdir()
    cells = {task: (RIGHT, TEST) for task in PLAIN}
    nbformat.write(notebook("hostile", cells, STAGE), tmp_path / "solutions" / "hostile.ipynb")
    path = tmp_path / "mine.ipynb"
    cells = {task: (answer, TEST) for task, (answer, _) in PLAIN.items()}
    nbformat.write(notebook("hostile", cells, STAGE), path)
    before, started = path.read_bytes(), time.monotonic()
    tasks = graded(tmp_path, path, SECONDS, "--memory", "512")
    assert time.monotonic() - started < SECONDS * len(PLAIN)
    check(tasks, PLAIN)
    assert path.read_bytes() == before
