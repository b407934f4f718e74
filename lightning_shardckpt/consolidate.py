"""Convert a sharded checkpoint to files that other programs read: ``python -m lightning_shardckpt.consolidate DIR``.

By default, the output is one file for ``torch.load``, with the arguments, messages and exit codes of Lightning's
``lightning.pytorch.utilities.consolidate_checkpoint``. The file has Lightning's keys with whole tensors, and loads with
``torch.load``'s defaults, so it contains no types that carry code. Other formats are safetensors files and directories
for transformers and PEFT. Memory does not grow with the checkpoint, and no GPU, process group or user code is needed.
Nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.export.safetensors_export import plan_adapters, plan_safetensors
from lightning_shardckpt.export.whole_files import Export, Format, Options, Split, is_replaceable, write
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike
from lightning_shardckpt.sources.open_source import describe_path, did_you_mean, open_source
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.storage.local_files import open_output
from lightning_shardckpt.storage.router import StorageRouter, check_local, file_path, is_url
from lightning_shardckpt.system.host import TUNING, Tuning
from lightning_shardckpt.system.text import progress, size_text
from lightning_shardckpt.system.threads import drain_all
from lightning_shardckpt.tools.command_line import PROGRAM, Command, add_storage_options, execute, run_process

_log = logging.getLogger(__name__)
_SAFETENSORS, _TORCH_SUFFIXES = ".safetensors", (".pt", ".pth", ".ckpt", ".bin")
_LOCATION_OPTIONS = ("checkpoint_folder", "output_file", "storage_options")


def consolidate(
    checkpoint_folder: str | os.PathLike[str],
    output_file: str | os.PathLike[str] | None = None,
    *,
    format: Format | None = None,
    split: Split | None = None,
    size_per_shard: float | None = None,
    optimizer: bool | None = None,
    dtype: str | None = None,
    key_mapping: KeyMappingLike | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Path:
    """Export a checkpoint for other programs.

    The output appears when it is complete and durable; after an error, nothing is left of it. Waits for the
    asynchronous saves of this process.

    Args:
        checkpoint_folder: a checkpoint of this package, which may be a URL, of Lightning's FSDPStrategy or
            ModelParallelStrategy, or another checkpoint of torch.distributed.checkpoint.
        output_file: a path. By default, the folder's path with ``.consolidated`` appended, and then ``.safetensors``
            for a safetensors file; for a checkpoint at a URL, in the current directory.
        format: "torch", a file for ``torch.load``; "safetensors", whole tensors of the model and, optionally, the
            optimizers; "huggingface", a directory for ``from_pretrained``, if the saved module contains a model of
            transformers; "peft", a directory for ``PeftModel.from_pretrained`` with the adapters only: the
            adapter "default", and others in folders with their names, as PEFT's ``save_pretrained`` writes them. By
            default "safetensors" if ``output_file`` ends in ``.safetensors``, else "torch".
        split: "one_file", "one_file_per_tensor" or "chunks" (several files with an index). By default "chunks" for
            transformers, which is one file if all tensors fit, else "one_file".
        size_per_shard: maximum size of a chunk in MB (2^20 bytes), 5,000 by default; a larger tensor gets its own file.
        optimizer: include the optimizers; by default only for "torch". With safetensors, their state that is not
            tensors is written to ``optimizer.json``.
        dtype: "float64", "float32", "float16" or "bfloat16", for all floating-point tensors of the model.
        key_mapping: selects and renames tensors: a dict of whole names or regular expressions to new names (None
            leaves a tensor out), or a function. A model of transformers keeps its names: there it only leaves tensors
            out, and selects one of several models. See "Rename tensors" in the documentation.
        overwrite: replace the output of an earlier call, atomically.
        storage_options: for URLs, by fsspec's names, such as ``endpoint_url``, ``key`` and ``secret``.

    Returns:
        The path of the file or directory.

    Raises:
        ValueError: if options contradict each other, names collide, an entry of ``key_mapping`` matches nothing, or the
            output is inside a checkpoint, or at a URL.
        CheckpointNotFoundError: if the folder is not a checkpoint; the message describes its content.
        FileExistsError: if the output exists.
        CorruptionError: naming file, tensor and rank of corrupted data.
    """
    options = Options(
        format=format_of(output_file, format),
        split=split,
        size_per_shard=size_per_shard,
        optimizer=optimizer,
        dtype=dtype,
        key_mapping=key_mapping,
        overwrite=overwrite,
    )
    drain_all()
    return write_export(checkpoint_folder, output_file, options, storage_options=storage_options)


def format_of(output_file: str | os.PathLike[str] | None, format: Format | None) -> Format:
    """Return the format of an export: the given one, or that of the suffix of its path.

    Raises:
        ValueError: if the suffix belongs to another format than the given one, so that no program would read the file.
    """
    suffix = "" if output_file is None else os.path.splitext(os.fspath(output_file))[1]
    if format is None:
        return "safetensors" if suffix == _SAFETENSORS else "torch"
    if (format == "torch" and suffix == _SAFETENSORS) or (format != "torch" and suffix in _TORCH_SUFFIXES):
        raise ValueError(
            f"a path that ends in {suffix} is not one of format {format!r}: choose another name, or leave out format"
        )
    return format


def write_export(
    checkpoint_folder: str | os.PathLike[str],
    output_file: str | os.PathLike[str] | None,
    options: Options,
    *,
    storage_options: Mapping[str, Any] | None = None,
    tuning: Tuning = TUNING,
) -> Path:
    """Export a checkpoint as ``consolidate`` does, which describes arguments, result and errors.

    Args:
        checkpoint_folder: the checkpoint.
        output_file: the path of the output, or None for the default.
        options: its format and content.
        storage_options: for URLs.
        tuning: buffer sizes and the number of threads.
    """
    where = file_path(checkpoint_folder)
    folder = Path.cwd() / (where.rstrip("/").rpartition("/")[2] if is_url(where) else where)
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    where = where if is_url(where) else str(folder)
    suffix = ".consolidated" + (".safetensors" if options.is_file and options.format == "safetensors" else "")
    output = str(folder.with_name(folder.name + suffix)) if output_file is None else file_path(output_file)
    if not output:
        raise ValueError("the path for the converted checkpoint is empty")
    check_local(output)
    if output_file is not None and os.path.lexists(os.path.join(os.path.dirname(os.path.abspath(output)), ROOT_NAME)):
        raise ValueError(f"{output!r} lies inside a checkpoint: choose a path somewhere else")
    with ExitStack() as stack:
        try:
            if not is_url(where) and not folder.is_dir():
                raise CheckpointNotFoundError(where)
            stored, _ = open_source(where, StorageRouter(storage_options=storage_options), for_export=True)
            stack.callback(stored.close)
        except CheckpointNotFoundError:
            if is_url(where):
                raise
            raise CheckpointNotFoundError(_describe_problem(Path(checkpoint_folder))) from None
        _check_output(output, None if is_url(where) else folder, options)
        _write(stored, _plan(stored, options), output, options, tuning)
        if options.format != "peft":
            _warn_of_frozen(where, stored)
    return Path(output)


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_output(output: str, source: Path | None, options: Options) -> None:
    """Check that ``output`` is free or may be replaced. ``source`` is the directory that is read, None for a URL."""
    if not os.path.lexists(output):
        return
    if not options.overwrite:
        raise FileExistsError(
            "The path for the converted checkpoint already exists. Choose a different path by providing"
            f" `--output_file` or move/delete the file first: {output}"
        )
    is_file = os.path.islink(output) or os.path.isfile(output)
    if is_file and options.is_file:
        return
    is_source = source is not None and source.exists() and source.samefile(output)
    if options.is_file or is_source or is_file or not os.path.isdir(output) or not is_replaceable(output):
        expected = "a file" if options.is_file else "a directory of an earlier export"
        raise FileExistsError(f"{output} is not {expected}, so it is not replaced; choose a different path")


def _plan(stored: Source, options: Options) -> Export:
    if options.format == "peft":
        return plan_adapters(stored)
    if options.format != "torch":
        return plan_safetensors(stored, options)
    from lightning_shardckpt.export.torch_export import plan_torch  # imports torch

    return plan_torch(stored, options)


def _write(stored: Source, export: Export, output: str, options: Options, tuning: Tuning) -> None:
    """Write an export to the file or directory ``output``, and tell the user its notes."""

    def may_replace(path: str) -> bool:
        return options.overwrite and (options.is_file or is_replaceable(path))

    opened = open_output(output, is_file=options.is_file, replaceable=may_replace)
    with progress(export.nbytes) as (advance, _), opened as (create, notes):
        write(stored, export, create, advance, tuning=tuning)
    for note in (*export.notes, *notes):
        _log.warning(note)


def _describe_problem(folder: Path) -> str:
    """Return the reason why a folder is not a checkpoint: Lightning's sentence, and a hint."""
    description, hint = describe_path(folder), did_you_mean(folder)
    if not folder.exists():
        return f"The provided checkpoint folder does not exist: {folder}{hint}"
    if not folder.is_dir():
        sentence = "The provided checkpoint path must be a folder, containing the checkpoint shards"
        return f"{sentence}: {folder}; {description}{hint}"
    return (
        "Only sharded checkpoints saved with lightning-shardckpt or torch.distributed.checkpoint are supported for"
        f" consolidation. The provided folder is not in that format: {folder}; "
        f"{description or f'it has no {ROOT_NAME}'}{hint}"
    )


def _warn_of_frozen(where: str, stored: Source) -> None:
    if frozen := stored.document("frozen"):
        _log.warning(
            f"{where} was saved with adapters_only=True: {len(frozen)} frozen parameters are not in the output. "
            "`load_state_dict` needs strict=False for it; --format peft makes a folder that PEFT loads."
        )


# ── the command line ──────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str]) -> int:
    """Run the tool with command-line arguments, and return the exit status."""
    return execute(lambda: Command("consolidate", run_command, command_parser().parse_args(list(arguments))))


def run_command(arguments: Namespace) -> int:
    """Run the tool with parsed arguments, and return the exit status. Invalid options raise SystemExit."""
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        if "key_mapping" in given:
            given["key_mapping"] = KeyMapping.of_texts(given["key_mapping"], "key_mapping")
        format = format_of(given.get("output_file"), given.get("format"))
        Options(**{name: value for name, value in given.items() if name not in _LOCATION_OPTIONS})
    except ValueError as error:
        command_parser().error(str(error))
    begin = time.monotonic()
    path = consolidate(**given)
    print(_describe_output(path, format, time.monotonic() - begin))  # noqa: T201  # the output of a command
    return 0


def _describe_output(path: Path, format: Format, seconds: float) -> str:
    """Return a sentence with the path, format and size of an export, the time that it took, and how to load it."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    written = size_text(sum(file.stat().st_size for file in files))
    quoted = repr(str(path))
    kind, remedy = {
        "torch": ("one file for torch.load", f'torch.load({quoted})["state_dict"], or fit(ckpt_path={quoted})'),
        "safetensors": ("safetensors", f"safetensors.torch.load_file({quoted})"),
        "huggingface": ("a model for transformers", f"AutoModel.from_pretrained({quoted})"),
        "peft": ("adapters for PEFT", f"PeftModel.from_pretrained(model, {quoted})"),
    }[format]
    if format == "safetensors" and path.is_dir():
        remedy = "safetensors.torch.load_file for each file in it"
    return f"{path}: {kind}, {written} in {seconds:.1f} s. Load it by {remedy}."


def command_parser() -> ArgumentParser:
    """Return the parser of the tool's command line."""
    parser = ArgumentParser(
        prog=f"{PROGRAM}.consolidate",
        description="Converts a checkpoint to a single file that `torch.load()` reads, or to files of safetensors.",
    )
    add = parser.add_argument
    add("checkpoint_folder", type=str, help="the checkpoint: a directory or a URL")
    default = "by default the name of the checkpoint with '.consolidated' appended"
    add("--output_file", type=str, help=f"file or directory, must not exist yet; {default}")
    add("--overwrite", action="store_true", help="replace the output of an earlier run, atomically")
    formats = "for torch.load; whole tensors; a directory for transformers' from_pretrained, or PEFT's, of adapters"
    add("--format", type=Format | None, help=f"{formats}; by default torch, or safetensors by the suffix of the output")
    add("--split", type=Split | None, help="of safetensors; chunks have an index; huggingface: chunks, else one_file")
    add("--size_per_shard", type=float | None, metavar="MB", help="limit of a chunk; 5000 by default")
    add("--optimizer", type=bool | None, help="include the optimizers; by default only with torch")
    add("--dtype", type=str, help="float64, float32, float16 or bfloat16, for all floating tensors of the model")
    mapping = "a stored name or regular expression and its new name, null to leave out; repeatable"
    add("--key_mapping", action="append", type=str, metavar="OLD=NEW", help=mapping)
    add_storage_options(parser)
    return parser


if __name__ == "__main__":
    run_process(main, sys.argv[1:])
