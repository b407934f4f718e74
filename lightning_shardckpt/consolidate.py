"""Convert a sharded checkpoint to files that other programs read: ``python -m lightning_shardckpt.consolidate DIR``.

By default one file for ``torch.load``, with the same arguments, messages and exit codes as Lightning's
``lightning.pytorch.utilities.consolidate_checkpoint``. The file has Lightning's keys with whole tensors; it loads with
``torch.load``'s defaults, so it holds no type that carries code. Else files of safetensors, or
a directory for transformers. Memory does not grow with the checkpoint. No GPU, process group, user code or unpickling.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.export.options import Format, Options, Split
from lightning_shardckpt.export.peft_export import export_adapters
from lightning_shardckpt.export.safetensors_export import (
    ExportSource,
    ShardedCheckpoint,
    file_nbytes,
    is_replaceable,
    nbytes,
    plan_export,
    write_directory,
    write_file,
)
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.sources.detect import recognise
from lightning_shardckpt.sources.did_you_mean import READABLE, describe, did_you_mean
from lightning_shardckpt.sources.key_mapping import KeyMappingLike
from lightning_shardckpt.storage.protocol import Contents, Outputs
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.system.text import progress
from lightning_shardckpt.system.threads import drain_all
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.tools.command_line import PROGRAM, Command, add_storage_options, execute, run_process
from lightning_shardckpt.transfer.reader import Checkpoint

_log = logging.getLogger(__name__)
_LISTED = 10
_PLACES = ("checkpoint_folder", "output_file", "storage_options")


def consolidate(
    checkpoint_folder: str | os.PathLike[str],
    output_file: str | os.PathLike[str] | None = None,
    *,
    format: Format = "torch",
    split: Split | None = None,
    size_per_shard: float | None = None,
    optimizer: bool | None = None,
    dtype: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    key_mapping: KeyMappingLike | None = None,
    strip_prefix: str | None = None,
    add_prefix: str | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    tuning: Tuning = TUNING,
) -> Path | str:
    """Write the checkpoint in a folder for other programs, and return the path of the file or directory; or its URL.

    It appears when it is complete and durable; an error leaves nothing there. Waits for the asynchronous saves of this
    process.

    Args:
        checkpoint_folder: a checkpoint of this package, which may be a URL, of Lightning's FSDPStrategy or
            ModelParallelStrategy, or another one of torch.distributed.checkpoint.
        output_file: a path or a URL, to which is uploaded from memory. By default, here, the folder's name with
            ``.consolidated`` appended, and ``.safetensors`` for such a file.
        format: "torch", one file for ``torch.load``; "safetensors", whole tensors, of the model or the optimizers too;
            "huggingface", a directory for ``from_pretrained``, if the module that was saved has such a model; "peft",
            one for ``PeftModel.from_pretrained``, of the adapters alone, see ``export_adapters``.
        split: "one_file", "one_file_per_tensor" or "chunks", several files with an index. For transformers "chunks",
            which are one file if all fits; else "one_file".
        size_per_shard: limit of a chunk in MB (2^20 bytes), 5,000 by default; a larger tensor is a file of its own.
        optimizer: whether optimizers are in the output; by default for torch alone. With safetensors, the rest
            of their state goes to ``optimizer.json``.
        dtype: "float64", "float32", "float16" or "bfloat16", for all floating-point tensors of the model.
        include: patterns (``*``, ``?``, ``[…]``); only tensors whose name matches one are taken.
        exclude: patterns of names that are not taken.
        key_mapping: from stored names to new ones: a dict of whole names or regular expressions to new names (None
            leaves a tensor out), or a function; or texts, each ``OLD=NEW`` or the path of a file of JSON or YAML with a
            dict, or the import path of a function. See "Rename tensors" in the documentation.
        strip_prefix: taken away from names that begin with it; for "huggingface", says which of several models.
        add_prefix: put before all names.
        overwrite: replace what an earlier call wrote there; at every moment the path has the old or the new. But a
            directory at a URL is deleted first, so that the two are never mixed.
        storage_options: for URLs, passed to ``fsspec.filesystem``, such as ``endpoint_url``, ``key`` and ``secret``.
        tuning: sizes of reads, and how many threads.

    Raises:
        ValueError: for options that do not go together, names that collide, patterns that match nothing, or an output
            inside a checkpoint.
        CheckpointNotFoundError: if the folder is no checkpoint; names what it is.
        FileExistsError: if the output exists.
        CorruptionError: naming file, tensor and rank of corrupted data.
    """
    options = Options(
        format=format,
        split=split,
        size_per_shard=size_per_shard,
        optimizer=optimizer,
        dtype=dtype,
        include=include,
        exclude=exclude,
        key_mapping=key_mapping,
        strip_prefix=strip_prefix,
        add_prefix=add_prefix,
        overwrite=overwrite,
    )
    drain_all()
    try:
        return _write(checkpoint_folder, output_file, options, storage_options, tuning)
    except FileExistsError as error:
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1:
            error.add_note("If all ranks call this, let one of them: it needs no other rank.")
        raise


def _write(
    checkpoint_folder: str | os.PathLike[str],
    output_file: str | os.PathLike[str] | None,
    options: Options,
    storage_options: Mapping[str, Any] | None,
    tuning: Tuning,
) -> Path | str:
    storage = StorageRouter(storage_options=storage_options)
    where = file_path(checkpoint_folder)
    folder = Path.cwd() / (where.rstrip("/").rpartition("/")[2] if is_url(where) else where)
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    where = where if is_url(where) else str(folder)
    suffix = ".consolidated" + (".safetensors" if options.is_file and options.format == "safetensors" else "")
    output = str(folder.with_name(folder.name + suffix)) if output_file is None else file_path(output_file)
    if not output:
        raise ValueError("the path for the converted checkpoint is empty")
    outputs = storage.outputs(output)
    if output_file is not None and _is_inside_a_checkpoint(outputs, output):
        raise ValueError(f"{output!r} lies inside a checkpoint: choose a path somewhere else")
    source = None if is_url(where) else folder
    if (folder / ROOT_NAME).exists():  # else the error about the folder comes first
        _check_output(outputs, output, source, options)
    if options.format == "peft":
        export_adapters(where, output, storage_options=storage_options)
        return output if is_url(output) else Path(output)
    with ExitStack() as stack:
        stored = stack.enter_context(_open(storage, where, checkpoint_folder))
        _check_output(outputs, output, source, options)
        write = _write_torch if options.format == "torch" else _export
        write(stored, outputs, output, options, tuning)
        _tell_left_out(where, stored)
    return output if is_url(output) else Path(output)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _open(storage: StorageRouter, where: str, given: str | os.PathLike[str]) -> Iterator[ExportSource]:
    """Open the checkpoint in a folder or at a URL; without torch if it is one of ours."""
    if is_url(where) or not os.path.isdir(where) or recognise(where) is None:
        try:
            checkpoint = Checkpoint(storage, where)
        except CheckpointNotFoundError:
            if is_url(where):
                raise
            raise CheckpointNotFoundError(_what_is_wrong(Path(given))) from None
        with checkpoint:
            yield ShardedCheckpoint(checkpoint)
        return
    from lightning_shardckpt.distributed.ranks import Ranks
    from lightning_shardckpt.sources.open_source import opened  # torch

    with opened(where, ranks=Ranks.alone(), storage=storage) as source:
        yield source


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_inside_a_checkpoint(outputs: Outputs, output: str) -> bool:
    parent = os.path.dirname(output.rstrip("/") if is_url(output) else os.path.abspath(output))
    is_bucket = is_url(output) and parent.endswith(":/")  # a bucket has no parent
    return not is_bucket and outputs.kind(f"{parent}/{ROOT_NAME}") is not None


def _check_output(outputs: Outputs, output: str, source: Path | None, options: Options) -> None:
    """Check that an output may be written there; ``source``: the directory that is read, if it is one."""
    there = outputs.kind(output)
    if there is None:
        return
    if not options.overwrite:
        raise FileExistsError(
            "The path for the converted checkpoint already exists. Choose a different path by providing"
            f" `--output_file` or move/delete the file first: {output}"
        )
    if there == "file" and options.is_file:
        return
    is_itself = not is_url(output) and source is not None and source.exists() and source.samefile(output)
    if options.is_file or is_itself or there != "directory" or not is_replaceable(outputs.contents(output)):
        what = "a file" if options.is_file else "a directory of an earlier export"
        raise FileExistsError(f"{output} is not {what}, so it is not replaced; choose a different path")


def _write_torch(stored: ExportSource, outputs: Outputs, output: str, options: Options, tuning: Tuning) -> None:
    from lightning_shardckpt.export.torch_export import plan_torch, write_torch  # torch

    planned = plan_torch(stored, options)
    opened = outputs.file(output, planned.file_nbytes, overwrite=options.overwrite)
    with opened as (file, notes), progress(planned.nbytes) as advance:
        write_torch(stored, planned, file, advance, tuning=tuning)
    _tell(planned.changed)
    for note in notes:
        _log.warning(note)


def _export(stored: ExportSource, outputs: Outputs, output: str, options: Options, tuning: Tuning) -> None:
    export = plan_export(stored, options)

    def may_go(contents: Contents) -> bool:
        return options.overwrite and is_replaceable(contents)

    with ExitStack() as stack:
        advance = stack.enter_context(progress(nbytes(export)))
        if options.is_file:
            opened = outputs.file(output, file_nbytes(export), overwrite=options.overwrite)
            file, notes = stack.enter_context(opened)
            write_file(stored, export, file, advance, tuning=tuning)
        else:
            new, notes = stack.enter_context(outputs.directory(output, replaceable=may_go))
            write_directory(stored, export, new, advance, tuning=tuning)
    for note in (*export.notes, *notes):
        _log.warning(note)


def _what_is_wrong(folder: Path) -> str:
    """Say why a folder is no checkpoint of ours: Lightning's sentence, and a hint."""
    said, hint = describe(folder), did_you_mean(folder, READABLE)
    if not folder.exists():
        return f"The provided checkpoint folder does not exist: {folder}{hint}"
    if not folder.is_dir():
        sentence = "The provided checkpoint path must be a folder, containing the checkpoint shards"
        return f"{sentence}: {folder}; {said}{hint}"
    return (
        "Only sharded checkpoints saved with lightning-shardckpt or torch.distributed.checkpoint are supported for"
        f" consolidation. The provided folder is not in that format: {folder}; {said or f'it has no {ROOT_NAME}'}{hint}"
    )


def _tell_left_out(where: str, stored: ExportSource) -> None:
    if left_out := stored.document("frozen"):
        _log.warning(
            f"{where} was saved with adapters_only=True: {len(left_out)} frozen parameters are not in the output. "
            "`load_state_dict` needs strict=False for it; --format peft makes a folder that PEFT loads."
        )


def _tell(changed: list[str]) -> None:
    if changed:
        more = [f"… and {len(changed) - _LISTED} more"] if len(changed) > _LISTED else []
        listed = "\n  ".join(changed[:_LISTED] + more)
        _log.warning(f"Values that `torch.load` would refuse by default are not in the file as they were:\n  {listed}")


# ── the command line ──────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str]) -> int:
    """Run the tool with the arguments of a command line and return the exit status."""
    return execute(lambda: Command("consolidate", run_command, command_parser().parse_args(list(arguments))))


def run_command(arguments: Namespace) -> int:
    """Run the tool with parsed arguments and return the exit status; wrong usage ends in SystemExit."""
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        Options(**{name: value for name, value in given.items() if name not in _PLACES})
    except ValueError as error:
        command_parser().error(str(error))
    consolidate(**given)
    return 0


def command_parser() -> ArgumentParser:
    """Return the parser of the tool's command line."""
    parser = ArgumentParser(
        prog=f"{PROGRAM}.consolidate",
        description="Converts a checkpoint to a single file that `torch.load()` reads, or to files of safetensors.",
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
    mapping = "OLD=NEW, a stored name or regular expression and its new name, or a JSON or YAML file; repeatable"
    add("--key_mapping", action="append", type=str, metavar="OLD=NEW|FILE", help=mapping)
    add("--strip_prefix", type=str, help="take this from names that begin so; for huggingface, which of several models")
    add("--add_prefix", type=str, help="put this before every name")
    add_storage_options(parser)
    return parser


if __name__ == "__main__":
    run_process(main, sys.argv[1:])
