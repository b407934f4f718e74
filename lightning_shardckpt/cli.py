"""The command line of the tools: ``shardckpt TOOL …``, or ``python -m lightning_shardckpt TOOL …``.

Exit status: 0 for success, 1 for a problem, 2 for wrong usage. ``diff`` and ``prove-resume`` use diff(1)'s: 0 if both
are the same, 1 if they differ, 2 for trouble. Problems are printed to stderr as a message, without a traceback.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_shardckpt.consolidate import command_parser, run_command
from lightning_shardckpt.system.text import count_text, progress
from lightning_shardckpt.tools.command_line import PROGRAM, Command, add_storage_options, execute, run_process

_COMPARING_TOOLS = ("diff", "prove-resume")
"""Tools whose exit status 1 is a result; a problem has status 2."""


def console() -> NoReturn:
    """Run the console script ``shardckpt``."""
    run_process(main, sys.argv[1:])


def main(arguments: Sequence[str]) -> int:
    """Run one tool with command-line arguments, print its report, and return the exit status."""

    def parse() -> Command:
        parsed = _parser().parse_args(list(arguments))
        tool: str = parsed.subcommand
        error_status = 2 if tool in _COMPARING_TOOLS else 1
        return Command(tool, _TOOLS[tool], parsed[tool], error_status=error_status)

    return execute(parse)


def _parser() -> ArgumentParser:
    description = "Tools for sharded checkpoints. Only prove-resume and follow run user code. None needs a GPU."
    parser = ArgumentParser(prog=PROGRAM, description=description)
    parser.add_argument("--version", action="version", version=_version_text(), help="print the version and exit")
    tools = parser.add_subcommands(title="tools")

    def add(tool: str, help: str, description: str, *, json: bool = True, urls: bool = True) -> Callable[..., Any]:
        own = ArgumentParser(description=description)
        if json:
            own.add_argument("--json", action="store_true", help="print everything, for programs")
        if urls:
            add_storage_options(own)
        tools.add_subcommand(tool, own, help=help)
        return own.add_argument

    path = {"type": str, "help": "the checkpoint: a directory or a URL"}
    names = "only tensors whose name matches this or has it, all of them: '*' lists long tables in full"
    tensors = {"type": str, "metavar": "PATTERN", "help": names}

    inspect = add(
        "inspect", "list the contents of a checkpoint", "Shows the content of a checkpoint. Reads its indexes only."
    )
    inspect("path", **path)
    inspect("--tensors", **tensors)

    about = "Compares every byte of a checkpoint with the checksums of the save."
    verify = add("verify", "check a checkpoint for damage", about)
    verify("path", **path)
    verify("--quick", action="store_true", help="structure and sizes only")

    about = "Prints digests of tensors, of components and of the whole, equal on every topology and in every format."
    digest = add("digest", "print digests, which are equal for equal contents", about)
    digest("path", type=str, help="the checkpoint, of any format that is read, or a URL")
    naming = "huggingface: the model as an export names and splits it"
    digest("--names", type=Literal["stored", "huggingface"], default="stored", help=naming)
    digest("--tensors", **tensors)

    about = (
        "Compares two checkpoints, which may have different topologies. Exit status: 0 if all tensors are the same, 1 "
        "if some differ, 2 for trouble."
    )
    diff = add("diff", "list the differences of two checkpoints", about)
    diff("a", **path)
    diff("b", type=str, help="another one")
    diff("--tensors", **tensors)

    about = "Draws which rank has which slice of every tensor, as one page for a browser."
    page = add("map", "draw which rank has which slices", about, json=False)
    page("path", **path)
    page("-o", "--output", type=str, required=True, help="the page to write, such as map.html")

    about = "Writes the mean of models as a checkpoint. The inputs may have any topologies and formats."
    merge = add("merge", "average checkpoints", about, json=False)
    merge("paths", type=str, nargs="+", help="checkpoints or URLs; with --last, the folder of a run")
    merge("-o", "--output", type=str, required=True, help="the new checkpoint, or its URL")
    merge("--weights", type=str, help="one for each path, such as 0.5,0.3,0.2; by default all the same")
    merge("--last", type=int | None, metavar="K", help="merge the last K checkpoints of the run")
    merge("--overwrite", action="store_true", help="replace an existing checkpoint")

    about = (
        "Runs a training straight, and resumed from its middle, and names what differs at the end. Exit status: 0 if "
        "nothing differs, 1 if something does, 2 if a run fails."
    )
    prove = add("prove-resume", "check that a resumed training equals an uninterrupted one", about, urls=False)
    script = "after --: a training script and its arguments, or a program that starts one, such as torchrun"
    prove("command", type=str, nargs="+", help=script)
    prove("--steps", type=int, default=8, help="batches of training; half of them before the checkpoint")
    more = "in quotes: more arguments for the resumed run, such as '--trainer.devices=1'"
    prove("--resumed_args", type=str, default="", metavar="ARGUMENTS", help=more)
    output = "a new folder for outputs and checkpoints; by default a temporary one, kept if the runs differ"
    prove("-o", "--output", type=str | None, help=output)

    about = (
        "Runs a command for each complete checkpoint of a training, while it goes on, and records the results in "
        "evaluations.jsonl beside the checkpoints. Exit status: 0, or 1 if a command failed."
    )
    following = add("follow", "run a command for each checkpoint of a running training", about, json=False)
    following("run_dir", type=str, help="the folder in which the training saves, or its URL")
    placeholder = "after --: a program and its arguments, in which {} becomes the path of the checkpoint"
    following("command", type=str, nargs="+", help=placeholder)
    following("--newest", action="store_true", help="skip all but the newest of the checkpoints that wait")
    following("--once", action="store_true", help="don't wait for more checkpoints")
    interval = "between two looks for checkpoints; by default 5, for URLs 30"
    following("--interval", type=float | None, metavar="SECONDS", help=interval)

    tools.add_subcommand("consolidate", command_parser(), help="export files for torch.load, safetensors, transformers")
    return parser


def _version_text() -> str:
    try:
        return f"lightning-shardckpt {version('lightning-shardckpt')}"
    except PackageNotFoundError:  # run from a source tree
        return "lightning-shardckpt is not installed, so its version is not known"


def _print(report: Any, options: Namespace, text: Callable[[], str]) -> None:
    print(json.dumps(report, indent=2, ensure_ascii=False) if options.json else text())


# ── tools: each imports what it needs ─────────────────────────────────────────────────────────────────────────────


def _inspect(options: Namespace) -> int:
    from lightning_shardckpt.tools.inspect import inspect, render

    report = inspect(options.path, options.tensors, storage_options=options.storage_options)
    _print(report, options, lambda: render(report, options.tensors is not None))
    return 0


def _verify(options: Namespace) -> int:
    from lightning_shardckpt.tools.verify import render, verify

    path, quick = options.path, options.quick
    with progress() as (advance, expect):
        report = verify(path, quick=quick, advance=advance, expect=expect, storage_options=options.storage_options)
    _print(asdict(report), options, lambda: render(report, path, quick=quick))
    return int(bool(report.findings))


def _digest(options: Namespace) -> int:
    from lightning_shardckpt.tools.digest import digest, render

    about = {name: options[name] for name in ("tensors", "names", "storage_options")}
    with progress() as (advance, expect):
        report = digest(options.path, **about, advance=advance, expect=expect)
    _print(report, options, lambda: render(report, options.tensors is not None))
    return 0


def _diff(options: Namespace) -> int:
    from lightning_shardckpt.tools.diff import diff, is_same, render

    about = {name: options[name] for name in ("tensors", "storage_options")}
    with progress() as (advance, expect):
        report = diff(options.a, options.b, **about, advance=advance, expect=expect)
    _print(report, options, lambda: render(report, options.tensors is not None))
    return int(not is_same(report))


def _map(options: Namespace) -> int:
    from lightning_shardckpt.tools.map import write_map

    page = write_map(options.path, options.output, storage_options=options.storage_options)
    print(f"{page} shows {options.path}: open it in a browser")
    return 0


def _merge(options: Namespace) -> int:
    from lightning_shardckpt.merging import last_checkpoints, merge

    kept = {name: options[name] for name in ("overwrite", "storage_options")}
    paths, weights = options.paths, options.weights and [float(text) for text in options.weights.split(",")]
    if options.last is not None:
        if len(paths) != 1:
            raise ValueError(f"--last takes the folder of one run, got {len(paths)} paths")
        paths = last_checkpoints(paths[0], options.last, storage_options=options.storage_options)
    with progress() as (advance, expect):
        others = merge(paths, options.output, weights=weights, **kept, advance=advance, expect=expect)
    taken = f"; {count_text(len(others), 'tensor')} of integers or bools as in the first" if others else ""
    print(f"{options.output} is the mean of {', '.join(paths)}{taken}")
    return 0


def _prove_resume(options: Namespace) -> int:
    from lightning_shardckpt.tools.prove_resume import prove_resume

    resumed_args = shlex.split(options.resumed_args)
    report = prove_resume(options.command, steps=options.steps, resumed_args=resumed_args, output=options.output)
    _print(asdict(report), options, lambda: str(report))
    return int(not report.equal)


def _follow(options: Namespace) -> int:
    from lightning_shardckpt.tools.follow import follow

    about = {name: options[name] for name in ("newest", "once", "storage_options")}
    return int(follow(options.run_dir, options.command, interval_s=options.interval, **about) > 0)


_TOOLS: dict[str, Callable[[Namespace], int]] = {
    "inspect": _inspect,
    "verify": _verify,
    "digest": _digest,
    "diff": _diff,
    "map": _map,
    "merge": _merge,
    "prove-resume": _prove_resume,
    "follow": _follow,
    "consolidate": run_command,
}
