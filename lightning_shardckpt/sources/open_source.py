"""Opening the source at a path, of any format, the same on all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.sources.dcp import open_dcp
from lightning_shardckpt.sources.detect import DCP, HUB_DIRECTORY, INDEX_FILE, SAFETENSORS, detect_format
from lightning_shardckpt.sources.did_you_mean import READABLE, explain_missing
from lightning_shardckpt.sources.huggingface import open_directory, open_file
from lightning_shardckpt.sources.source import ShardedSource, Source
from lightning_shardckpt.sources.torch_save import TorchFileSource
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.reader import Checkpoint


@contextmanager
def open_on_ranks(
    path: str,
    *,
    ranks: Ranks,
    storage: Storage,
    verify: bool = True,
    weights_only: bool = True,
    tuning: Tuning = TUNING,
) -> Iterator[Source]:
    """Open the source at ``path``, the same on all ranks.

    Collective: every rank of ``ranks`` must enter it. While ranks see different checkpoints, they look again, for as
    long as the storage may take to make a change visible to all.

    Args:
        path: of a checkpoint of this package or of another program, or a URL.
        ranks: the ranks that open it together.
        storage: opens checkpoints of this package.
        verify: whether reads verify checksums, if the format has them.
        weights_only: for a file of ``torch.save``, as in ``torch.load``, and for pickled objects of a checkpoint.
        tuning: sizes of reads, for a checkpoint of this package.

    Yields:
        The source, closed at the end.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: if the ranks see different checkpoints at the path.
    """
    source: Source | None = None

    def look() -> dict[str, str]:
        nonlocal source
        if source is not None:
            source.close()
            source = None
        try:
            source, identity = open_source(path, storage, verify=verify, weights_only=weights_only, tuning=tuning)
        except CheckpointNotFoundError as error:
            return {"missing": str(error)}
        return {"id": identity}

    def compare(views: list[dict[str, str]], look_again: bool) -> bool:
        if all(view == views[0] for view in views) and "id" in views[0]:
            return True
        missing = [rank for rank, view in enumerate(views) if "missing" in view]
        if len(missing) < len(views) and look_again:
            return False
        if missing:
            others = f" (on ranks {missing} of {len(views)})" if len(views) > 1 else ""
            if len(missing) < len(views):
                others += "; the others see one: the path must be on a file system that all ranks share"
            raise CheckpointNotFoundError(views[missing[0]]["missing"] + others)
        save_ids = [view["id"] for view in views]
        raise MismatchError(
            f"the ranks see different checkpoints at {path!r}: {save_ids}; the path must be on a file system that all "
            "ranks share"
        )

    try:
        ranks.step_until(f"opening checkpoint {path!r}", look, compare, storage.visible_within_s)
        assert source is not None
        yield source
    finally:
        if source is not None:
            source.close()


def _digest(source: Source) -> str:
    """Return a digest of names, dtypes and shapes, for formats without a save id."""
    kinds = {n: {k: (t.dtype, t.shape) for k, t in c.tensors.items()} for n, c in source.components().items()}
    return checksum(json.dumps(kinds, sort_keys=True).encode())


def open_source(
    path: str, storage: Storage, *, verify: bool = True, weights_only: bool = True, tuning: Tuning = TUNING
) -> tuple[Source, str]:
    """Open the source at a path in this process alone. The arguments are those of ``open_on_ranks``.

    Returns:
        The source, which the caller closes, and an identity that is equal if other ranks see the same checkpoint.

    Raises:
        CheckpointNotFoundError: if there is no readable checkpoint; suggests other paths.
        FormatError: if several formats match.
    """
    if (other := detect_format(path)) is not None:
        source = open_other(path, other, weights_only)
        return source, f"{other}, {_digest(source)}"
    try:
        sharded = ShardedSource(Checkpoint(storage, path), verify, tuning, weights_only=weights_only)
    except CheckpointNotFoundError as error:
        if is_url(path):
            raise
        raise CheckpointNotFoundError(explain_missing(path, error, READABLE)) from None
    return sharded, sharded.checkpoint.root.save_id


def open_other(path: str, format: str, weights_only: bool = True) -> Source:
    """Open a checkpoint of another program, of the format that ``detect_format`` found."""
    if format == DCP:
        return open_dcp(path, weights_only)
    if format == HUB_DIRECTORY:
        return open_directory(path)
    if format == INDEX_FILE:
        return open_directory(*os.path.split(os.path.abspath(path)))
    return open_file(path) if format == SAFETENSORS else TorchFileSource(path, weights_only)
