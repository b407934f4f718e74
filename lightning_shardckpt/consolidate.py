"""From a sharded checkpoint to one file for ``torch.load``: ``python -m lightning_shardckpt.consolidate DIR``.

The same arguments, messages and exit codes as Lightning's ``lightning.pytorch.utilities.consolidate_checkpoint``. The
file has Lightning's keys with whole tensors; it loads with ``torch.load``'s defaults, so it holds no type that carries
code: see ``torchfile.Plain``. Memory does not grow with the checkpoint. No GPU, process group, user code or unpickling.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.index import ROOT_NAME
from lightning_shardckpt.locate import described, did_you_mean
from lightning_shardckpt.read import Checkpoint
from lightning_shardckpt.regions import fill
from lightning_shardckpt.storage.local import LocalStorage
from lightning_shardckpt.storage.outputs import new_file
from lightning_shardckpt.text import progress

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_LISTED = 10


def consolidate(checkpoint_folder: str | os.PathLike[str], output_file: str | os.PathLike[str] | None = None) -> Path:
    """Write the checkpoint in a folder as one file that ``torch.load`` reads, and return its path.

    The file appears when it is complete and durable; an error leaves nothing behind.

    Args:
        checkpoint_folder: a checkpoint of this package.
        output_file: must not exist yet; the folder's name with ``.consolidated`` appended by default.

    Raises:
        CheckpointNotFoundError: if the folder is no checkpoint; says what it is instead.
        FileExistsError: if the output file exists.
        CorruptionError: naming file, tensor and rank of data that is not what was saved.
    """
    folder = Path.cwd() / checkpoint_folder
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    try:
        LocalStorage().open(str(folder)).close()
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(_what_is_wrong(Path(checkpoint_folder))) from None
    output = Path(output_file) if output_file is not None else folder.with_name(folder.name + ".consolidated")
    if os.path.lexists(output):
        raise FileExistsError(
            "The path for the converted checkpoint already exists. Choose a different path by providing"
            f" `--output_file` or move/delete the file first: {output}"
        )
    with new_file(str(output)) as (file, notes):
        _write(str(folder), file)
    for note in notes:
        _log.warning(note)
    return output


def _what_is_wrong(folder: Path) -> str:
    """Why a folder is no checkpoint of ours: Lightning's sentences, and what we can tell beyond them."""
    said, hint = described(folder), did_you_mean(folder)
    if not folder.exists():
        return f"The provided checkpoint folder does not exist: {folder}{hint}"
    if not folder.is_dir():
        sentence = "The provided checkpoint path must be a folder, containing the checkpoint shards"
        return f"{sentence}: {folder}; {said}{hint}"
    remedy = ""
    if (folder / "meta.pt").exists():
        remedy = "; for FSDP, use `python -m lightning.pytorch.utilities.consolidate_checkpoint`"
    elif (folder / ".metadata").exists():
        remedy = "; use `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`"
    return (
        "Only sharded checkpoints saved with lightning-shardckpt are supported for consolidation. The provided folder"
        f" is not in that format: {folder}; {said or f'it has no {ROOT_NAME}'}{remedy}{hint}"
    )


def _write(folder: str, file: BinaryIO) -> None:
    """The content of the file for a checkpoint."""
    import torch  # it takes two seconds, which a mistyped path should not

    from lightning_shardckpt import torchfile
    from lightning_shardckpt.opening import assemble
    from lightning_shardckpt.sources import ShardedSource
    from lightning_shardckpt.staging import TORCH_DTYPES

    source = ShardedSource(Checkpoint(LocalStorage(), folder))
    components = source.components()
    keys: dict[int, tuple[str, str]] = {}

    def stand_in(component: str, key: str) -> torch.Tensor:
        spec = components[component].tensors[key]
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        keys[id(tensor)] = component, key
        return tensor

    plain = torchfile.Plain()
    with closing(source):
        checkpoint = plain.of(assemble(source, stand_in))
        archive = torchfile.Archive(checkpoint, lambda tensor: keys[id(tensor)])
        with progress(sum(region.nbytes for region in archive.regions)) as advance:
            fill(file.fileno(), archive.regions, source.tensors, archive.head, advance)
        archive.finish(file)
    _tell(plain.changed)


def _tell(changed: list[str]) -> None:
    if changed:
        more = [f"… and {len(changed) - _LISTED} more"] if len(changed) > _LISTED else []
        listed = "\n  ".join(changed[:_LISTED] + more)
        _log.warning(f"Values that `torch.load` would refuse by default are not in the file as they were:\n  {listed}")


if __name__ == "__main__":
    from lightning_shardckpt.cli import run

    run(["consolidate", *sys.argv[1:]])
