"""What runs in each rank that `launch` starts: a cell or a module, with its output in a file.

Everything goes into one folder, which the starter reads while the ranks write, and then removes:

    cell.py         the source, if it is a cell
    out.R           what rank R printed, both streams in the order of printing
    pid.R           its process
    stack.R         where it is, on SIGUSR1
    error.R         the exception that ended it
    kept.R          what it handed to `keep`
"""

import contextlib
import faulthandler
import io
import json
import linecache
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

import torch

CELL = "%%torchrun cell"
_kept: dict[str, bytes] = {}


def keep(**values: object) -> None:
    """Hand values of this rank to the notebook that runs the cell, by name.

    The notebook gets rank 0's values; with `%%torchrun --each` it gets for each name the list of
    all ranks' values, in order, None for a rank that kept none. Tensors, arrays, numbers, strings,
    lists and dictionaries of them can be kept. Outside of `%%torchrun` this does nothing, so that a
    cell runs unchanged as a script.

    Raises TypeError if a value cannot be sent to another process.
    """
    for name, value in values.items():
        packed = io.BytesIO()
        try:
            torch.save(value, packed)
        except Exception as error:
            raise TypeError(
                f"keep: {name} is {type(value).__name__}, which cannot be sent to the notebook "
                f"({error}); keep tensors, numbers, strings, lists or dictionaries"
            ) from None
        _kept[name] = packed.getvalue()


def main(folder: Path, arguments: list[str]) -> int:
    """Run the cell in `folder`, or the module named by the first argument, as __main__."""
    rank = os.environ["RANK"]
    _redirect(folder / f"out.{rank}")
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    stack = open(folder / f"stack.{rank}", "w")  # noqa: SIM115 - faulthandler needs it open
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    threading.Thread(target=_end_with_the_agent, args=(os.getppid(),), daemon=True).start()
    try:
        with _as_main(arguments):
            _run(folder, arguments)
    except SystemExit as end:
        return _status(end)
    except BaseException as error:
        _write_whole(folder / f"error.{rank}", json.dumps(_described(error)).encode())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    _write_whole(folder / f"kept.{rank}", _pickled_kept())
    _leave()
    return 0


def _run(folder: Path, arguments: list[str]) -> None:
    if arguments:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=False)
        return
    source = (folder / "cell.py").read_text()
    linecache.cache[CELL] = (len(source), None, source.splitlines(keepends=True), CELL)
    exec(compile(source, CELL, "exec"), sys.modules["__main__"].__dict__)


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


def _redirect(path: Path) -> None:
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _end_with_the_agent(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(0.5)
    os._exit(1)


def _described(error: BaseException) -> dict[str, object]:
    """The error as the starter shows it: its own lines first, without those that got us here."""
    trace = _from_cell(error.__traceback__)
    lines = traceback.format_exception(type(error), error, trace)
    secondary = type(error).__name__ == "RankError"
    return {"when": time.time(), "secondary": secondary, "text": "".join(lines).rstrip()}


def _from_cell(trace: TracebackType | None) -> TracebackType | None:
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _pickled_kept() -> bytes:
    packed = io.BytesIO()
    torch.save(_kept, packed)
    return packed.getvalue()


def _write_whole(path: Path, content: bytes) -> None:
    """Write, then give it its name: who finds the file finds all of it."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(content)
    partial.rename(path)


def _leave() -> None:
    from ..processes import shutdown

    shutdown()


def _status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    from cpref.classroom import rank as this  # why: `keep` must be that of the imported module

    status = this.main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(status)  # why: threads that a cell left behind must not hold the rank back
