"""The kernel that an answer and its test run in: a Jupyter kernel, forked by the warden."""

import itertools
import json
import os
import signal
import tempfile
import traceback
from multiprocessing.connection import Connection

import torch
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import Any

from . import expect
from .grade_guard import Guard, seal

_LONGEST = 10_000  # characters of one text in a reply


class GradedKernel(IPythonKernel):
    """A kernel that runs a test outside of IPython, whose hooks an answer can change.

    The grader says what a cell is in place of user expressions: {"cell": "answer"}, or {"cell":
    "test", "word": ...}. A reply has the word only if the test ran to its end, and nothing that it
    relies on was changed.
    """

    ranks = Any()

    async def do_execute(self, code, silent, *args, user_expressions=None, **more):
        cell = user_expressions or {}
        self.ranks.sources.append(code)
        if cell.get("cell") == "test":
            return _shortened(self._test(code, cell["word"]))
        if cell.get("cell") == "answer":
            self.ranks.guard = guard = Guard(self.shell.user_ns, self)
        reply = await super().do_execute(code, silent, *args, **more)
        if cell.get("cell") == "answer" and (name := guard.changed()):
            reply |= _tampered(name)
        return _shortened(reply)

    def _test(self, code: str, word: str) -> dict:
        guard = self.ranks.guard
        try:
            exec(compile(code, "the test", "exec", dont_inherit=True), self.shell.user_ns)
        except BaseException as error:
            return _failed(error, self.shell.compile._filename_map)
        if name := guard.changed():
            return _tampered(name)
        return {"status": "ok", "execution_count": self.execution_count, "word": word}


class RealRanks:
    """Asks the warden to run a test's check on real ranks, and says in words what became of it.

    The ranks run the same cells as this kernel, so they are given the sources of all of them; in
    the test's cell they skip the calls of `on_ranks` before this one.
    """

    def __init__(self, warden: Connection):
        self._warden = warden
        self._calls = itertools.count(1)
        self.sources: list[str] = []
        self.guard: Guard | None = None

    def __call__(self, check: expect.Check, size: int) -> None:
        order = {"ranks": size, "call": next(self._calls), "sources": self.sources}
        self._warden.send_bytes(json.dumps(order).encode())
        outcomes = json.loads(self._warden.recv_bytes())
        if words := _failure(outcomes):
            raise AssertionError(f"on {size} real ranks: {words}")


def _failure(outcomes: list[dict | None]) -> str | None:
    """What to say of the ranks; None if all is well. An own error goes before one of waiting."""
    for kind in ("failed", "ended", "lost", "stuck"):
        told = {rank: said[kind] for rank, said in enumerate(outcomes) if said and kind in said}
        if kind == "stuck" and told:
            where = "; ".join(f"rank {rank} {place}" for rank, place in told.items())
            return f"they wait for ever: {where}"
        for rank, words in told.items():
            if kind == "ended":
                how = signal.Signals(-words).name if words < 0 else f"exit status {words}"
                return f"rank {rank} has ended without a word ({how})"
            return words
    if all(said and "ok" in said for said in outcomes):
        return None
    return f"rank {outcomes.index(None)} does not answer"


def _failed(error: BaseException, cells: dict[str, int]) -> dict:
    """The reply for a test that raised; of its traceback only the learner's cells, and the test."""
    try:
        said = str(error)
    except BaseException:
        said = "an exception that cannot be printed"
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"Cell In[{cells.get(frame.filename, 0)}], line {frame.lineno}"
        for frame in frames
        if frame.filename in cells or frame.filename == "the test"
    ]
    return {"status": "error", "ename": type(error).__name__, "evalue": said, "traceback": places}


def _tampered(name: str) -> dict:
    words = f"the answer changes {name}, which the test relies on; leave it as it is"
    return {"status": "error", "ename": "AssertionError", "evalue": words, "traceback": []}


def _shortened(reply: dict) -> dict:
    """Of a text of a gigabyte the grader has no use."""
    short = {key: x[:_LONGEST] if isinstance(x, str) else x for key, x in reply.items()}
    if "traceback" in short:
        short["traceback"] = [str(part)[:_LONGEST] for part in short["traceback"][-50:]]
    return short


def main(connection_file: str, warden: Connection, seconds: float) -> None:
    """Be a kernel until the end."""
    tempfile.tempdir = None
    torch.set_num_threads(1)
    ranks = expect._real_ranks = RealRanks(warden)
    seal(expect)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["IPYTHONDIR"] = os.path.join(os.getcwd(), ".ipython")
    options = ["--HistoryManager.enabled=False", "--InteractiveShell.colors=nocolor"]
    app = IPKernelApp.instance(kernel_class=GradedKernel)
    app.initialize(["-f", connection_file, *options])
    app.kernel.ranks = ranks
    app.start()
