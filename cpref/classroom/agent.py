"""torchrun's agent for one machine, tied to the process that started it.

`python -m cpref.classroom.agent FOLDER RANKS [MODULE ARGUMENTS...]` does what `torchrun
--standalone` does with a program, through the same launcher and agent, with two differences.

Where there is no accelerator, the ranks are forked from the agent, which has imported torch
already: an import takes two seconds of a core, and P + 1 of them are most of the time that a short
cell takes. (A process that uses a GPU may not be forked, so there each rank starts anew.)

The agent ends, with all that its ranks have started, when its starter says so on its standard
input, or is gone, however that happened: then it also removes the folder.
"""

import contextlib
import ctypes
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from . import rank

_SET_CHILD_SUBREAPER = 36  # of Linux's prctl: orphans below us become our children
_ending = threading.Lock()  # never released: one thread ends the process, the other waits for that


def main(folder: Path, ranks: int, arguments: list[str]) -> int:
    """Run the ranks until one fails: then `failed` in the folder has its exit code.

    It does not return when all have ended well: the starter sees that by what they kept, and has no
    more need of the agent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    threading.Thread(target=_end_with_the_starter, args=(folder,), daemon=True).start()
    try:
        elastic_launch(_config(folder, ranks), rank.main)(folder, arguments)
    except ChildFailedError as error:
        codes = {number: failure.exitcode for number, failure in error.failures.items()}
        rank.write_whole(folder / "failed", json.dumps(codes).encode())
    finally:
        _ending.acquire()  # why: ranks that the other thread ends look to torch like a failure
        _end_all_below()
    return 1


def _config(folder: Path, ranks: int) -> LaunchConfig:
    forks = sys.platform == "linux" and not torch.accelerator.is_available()
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # why: the host's own name is not known everywhere
        max_restarts=0,
        start_method="fork" if forks else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )


def _end_with_the_starter(folder: Path) -> None:
    gone = os.read(0, 1) == b""
    _ending.acquire()
    _end_all_below()
    deadline = time.monotonic() + 5
    while gone and folder.exists() and time.monotonic() < deadline:
        # why more than once: until it ends, the agent itself may still write into it
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _end_all_below() -> None:
    deadline = time.monotonic() + 5
    while (below := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=1)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    os._exit(status)  # why: nothing is left to do, and threads of the agent would be waited for
