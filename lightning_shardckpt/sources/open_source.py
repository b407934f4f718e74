"""Open the source for whatever is at a path, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.sources.detect import recognise
from lightning_shardckpt.sources.did_you_mean import READABLE, explain
from lightning_shardckpt.sources.source import ShardedSource, Source
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.reader import Checkpoint


@contextmanager
def opened(
    path: str,
    *,
    ranks: Ranks,
    storage: Storage,
    verify: bool = True,
    weights_only: bool = True,
    tuning: Tuning = TUNING,
) -> Iterator[Source]:
    """Open what is at ``path``, the same on all ranks.

    Collective: every rank of ``ranks`` must enter it.

    Until they see the same, the ranks look again for as long as the storage may take to show all of them one change.

    Args:
        path: of a checkpoint of this package or of another program, or a URL.
        ranks: who opens it together.
        storage: what opens checkpoints of this package.
        verify: whether reads compare checksums, where the format has some.
        weights_only: for a file of ``torch.save``, as in ``torch.load``; and for pickled objects of a checkpoint.
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
            source, mark = open_source(path, storage, verify=verify, weights_only=weights_only, tuning=tuning)
        except CheckpointNotFoundError as error:
            return {"missing": str(error)}
        return {"id": mark}

    def same(views: list[dict[str, str]], look_again: bool) -> bool:
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
        ranks.step_until(f"opening checkpoint {path!r}", look, same, storage.visible_within_s)
        assert source is not None
        yield source
    finally:
        if source is not None:
            source.close()


def _digest(source: Source) -> str:
    """Tells apart what other programs wrote, without a save id."""
    found = {n: {k: (t.dtype, t.shape) for k, t in c.tensors.items()} for n, c in source.components().items()}
    return checksum(json.dumps(found, sort_keys=True).encode())


def open_source(
    path: str, storage: Storage, *, verify: bool = True, weights_only: bool = True, tuning: Tuning = TUNING
) -> tuple[Source, str]:
    """Return what is at a path, for this process alone, and text that is equal where others see the same.

    Args:
        path: see ``opened``.
        storage: see ``opened``.
        verify: see ``opened``.
        weights_only: see ``opened``.
        tuning: see ``opened``.

    Returns:
        The source, which the caller closes, and the text.

    Raises:
        CheckpointNotFoundError: if it is nothing that can be read; says which path was probably meant.
        FormatError: if it is several things at once.
    """
    other = recognise(path)
    if other is not None:
        source = other.open(path, weights_only)
        return source, f"{other.name}, {_digest(source)}"
    try:
        sharded = ShardedSource(Checkpoint(storage, path), verify, tuning, weights_only=weights_only)
    except CheckpointNotFoundError as error:
        if is_url(path):
            raise
        raise CheckpointNotFoundError(explain(path, error, READABLE)) from None
    return sharded, sharded.checkpoint.root.save_id
