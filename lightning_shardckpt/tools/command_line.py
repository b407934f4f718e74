"""Running of a tool as a command: problems become messages on stderr and an exit status, not a traceback.

Knows no tool. ``run_process`` ends the process with the exit status that ``execute`` returns.
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
    """A tool with parsed arguments; its exit status for an error is 2 if it returns 1 as a result."""

    tool: str
    run: Callable[[Namespace], int]
    arguments: Namespace
    error_status: int = 1


def run_process(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> NoReturn:
    """Run a command and end this process with its exit status."""
    signal.signal(signal.SIGTERM, _terminate)  # so that unfinished files are removed
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have characters that the terminal can't encode
    sys.exit(main(arguments))


def execute(parse: Callable[[], Command]) -> int:
    """Parse and run a command, and return its exit status: 0, 1 for a problem, 2 for wrong usage.

    Args:
        parse: returns the command; may raise SystemExit, as parsers do for help and for wrong usage.
    """
    try:
        return _status(parse())
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1


def add_storage_options(parser: ArgumentParser) -> None:
    """Add ``--storage_options`` for URLs to a tool."""
    known = "for URLs, by fsspec's names: --storage_options.endpoint_url=http://…, or all as JSON or YAML"
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
    except (ShardCkptError, OSError, ValueError, ImportError) as error:  # such as an unsupported torch
        return _fail(command, str(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the libraries that read URLs raise classes of their own
        if not any(isinstance(value, str) and is_url(value) for value in vars(command.arguments).values()):
            raise
        return _fail(command, f"{type(error).__name__}: {error}")


def _fail(command: Command, message: str) -> int:
    print(f"{PROGRAM} {command.tool}: {message}", file=sys.stderr)
    return command.error_status


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
