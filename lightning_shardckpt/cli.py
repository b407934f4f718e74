"""``python -m lightning_shardckpt {inspect,verify,diff,explain,map,consolidate} …``: the tools on the command line.

Exit status: 0, 1 for a problem, 2 for wrong usage; of ``diff`` 0 for the same, 1 for different, 2 for trouble, as of
diff(1). Problems go to stderr as a message, without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.export.options import Format, OptimizerKeys, Split, make_options
from lightning_shardckpt.storage.places import is_url
from lightning_shardckpt.text import count_text, progress, size_text

_PROG = "python -m lightning_shardckpt"


def run(argv: Sequence[str]) -> NoReturn:
    """Run one tool as this process."""
    signal.signal(signal.SIGTERM, _terminated)  # so that what is unfinished is removed
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have what a terminal does not
    sys.exit(main(argv))


def main(argv: Sequence[str]) -> int:
    """Run one tool; returns the exit status. Exits by itself for wrong usage and for help."""
    parsed = _parser().parse_args(list(argv))
    tool = parsed.subcommand
    arguments: Namespace = parsed[tool]
    try:
        status = _TOOLS[tool](arguments)
        if sys.stdout is not None:  # it may have been closed by who started this
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # such as `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered would fail at exit
        return 1
    except (ShardCkptError, OSError, ValueError) as error:
        return _failed(tool, str(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # those of the libraries behind a URL are of their own classes
        if not any(isinstance(value, str) and is_url(value) for value in vars(arguments).values()):
            raise
        return _failed(tool, f"{type(error).__name__}: {error}")


def _failed(tool: str, why: str) -> int:
    print(f"{_PROG} {tool}: {why}", file=sys.stderr)
    return 2 if tool == "diff" else 1


def _terminated(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog=_PROG, description="Tools for sharded checkpoints. None needs a GPU or user code.")
    tools = parser.add_subcommands(title="tools")

    inspect = ArgumentParser(description="Shows what is in a checkpoint. Reads its indexes only.")
    inspect.add_argument("path", type=str, help="the checkpoint: a directory or a URL")
    inspect.add_argument("--json", action="store_true", help="everything, for programs")
    inspect.add_argument("--tensors", type=str, metavar="PATTERN", help="only tensors whose name has this")
    inspect.add_argument("--all", action="store_true", help="long tables in full")
    inspect.add_argument("--tree", action="store_true", help="the modules with their sizes; layers that repeat, once")
    inspect.add_argument("--ranks", action="store_true", help="who has what; with --tensors, every box of these")
    _add_storage_options(inspect)
    tools.add_subcommand("inspect", inspect, help="what is in a checkpoint")

    verify = ArgumentParser(description="Compares every byte of a checkpoint with what was saved.")
    verify.add_argument("path", type=str, help="the checkpoint: a directory or a URL")
    verify.add_argument("--quick", action="store_true", help="structure and sizes only")
    _add_storage_options(verify)
    tools.add_subcommand("verify", verify, help="whether a checkpoint is whole")

    _add_diff(tools)
    _add_explain(tools)
    _add_map(tools)
    tools.add_subcommand("consolidate", _consolidate_parser(), help="files for torch.load, safetensors, transformers")
    return parser


def _consolidate_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Converts a checkpoint to a single file that `torch.load()` reads, or to files of safetensors."
    )
    add = parser.add_argument
    add("checkpoint_folder", type=str, help="the checkpoint: a directory or a URL")
    default = "by default the name of the checkpoint with '.consolidated' appended"
    add("--output_file", type=str, help=f"file, directory or URL, must not exist yet; {default}")
    add("--overwrite", action="store_true", help="replace what an earlier run wrote there, at once")
    known = "for torch.load; whole tensors; a directory for transformers' from_pretrained, or PEFT's, of adapters"
    add("--format", type=Format, default="torch", help=known)
    add("--split", type=Split | None, help="of safetensors; chunks have an index; huggingface: chunks, else one_file")
    add("--size_per_shard", type=float | None, metavar="MB", help="limit of a chunk; 5000 by default")
    add("--optimizer", type=bool | None, help="whether to write optimizers; by default with torch alone")
    add("--dtype", type=str, help="float64, float32, float16 or bfloat16: of all floating tensors of the model")
    add("--include", action="append", type=str, metavar="PATTERN", help="take only such names; repeatable")
    add("--exclude", action="append", type=str, metavar="PATTERN", help="leave such names out; repeatable")
    mapping = "a file of JSON or YAML, old name: new name, or REGEX=REPLACEMENT; repeatable, the first that fits counts"
    add("--key_mapping", action="append", type=str, metavar="FILE|RULE", help=mapping)
    add("--strip_prefix", type=str, help="take this from names that begin so; for huggingface, which of several models")
    add("--add_prefix", type=str, help="put this before every name")
    add("--optimizer_keys", type=OptimizerKeys, default="fqn", help="parameters by name, or as torch numbers them")
    _add_storage_options(parser)
    return parser


def _add_storage_options(parser: ArgumentParser) -> None:
    known = "for URLs, as fsspec takes them: --storage_options.endpoint_url=http://…, or all as JSON or YAML"
    parser.add_argument("--storage_options", type=dict[str, Any] | None, metavar="OPTIONS", help=known)


def _inspect(arguments: Namespace) -> int:
    from lightning_shardckpt.look.inspect import show  # each tool imports what it needs

    what = {"tree": arguments.tree, "ranks": arguments.ranks, "storage_options": arguments.storage_options}
    print(show(arguments.path, arguments.tensors, arguments.all, arguments.json, **what))
    return 0


def _verify(arguments: Namespace) -> int:
    from lightning_shardckpt.verify import verify

    with progress() as advance:
        options = arguments.storage_options
        report = verify(arguments.path, quick=arguments.quick, advance=advance, storage_options=options)
    for finding in report.findings:
        print(finding)
    looked_at = f"{count_text(report.files, 'file')}, {size_text(report.nbytes)} of shards"
    if report.findings:
        print(f"{count_text(len(report.findings), 'problem')} in {arguments.path} ({looked_at})")
        return 1
    print(f"{arguments.path} is {'complete' if arguments.quick else 'whole'}: {looked_at}")
    return 0


def _consolidate(arguments: Namespace) -> int:
    from lightning_shardckpt.consolidate import consolidate_as

    given = {name: value for name, value in arguments.items() if value is not None}
    folder, output = given.pop("checkpoint_folder"), given.pop("output_file", None)
    storage_options = given.pop("storage_options", None)
    try:
        options = make_options(**given)
    except ValueError as error:
        _consolidate_parser().error(str(error))  # ends the process with status 2
    consolidate_as(folder, output, options, storage_options)
    return 0


# ── looking inside ────────────────────────────────────────────────────────────────────────────────────────────────


def _add_diff(tools: Any) -> None:
    diff = ArgumentParser(
        description="Compares two checkpoints, which may have different topologies. Exit status: 0 if all tensors are "
        "the same, 1 if some differ, 2 for trouble."
    )
    diff.add_argument("a", type=str, help="a checkpoint: a directory or a URL")
    diff.add_argument("b", type=str, help="another one")
    diff.add_argument("--tensors", type=str, metavar="PATTERN", help="only tensors whose name has this")
    diff.add_argument("--quick", action="store_true", help="compare checksums instead of tensors, where both cut alike")
    diff.add_argument("--all", action="store_true", help="long tables in full")
    diff.add_argument("--json", action="store_true", help="everything, for programs")
    _add_storage_options(diff)
    tools.add_subcommand("diff", diff, help="what has changed between two checkpoints")


def _add_explain(tools: Any) -> None:
    explain = ArgumentParser(description="Tells what a resume on another topology would read. Reads indexes only.")
    explain.add_argument("path", type=str, help="the checkpoint: a directory or a URL")
    _add_onto(explain, required=True)
    explain.add_argument("--all", action="store_true", help="every rank")
    explain.add_argument("--json", action="store_true", help="everything, for programs")
    _add_storage_options(explain)
    tools.add_subcommand("explain", explain, help="what a resume on another topology would read")


def _add_map(tools: Any) -> None:
    page = ArgumentParser(description="Draws which rank has which slice of every tensor, as one page for a browser.")
    page.add_argument("path", type=str, help="the checkpoint: a directory or a URL")
    page.add_argument("-o", "--output", type=str, required=True, help="the page to write, such as map.html")
    _add_onto(page, required=False)
    _add_storage_options(page)
    tools.add_subcommand("map", page, help="a picture of which rank has what")


def _add_onto(parser: ArgumentParser, *, required: bool) -> None:
    parser.add_argument("--onto", type=str, required=required, metavar="TOPOLOGY", help="such as tp=4,fsdp=2,pp=2,dp=1")
    rules = "what tensor parallelism cuts, such as 'layers.*.up=colwise'; by default what it cut when this was saved"
    parser.add_argument("--tp-plan", type=str, nargs="+", default=[], metavar="RULE", help=rules)
    names = "the layers of a pipeline, such as 'net.layers.*'; by default the largest numbered list"
    parser.add_argument("--layers", type=str, nargs="+", default=[], metavar="PATTERN", help=names)


def _diff(arguments: Namespace) -> int:
    from lightning_shardckpt.look.diff import diff, is_same, shown

    options = {"tensors": arguments.tensors, "quick": arguments.quick, "storage_options": arguments.storage_options}
    with progress() as advance:
        found = diff(arguments.a, arguments.b, **options, advance=advance)
    print(shown(found, arguments.all, arguments.json))
    same = is_same(found)
    return 2 if same is None else int(not same)


def _explain(arguments: Namespace) -> int:
    from lightning_shardckpt.look.explain import show

    rules, names = arguments.tp_plan, arguments.layers
    options = arguments.storage_options
    print(show(arguments.path, arguments.onto, rules, names, arguments.all, arguments.json, storage_options=options))
    return 0


def _map(arguments: Namespace) -> int:
    from lightning_shardckpt.look.map import write_map

    options = {"onto": arguments.onto, "tp_plan": arguments.tp_plan, "layers": arguments.layers}
    options["storage_options"] = arguments.storage_options
    print(f"{write_map(arguments.path, arguments.output, **options)} shows {arguments.path}: open it in a browser")
    return 0


_TOOLS: dict[str, Callable[[Namespace], int]] = {
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "explain": _explain,
    "map": _map,
    "consolidate": _consolidate,
}
