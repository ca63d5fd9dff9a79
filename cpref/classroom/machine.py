"""What this process may use of its machine: in a container, within the limits that it has.

Limits are read from Linux's control groups, version 2.
"""

import contextlib
import os
import re
from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that may compute at the same time, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    usable = usable or 1
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        quota, period = (int(word) for word in (_GROUP / "cpu.max").read_text().split())
        return max(1, min(usable, quota // period))
    return usable


def free_memory() -> int:
    """Bytes that programs can still have."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.search(r"^inactive_file (\d+)", (_GROUP / "memory.stat").read_text(), re.M)
        free = min(free, limit - used + int(cached[1] if cached else 0))
    return free
