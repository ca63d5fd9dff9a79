import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.distributed
def test_the_minimal_example_is_as_exact_as_one_device():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", str(EXAMPLES / "minimal.py")),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^(\w+) +error (\S+) on 2 ranks, (\S+) on one$", done.stdout, re.M)
    assert [name for name, _, _ in shown] == ["out", "dq", "dk", "dv"]
    for _, ours, torchs in shown:
        assert 0 < float(ours) <= 1.6 * float(torchs)
