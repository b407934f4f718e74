"""The command line of the tools: ``python -m lightning_shardckpt {inspect,verify,digest,diff,…} …``.

Exit status: 0 for success, 1 for a problem, 2 for wrong usage. ``diff`` and ``prove-resume`` use diff(1)'s: 0 if both
are the same, 1 if they differ, 2 for trouble. Problems are printed to stderr as a message, without a traceback.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from lightning_shardckpt.consolidate import command_parser, run_command
from lightning_shardckpt.system.text import progress
from lightning_shardckpt.tools.command_line import PROGRAM, Command, add_storage_options, execute
from lightning_shardckpt.tools.prove_resume import DEFAULT_STEPS, DEFAULT_TIMEOUT_S


def main(arguments: Sequence[str]) -> int:
    """Run one tool with command-line arguments, print its report, and return the exit status."""

    def parse() -> Command:
        parsed = _parser().parse_args(list(arguments))
        tool = parsed.subcommand
        return Command(tool, _TOOLS[tool], parsed[tool], error_status=2 if tool in _COMPARING_TOOLS else 1)

    return execute(parse)


def _parser() -> ArgumentParser:
    description = (
        "Tools for sharded checkpoints. Only prove-resume runs user code: a training script. None needs a GPU."
    )
    parser = ArgumentParser(prog=PROGRAM, description=description)
    parser.add_argument("--version", action="version", version=_version_text(), help="print the version and exit")
    tools = parser.add_subcommands(title="tools")

    inspect = ArgumentParser(description="Shows the content of a checkpoint. Reads its indexes only.")
    inspect.add_argument("path", type=str, help="the checkpoint: a directory or a URL")
    _add_listing(inspect)
    add_storage_options(inspect)
    tools.add_subcommand("inspect", inspect, help="list the contents of a checkpoint")

    verify = ArgumentParser(description="Compares every byte of a checkpoint with the checksums of the save.")
    verify.add_argument("path", type=str, help="the checkpoint: a directory or a URL")
    verify.add_argument("--quick", action="store_true", help="structure and sizes only")
    verify.add_argument("--json", action="store_true", help="everything, for programs")
    add_storage_options(verify)
    tools.add_subcommand("verify", verify, help="check a checkpoint for damage")

    _add_digest(tools)
    _add_diff(tools)
    _add_map(tools)
    _add_prove_resume(tools)
    tools.add_subcommand("consolidate", command_parser(), help="export files for torch.load, safetensors, transformers")
    return parser


def _version_text() -> str:
    try:
        return f"lightning-shardckpt {version('lightning-shardckpt')}"
    except PackageNotFoundError:  # run from a source tree
        return "lightning-shardckpt is not installed, so its version is not known"


def _inspect(arguments: Namespace) -> int:
    from lightning_shardckpt.tools.inspect import inspect, render  # each tool imports what it needs

    path, tensors = arguments.path, arguments.tensors
    report = inspect(path, tensors, storage_options=arguments.storage_options)
    _print(report, arguments.json, lambda: render(report, arguments.all or tensors is not None))
    return 0


def _print(report: dict[str, Any], as_json: bool, text: Callable[[], str]) -> None:
    print(json.dumps(report, indent=2, ensure_ascii=False) if as_json else text())


def _verify(arguments: Namespace) -> int:
    from lightning_shardckpt.tools.verify import render, verify

    path, quick, storage_options = arguments.path, arguments.quick, arguments.storage_options
    with progress() as bar:
        report = verify(path, quick=quick, advance=bar, expect=bar.expect, storage_options=storage_options)
    _print(asdict(report), arguments.json, lambda: render(report, path, quick=quick))
    return int(bool(report.findings))


def _add_diff(tools: Any) -> None:
    diff = ArgumentParser(
        description="Compares two checkpoints, which may have different topologies. Exit status: 0 if all tensors are "
        "the same, 1 if some differ, 2 for trouble."
    )
    diff.add_argument("a", type=str, help="a checkpoint: a directory or a URL")
    diff.add_argument("b", type=str, help="another one")
    _add_listing(diff)
    add_storage_options(diff)
    tools.add_subcommand("diff", diff, help="list the differences of two checkpoints")


def _add_map(tools: Any) -> None:
    page = ArgumentParser(description="Draws which rank has which slice of every tensor, as one page for a browser.")
    page.add_argument("path", type=str, help="the checkpoint: a directory or a URL")
    page.add_argument("-o", "--output", type=str, required=True, help="the page to write, such as map.html")
    add_storage_options(page)
    tools.add_subcommand("map", page, help="draw which rank has which slices")


def _add_listing(parser: ArgumentParser) -> None:
    parser.add_argument("--tensors", type=str, metavar="PATTERN", help="only tensors whose name has this")
    parser.add_argument("--all", action="store_true", help="long tables in full")
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def _add_digest(tools: Any) -> None:
    digest = ArgumentParser(
        description="Prints digests of tensors, of components and of the whole, which are the same on every topology "
        "and in every format."
    )
    digest.add_argument("path", type=str, help="the checkpoint, of any format that is read, or a URL")
    naming, naming_help = Literal["stored", "huggingface"], "huggingface: the model as an export names and splits it"
    digest.add_argument("--names", type=naming, default="stored", help=naming_help)
    _add_listing(digest)
    add_storage_options(digest)
    tools.add_subcommand("digest", digest, help="print digests, which are equal for equal contents")


def _digest(arguments: Namespace) -> int:
    from lightning_shardckpt.tools.digest import digest, render

    options = {"tensors": arguments.tensors, "names": arguments.names}
    options["storage_options"] = arguments.storage_options
    with progress() as bar:
        report = digest(arguments.path, **options, advance=bar, expect=bar.expect)
    _print(report, arguments.json, lambda: render(report, arguments.all))
    return 0


def _add_prove_resume(tools: Any) -> None:
    prove = ArgumentParser(
        description="Runs a training straight, and interrupted and resumed, and names the first thing that differs. "
        "Exit status: 0 if nothing differs, 1 if something does, 2 if the runs fail or can't be compared."
    )
    script = "after --: a training script and its arguments, or a program that starts one, such as torchrun"
    prove.add_argument("command", type=str, nargs="+", help=script)
    prove.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="batches of training, over epochs")
    interrupt_help = "the batch after which the run is saved and interrupted; by default half of --steps"
    prove.add_argument("--interrupt_at", type=int | None, help=interrupt_help)
    resumed_help = "in quotes: more arguments for the resumed run, such as '--trainer.devices=1'"
    prove.add_argument("--resumed_args", type=str, default="", metavar="ARGUMENTS", help=resumed_help)
    tolerance_help = "relative; by default bits are compared, and on another topology values within 1e-4"
    prove.add_argument("--tolerance", type=float | None, help=tolerance_help)
    ignore_help = "values to leave out of the comparison, such as 'callbacks/Timer*'"
    prove.add_argument("--ignore", type=str, nargs="+", default=[], metavar="SECTION/NAME", help=ignore_help)
    output_help = (
        "a new folder for records, outputs and the checkpoint; by default a temporary one, kept if the runs differ"
    )
    prove.add_argument("-o", "--output", type=str | None, help=output_help)
    prove.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds for each of the three runs")
    prove.add_argument("--json", action="store_true", help="everything, for programs")
    tools.add_subcommand("prove-resume", prove, help="check that a resumed training equals an uninterrupted one")


def _diff(arguments: Namespace) -> int:
    from lightning_shardckpt.tools.diff import diff, is_same, render

    options = {"tensors": arguments.tensors, "storage_options": arguments.storage_options}
    with progress() as bar:
        report = diff(arguments.a, arguments.b, **options, advance=bar, expect=bar.expect)
    _print(report, arguments.json, lambda: render(report, arguments.all))
    return int(not is_same(report))


def _map(arguments: Namespace) -> int:
    from lightning_shardckpt.tools.map import write_map

    page = write_map(arguments.path, arguments.output, storage_options=arguments.storage_options)
    print(f"{page} shows {arguments.path}: open it in a browser")
    return 0


def _prove_resume(arguments: Namespace) -> int:
    from lightning_shardckpt.tools.prove_resume import prove_resume

    report = prove_resume(
        arguments.command,
        steps=arguments.steps,
        interrupt_at=arguments.interrupt_at,
        resumed_args=shlex.split(arguments.resumed_args),
        tolerance=arguments.tolerance,
        ignore=arguments.ignore,
        output=arguments.output,
        timeout_s=arguments.timeout,
    )
    _print(asdict(report), arguments.json, lambda: str(report))
    return report.status


_COMPARING_TOOLS = ("diff", "prove-resume")
"""Tools whose exit status 1 is a result; a problem has status 2."""

_TOOLS: dict[str, Callable[[Namespace], int]] = {
    "inspect": _inspect,
    "verify": _verify,
    "digest": _digest,
    "diff": _diff,
    "map": _map,
    "prove-resume": _prove_resume,
    "consolidate": run_command,
}
