"""The command line of the tools: ``shardckpt TOOL …``, or ``python -m lightning_shardckpt TOOL …``.

Exit status: 0 for success, 1 for a problem, 2 for wrong usage. ``diff`` and ``prove-resume`` use diff(1)'s: 0 if both
are the same, 1 if they differ, 2 for trouble. Problems are printed to stderr as a message, without a traceback.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from typing import Any, Literal, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.export.whole_files import Format, Split
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.system.text import count_text

PROGRAM = "python -m lightning_shardckpt"


def console(*arguments: str) -> NoReturn:
    """Run one tool with given arguments before those of the command line, and end this process with its exit status."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that unfinished files are removed
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have characters that the terminal can't encode
    sys.exit(main([*arguments, *sys.argv[1:]]))


def main(arguments: Sequence[str]) -> int:
    """Run one tool with command-line arguments, print its report, and return the exit status."""
    try:
        parsed = _parser().parse_args(list(arguments))
        return _status(parsed.subcommand, parsed[parsed.subcommand])
    except SystemExit as leaving:  # of the parser, for help and wrong usage
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1


def _status(tool: str, options: Namespace) -> int:
    try:
        status = _TOOLS[tool](options)
        if sys.stdout is not None:  # the parent process may have closed it
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # such as `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the buffer would fail at exit
        return 1
    except (ShardCkptError, OSError, ValueError, ImportError) as error:  # such as an unsupported torch
        message = str(error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the libraries that read URLs raise classes of their own
        if not any(isinstance(value, str) and is_url(value) for value in vars(options).values()):
            raise
        message = f"{type(error).__name__}: {error}"
    print(f"{PROGRAM} {tool}: {message}", file=sys.stderr)
    return 2 if tool in ("diff", "prove-resume") else 1  # whose exit status 1 is a result


def _parser() -> ArgumentParser:
    description = "Tools for sharded checkpoints. Only prove-resume and follow run user code. None needs a GPU."
    parser = ArgumentParser(prog=PROGRAM, description=description)
    parser.add_argument("--version", action="version", version=_version_text(), help="print the version and exit")
    tools = parser.add_subcommands(title="tools")

    def add(tool: str, about: str, *, json: bool = True, urls: bool = True) -> Callable[..., Any]:
        own = ArgumentParser(description=f"{about}.")
        if json:
            own.add_argument("--json", action="store_true", help="print everything, for programs")
        if urls:
            known = "for URLs, by fsspec's names: --storage_options.endpoint_url=http://…, or all as JSON or YAML"
            own.add_argument("--storage_options", type=dict[str, Any] | None, metavar="OPTIONS", help=known)
        tools.add_subcommand(tool, own, help=about)
        return own.add_argument

    path = {"type": str, "help": "the checkpoint: a directory or a URL"}
    tensors = {"type": str, "metavar": "PATTERN", "help": "only names that match or have this; '*' lists all rows"}

    inspect = add("inspect", "lists the contents of a checkpoint; reads its indexes only")
    inspect("path", **path)
    inspect("--tensors", **tensors)

    verify = add("verify", "compares every byte of a checkpoint with the checksums of the save")
    verify("path", **path)
    verify("--quick", action="store_true", help="structure and sizes only")

    digest = add("digest", "prints digests of tensors and of the whole, equal on every topology and in every format")
    digest("path", type=str, help="the checkpoint, of any format that is read, or a URL")
    digest("--names", type=Literal["stored", "huggingface"], default="stored", help="as stored, or as in an export")
    digest("--tensors", **tensors)

    diff = add("diff", "lists the differences of two checkpoints; exit status: 0 if all tensors are the same, 1 if not")
    diff("a", **path)
    diff("b", type=str, help="another one")
    diff("--tensors", **tensors)

    page = add("map", "draws which rank has which slice of every tensor, as a page for a browser", json=False)
    page("path", **path)
    page("-o", "--output", type=str, required=True, help="the page to write, such as map.html")

    merge = add("merge", "writes the mean of models, of any topologies and formats, as a checkpoint", json=False)
    merge("paths", type=str, nargs="+", help="checkpoints or URLs; with --last, the folder of a run")
    merge("-o", "--output", type=str, required=True, help="the new checkpoint, or its URL")
    merge("--weights", type=str, help="one for each path, such as 0.5,0.3,0.2; by default all the same")
    merge("--last", type=int | None, metavar="K", help="merge the last K checkpoints of the run")
    merge("--overwrite", action="store_true", help="replace an existing checkpoint")

    about = "runs a training straight, and resumed from its middle; exit status: 0 if the ends are the same, 1 if not"
    prove = add("prove-resume", about, urls=False)
    prove("command", type=str, nargs="+", help="after --: a training script, or a program that starts one")
    prove("--steps", type=int, default=8, help="batches of training; half of them before the checkpoint")
    prove("--resumed_args", type=str, default="", metavar="ARGUMENTS", help="in quotes: more, for the resumed run")
    prove("-o", "--output", type=str | None, help="a new folder, by default a temporary one, kept if the runs differ")

    following = add("follow", "runs a command for each checkpoint of a training while it goes on", json=False)
    following("run_dir", type=str, help="the folder in which the training saves, or its URL")
    following("command", type=str, nargs="+", help="after --: a program and its arguments; {} becomes the path")
    following("--newest", action="store_true", help="skip all but the newest of the checkpoints that wait")
    following("--once", action="store_true", help="don't wait for more checkpoints")
    following("--interval", dest="interval_s", type=float, default=10.0, metavar="SECONDS", help="between two looks")

    export = add("consolidate", "converts a checkpoint to a file for `torch.load()`, or to safetensors", json=False)
    export("checkpoint_folder", **path)
    export("--output_file", type=str, help="file or directory; by default the checkpoint's name with '.consolidated'")
    export("--overwrite", action="store_true", help="replace the output of an earlier run, atomically")
    formats = "for torch.load; whole tensors; a directory for transformers or PEFT; by default by the output's suffix"
    export("--format", type=Format | None, help=formats)
    export("--split", type=Split | None, help="of safetensors, one_file by default; chunks have an index")
    export("--size_per_shard", type=float | None, metavar="MB", help="limit of a chunk; 5000 by default")
    export("--optimizer", type=bool | None, help="include the optimizers; by default only with torch")
    export("--dtype", type=str, help="float64, float32, float16 or bfloat16, for all floating tensors of the model")
    mapping = "a stored name or regular expression and its new name, null to leave out; repeatable"
    export("--key_mapping", action="append", type=str, metavar="OLD=NEW", help=mapping)
    return parser


def _version_text() -> str:
    try:
        return f"lightning-shardckpt {version('lightning-shardckpt')}"
    except PackageNotFoundError:  # run from a source tree
        return "lightning-shardckpt is not installed, so its version is not known"


# ── tools: each is imported when it runs ──────────────────────────────────────────────────────────────────────────────


def _report(tool: str, is_problem: Callable[[Any], bool], options: Namespace) -> int:
    """Print the report of a tool, as text or as JSON; return 1 if it reports a problem."""
    module, given = import_module(f"lightning_shardckpt.tools.{tool}"), dict(options.items())
    as_json = given.pop("json")
    report = getattr(module, tool)(**given)
    if as_json:
        print(json.dumps(report if isinstance(report, dict) else asdict(report), indent=2, ensure_ascii=False))
    else:
        print(module.render(report, given["tensors"] is not None) if isinstance(report, dict) else report)
    return int(is_problem(report))


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
    others = merge(paths, options.output, weights=weights, **kept)
    taken = f"; {count_text(len(others), 'tensor')} of integers or bools as in the first" if others else ""
    print(f"{options.output} is the mean of {', '.join(paths)}{taken}")
    return 0


def _prove_resume(options: Namespace) -> int:
    options.resumed_args = shlex.split(options.resumed_args)
    return _report("prove_resume", lambda report: not report.equal, options)


def _follow(options: Namespace) -> int:
    from lightning_shardckpt.tools.follow import follow

    return int(follow(**dict(options.items())) > 0)


def _consolidate(options: Namespace) -> int:
    from lightning_shardckpt.export.consolidation import consolidate

    given = {name: value for name, value in options.items() if value is not None}
    given["key_mapping"] = KeyMapping.of_texts(given.get("key_mapping", ()))
    print(f"{consolidate(**given)} is written")
    return 0


_TOOLS: dict[str, Callable[[Namespace], int]] = {
    "inspect": partial(_report, "inspect", lambda report: False),
    "verify": partial(_report, "verify", lambda report: bool(report.findings)),
    "digest": partial(_report, "digest", lambda report: False),
    "diff": partial(_report, "diff", lambda report: bool(report["tensors"])),
    "map": _map,
    "merge": _merge,
    "prove-resume": _prove_resume,
    "follow": _follow,
    "consolidate": _consolidate,
}
