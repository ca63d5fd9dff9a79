"""The kernel that an answer and its test run in: a Jupyter kernel, forked by the warden."""

import itertools
import json
import os
import signal
import tempfile
from multiprocessing.connection import Connection

import torch
from ipykernel.kernelapp import IPKernelApp
from IPython import get_ipython

from . import expect


class RealRanks:
    """Asks the warden to run a test's check on real ranks, and says in words what became of it.

    The ranks run the same cells as this kernel, so they are given the sources of all of them; in
    the test's cell they skip the calls of `on_ranks` before this one.
    """

    def __init__(self, warden: Connection):
        self._warden = warden
        self._calls = itertools.count(1)
        self._cell = 0

    def __call__(self, check: expect.Check, size: int) -> None:
        sources = get_ipython().user_ns["In"][1:]
        if len(sources) != self._cell:
            self._cell, self._calls = len(sources), itertools.count(1)
        order = {"ranks": size, "call": next(self._calls), "sources": sources}
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


def main(connection_file: str, warden: Connection, seconds: float) -> None:
    """Be a kernel until the end."""
    tempfile.tempdir = None
    torch.set_num_threads(1)
    expect._real_ranks = RealRanks(warden)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["IPYTHONDIR"] = os.path.join(os.getcwd(), ".ipython")
    options = ["--HistoryManager.enabled=False", "--InteractiveShell.colors=nocolor"]
    app = IPKernelApp.instance()
    app.initialize(["-f", connection_file, *options])
    app.start()
