"""The `cpref` command: one word for each thing that the package can do by itself."""

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module

COMMANDS = {
    "demo": ("cpref.demo", "train on a long document with several ranks, and compare with one"),
    "verify": ("cpref.verify", "the errors of every strategy, layout and mask against float64"),
    "plan": ("cpref.plan_command", "how to divide a training job among GPUs, and why"),
    "bench": ("cpref.bench", "the time of sharded attention beside the alternatives"),
    "grade": ("cpref.classroom.grade_command", "grade exercises: points, reasons and hints"),
    "progress": ("cpref.classroom.progress", "the points of all exercises, and a bar"),
    "doctor": ("cpref.classroom.doctor", "what this machine has, and what would not work"),
    "lab": ("cpref.classroom.lab", "open the lessons in JupyterLab"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 only when what it claims holds, 2 for bad input."""
    words = sys.argv[1:] if argv is None else argv
    parser = _Parser(prog="cpref", description="Context parallelism, exact and readable.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, purpose) in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        if words and words[0] == name:  # why: no command should wait for what another one imports
            import_module(module).add_arguments(command)
    args = parser.parse_args(words)
    return _run(import_module(COMMANDS[args.command][0]).run, args)


def _run(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    try:
        return command(args)
    except ValueError as error:
        print(f"cpref {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"cpref {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # why: `cpref verify | head` is no failure of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        """One line, without the usage."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)
