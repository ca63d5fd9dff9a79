"""Run one answer and its test in a fresh kernel, and say whether it passed.

Whether a test passed is read from the kernel's reply to it, which returns a word of the grader's if
the test ran to its end: what never ran, or ran with an error, scores nothing. Nothing that an
answer prints is listened to, so it may print what it likes.
"""

import json
import queue
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from . import grade_warden
from .exercise import Task
from .grade_limits import Limits, adopt_orphans, end_descendants, missing

_SHOWN = 600  # characters of a reason
_FRAME = re.compile(r"Cell In\[(\d+)\], line (\d+)")


@dataclass(frozen=True)
class Outcome:
    """reason: in words, why it did not pass."""

    passed: bool
    reason: str = ""


class _Lost(Exception):
    """The kernel is gone, or does not answer; the message is the reason."""


class Runner:
    """Runs answers, one after the other, each in a kernel of its own. Use it in a `with`.

    It must be made by a process of its own that has started no thread: it forks. Whatever runs
    below that process when it is left is killed. Raises ValueError on a system without fork.
    """

    def __init__(self, limits: Limits | None = None):
        self._limits = limits or Limits()

    def __enter__(self) -> "Runner":
        missing()
        adopt_orphans()
        self._warden, self._pipe = grade_warden.start(self._limits)
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        end_descendants()

    def run(self, task: Task, answer: str) -> Outcome:
        """Grade one answer; never raises for anything that the answer does."""
        with tempfile.TemporaryDirectory(prefix="cpref-", ignore_cleanup_errors=True) as name:
            try:
                with self._kernel(Path(name)) as kernel:
                    return self._judge(kernel, task, answer)
            except _Lost as lost:
                return Outcome(False, str(lost))

    def _judge(self, kernel: "_Kernel", task: Task, answer: str) -> Outcome:
        for source in task.stage:
            reply = kernel.execute(source)
            if reply["status"] != "ok":
                return Outcome(False, f"the exercise's own cell fails: {_reason(reply, {})}")
        reply = kernel.execute(answer, {"cell": "answer"})
        cells = {reply.get("execution_count"): answer}
        if reply["status"] != "ok":
            return Outcome(False, _reason(reply, cells))
        word = secrets.token_hex(8)
        reply = kernel.execute(task.test, {"cell": "test", "word": word})
        if reply["status"] != "ok":
            return Outcome(False, _reason(reply, cells))
        if reply.get("word") != word:
            return Outcome(False, "the test did not run to its end")
        return Outcome(True)

    @contextmanager
    def _kernel(self, folder: Path) -> Iterator["_Kernel"]:
        work = folder / "work"
        work.mkdir()
        kernel = _Kernel(self, folder, time.monotonic() + self._limits.seconds)
        try:
            self.tell({"start": kernel.connection_file, "folder": str(work)})
            kernel.connect()
            yield kernel
        finally:
            kernel.close()
            self._stop()

    def tell(self, order: dict) -> None:
        try:
            self._pipe.send_bytes(json.dumps(order).encode())
        except OSError:
            self._restart()
            raise _Lost("the answer ended the process that grades it") from None

    def heard(self) -> str | None:
        """Why the kernel has ended, if it has."""
        try:
            if self._pipe.poll():
                return json.loads(self._pipe.recv_bytes()).get("ended")
        except (EOFError, OSError):
            self._restart()
            return "the answer ended the process that grades it"
        return None

    def _stop(self) -> None:
        """Everything that the last answer has started is gone afterwards."""
        try:
            self._pipe.send_bytes(json.dumps({"stop": True}).encode())
            while self._pipe.poll(10):
                if "stopped" in json.loads(self._pipe.recv_bytes()):
                    return
        except (EOFError, OSError):
            pass
        self._restart()

    def _restart(self) -> None:
        self._pipe.close()
        end_descendants()
        self._warden, self._pipe = grade_warden.start(self._limits)


class _Kernel:
    """The grader's side of a kernel: it asks, and waits for replies until the deadline."""

    def __init__(self, runner: Runner, folder: Path, deadline: float):
        self._runner, self._deadline = runner, deadline
        # why sockets of the file system: nobody else can take them first, as happens with ports
        self.connection_file, _ = write_connection_file(
            str(folder / "kernel.json"), transport="ipc", ip=str(folder / "k")
        )
        self._client = BlockingKernelClient()
        self._client.load_connection_file(self.connection_file)

    def connect(self) -> None:
        self._client.start_channels(shell=True, iopub=False, stdin=False, hb=False, control=False)
        self._reply_to(self._client.kernel_info())

    def execute(self, source: str, what: dict[str, str] | None = None) -> dict:
        """The reply; what: the cell is, in the words of GradedKernel."""
        return self._reply_to(
            self._client.execute(source, user_expressions=what, allow_stdin=False)
        )

    def close(self) -> None:
        self._client.stop_channels()

    def _reply_to(self, request: str) -> dict:
        while True:
            if ended := self._runner.heard():
                raise _Lost(ended)
            if time.monotonic() > self._deadline:
                limit = self._runner._limits.seconds
                raise _Lost(f"not done after {limit:g} s: does it loop, or wait, for ever?")
            try:
                reply = self._client.get_shell_msg(timeout=0.05)
            except queue.Empty:
                continue
            if reply["parent_header"].get("msg_id") == request:
                return reply["content"]


def _reason(reply: dict, cells: dict[int, str]) -> str:
    """The error of a reply in one line; cells: the source of each cell of the learner's."""
    name, said = reply.get("ename", "error"), str(reply.get("evalue", "")).strip()
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(reply.get("traceback", [])))
    frames = [(int(count), int(line)) for count, line in _FRAME.findall(text)]
    own = [(count, line) for count, line in frames if count in cells]
    if name == "NotImplementedError" and own and not said:
        return "not attempted yet"
    if name == "AssertionError" and not (frames and frames[-1][0] in cells):
        return _cut(said or "a test fails")
    words = f"{name}: {said}" if said else name
    if own:
        count, line = own[-1]
        source = cells[count].splitlines()
        shown = f": {source[line - 1].strip()}" if line <= len(source) else ""
        words = f"{_cut(words)}, at line {line} of your cell{shown}"
    if name == "NameError":
        words += " (only the answer cells are graded: is it defined in another one?)"
    return words


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
