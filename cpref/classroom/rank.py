"""What runs in each rank that `launch` starts: a cell or a module, with its output in a pipe.

What passes between the ranks and their starter lies in one folder, which the starter removes:

    cell.py         the source, if it is a cell
    out.R           a named pipe: what rank R prints, both streams in the order of printing
    pid.R           its process, which leads a session of its own
    stack.R         where it is, on SIGUSR1 and where it crashes
    error.R         how it failed
    kept.R          what it handed to `keep`, once it is done
    failed          exit codes by rank, if torchrun's agent saw one that is not 0
"""

import contextlib
import ctypes
import faulthandler
import io
import json
import linecache
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from multiprocessing import parent_process
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

CELL = "%%torchrun cell"
_SET_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_LINGER = 5  # seconds that a rank stays when it is done: others may still be connecting to it
ERROR_LINGER = 1.0  # seconds that a rank stays when it has failed: others may have more to say
_SHOWN = 10_000  # characters of an error that are shown at most, at its start and at its end
_kept: dict[str, bytes] = {}


def keep(**values: object) -> None:
    """Hand values of this rank to the notebook that runs the cell, by name.

    The notebook gets rank 0's values; with `%%torchrun --each` it gets for each name the list of
    all ranks' values, in order, None for a rank that kept none. Without --each a name that rank 0
    has not kept is an error. Tensors, arrays, numbers, strings, lists and dictionaries of them can
    be kept; tensors arrive on the CPU. Outside of `%%torchrun` this does nothing, so that a cell
    runs unchanged as a script.

    Raises TypeError if a value cannot be sent to another process.
    """
    for name, value in values.items():
        packed = io.BytesIO()
        try:
            torch.save(value, packed)
        except Exception as error:
            cause = re.sub(r" at 0x[0-9a-f]+", "", str(error))  # why: it differs from run to run
            raise TypeError(
                f"keep: {name} is {type(value).__name__}, which cannot be sent to the notebook "
                f"({cause}); keep tensors, numbers, strings, lists or dictionaries"
            ) from None
        _kept[name] = packed.getvalue()


def main(folder: Path, arguments: list[str]) -> None:
    """Run the cell in `folder`, or the module named by the first argument, as __main__.

    Ends the process, without what Python does at its end: threads, processes and groups that a cell
    leaves behind must not hold the rank back, nor warn.
    """
    rank = os.environ["RANK"]
    _be_a_process_of_its_own(folder, rank)
    _wait_until_all_have_started(folder)
    try:
        with _as_main(arguments):
            _run(folder, arguments)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            _flush()
            write_whole(folder / f"error.{rank}", json.dumps(_described(error)).encode())
            time.sleep(ERROR_LINGER)  # why: the agent should see first a rank that is gone
            os._exit(1)
    _flush()
    packed = io.BytesIO()
    torch.save(_kept, packed)
    write_whole(folder / f"kept.{rank}", packed.getvalue())
    time.sleep(_LINGER)
    os._exit(0)


def write_whole(path: Path, content: bytes) -> None:
    """Write, then give it its name: who finds the file finds all of it."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(content)
    partial.rename(path)


def _be_a_process_of_its_own(folder: Path, rank: str) -> None:
    """Not what the agent was before the fork: another session, other streams, other signals."""
    os.setsid()
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    _end_with_the_agent()
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(folder / f"out.{rank}")
    np.random.seed()  # why: it would be the agent's state on every rank
    stack = open(folder / f"stack.{rank}", "w")  # noqa: SIM115 - faulthandler needs it open
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    faulthandler.enable(stack, all_threads=False)


def _wait_until_all_have_started(folder: Path) -> None:
    """Ranks are forked from the agent, which also holds the store that they meet at.

    why: a fork copies what a thread is doing halfway. A rank that met the store while another one
    was being forked could leave that one with a lock that nobody ever opens.
    """
    for rank in range(int(os.environ["WORLD_SIZE"])):
        while not (folder / f"pid.{rank}").exists():
            time.sleep(0.005)


def _end_with_the_agent() -> None:
    agent = parent_process().pid
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(0.5)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _redirect(path: Path) -> None:
    """Both streams into the pipe as they are written, and nothing to read."""
    out = os.open(path, os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, end in enumerate((nothing, out, out)):
        os.dup2(end, number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            os.fdopen(number, "wb", buffering=0, closefd=False),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        for number in (1, 2)
    )


@contextlib.contextmanager
def _as_main(arguments: list[str]):
    """A fresh `__main__`, so that what a cell defines can be pickled, and its own sys.argv."""
    module = type(sys)("__main__")
    before = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = module, arguments or [CELL]
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv = before


def _run(folder: Path, arguments: list[str]) -> None:
    if arguments:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=False)
        return
    source = (folder / "cell.py").read_text("utf-8")
    linecache.cache[CELL] = (len(source), None, source.splitlines(keepends=True), CELL)
    exec(compile(source, CELL, "exec", dont_inherit=True), sys.modules["__main__"].__dict__)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # why: the cell may have put anything in their place
            stream.flush()


def _described(error: BaseException) -> dict[str, object]:
    """The error as the starter shows it: its own lines first, without those that got us here."""
    secondary = _is_of_another_rank(error)
    trace = _from_cell(error.__traceback__)
    # why: what the transport said of another rank's end would be a traceback of its own
    lines = traceback.format_exception(type(error), error, trace, chain=not secondary)
    text = "".join(lines).rstrip()
    if len(text) > 2 * _SHOWN:
        text = f"{text[:_SHOWN]}\n... {len(text) - 2 * _SHOWN} characters ...\n{text[-_SHOWN:]}"
    return {"when": time.time(), "secondary": secondary, "text": text}


def _is_of_another_rank(error: BaseException) -> bool:
    """Whether it only says that another rank is gone."""
    if type(error).__name__ in ("RankError", "DistNetworkError"):
        return True
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in lost)


def _from_cell(trace: TracebackType | None) -> TracebackType | None:
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace
