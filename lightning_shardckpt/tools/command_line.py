"""Run a tool as a command: problems become messages on stderr and an exit status, never a traceback.

Knows no tool. ``execute`` is for tests, too: it returns the status where ``run_process`` ends the process with it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from types import FrameType
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.storage.router import is_url

PROGRAM = "python -m lightning_shardckpt"


@dataclass(frozen=True, slots=True)
class Command:
    """A tool by name, with its parsed arguments; ``run`` returns the exit status."""

    tool: str
    run: Callable[[Namespace], int]
    arguments: Namespace
    trouble_status: int = 1
    """The exit status for a problem: 2 for tools that return 1 as a result."""


def run_process(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> NoReturn:
    """Run a command as this process, which ends with its exit status."""
    signal.signal(signal.SIGTERM, _terminate)  # so that unfinished files are removed
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have characters that a terminal lacks
    sys.exit(main(arguments))


def execute(parse: Callable[[], Command]) -> int:
    """Parse and run a command, and return its exit status: 0, 1 for a problem, 2 for wrong usage.

    Args:
        parse: gives the command; may raise SystemExit, as parsers do for help and for wrong usage.
    """
    try:
        return _status(parse())
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1


def add_storage_options(parser: ArgumentParser) -> None:
    """Let a tool take ``--storage_options``, which go to fsspec."""
    known = "for URLs, as fsspec takes them: --storage_options.endpoint_url=http://…, or all as JSON or YAML"
    parser.add_argument("--storage_options", type=dict[str, Any] | None, metavar="OPTIONS", help=known)


def _status(command: Command) -> int:
    try:
        status = command.run(command.arguments)
        if sys.stdout is not None:  # the parent process may have closed it
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # such as `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the buffer would fail at exit
        return 1
    except (ShardCkptError, OSError, ValueError) as error:
        return _fail(command, str(error))
    except KeyboardInterrupt:
        return 130
    except ImportError as error:  # such as no torch, or none that will do
        return _fail(command, f"{type(error).__name__}: {error}")
    except Exception as error:  # the libraries that read URLs raise classes of their own
        if not any(isinstance(value, str) and is_url(value) for value in vars(command.arguments).values()):
            raise
        return _fail(command, f"{type(error).__name__}: {error}")


def _fail(command: Command, why: str) -> int:
    print(f"{PROGRAM} {command.tool}: {why}", file=sys.stderr)
    return command.trouble_status


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
