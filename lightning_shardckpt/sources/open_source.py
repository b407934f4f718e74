"""Open the source at a path, of any format, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.sources.detect import detect_format
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.sources.source import Source, sharded_source
from lightning_shardckpt.storage.protocol import Storage

if TYPE_CHECKING:
    from lightning_shardckpt.distributed.ranks import Ranks  # imports torch, which tools that move bytes don't need


class LiveState(Protocol):
    """The live state of a load, whose description may differ between ranks."""

    def look(self) -> Any:
        """Return this rank's view of the state, as JSON."""

    def agree(self, views: list[Any]) -> Any:
        """Return what follows from the views of all ranks, as JSON. Runs on rank 0."""

    def take(self, answer: Any) -> None:
        """Take the result of ``agree``, on every rank."""


@contextmanager
def open_on_ranks(
    path: str,
    *,
    ranks: Ranks,
    storage: Storage,
    verify: bool = True,
    weights_only: bool = True,
    live: LiveState | None = None,
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
        live: the state to fill, on which the ranks agree in the same exchange.

    Yields:
        The source, closed at the end.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: if the ranks see different checkpoints at the path.
    """
    source: Source | None = None
    state: list[Any] = []

    def look() -> dict[str, Any]:
        nonlocal source
        if live is not None and not state:
            state.append(live.look())
        if source is not None:
            source.close()
            source = None
        try:
            source, identity = open_source(path, storage, verify=verify, weights_only=weights_only)
        except CheckpointNotFoundError as error:
            return {"missing": str(error)}
        return {"id": identity, "state": state}

    def compare(views: list[dict[str, Any]], look_again: bool) -> dict[str, Any]:
        if "id" in views[0] and all(view.get("id") == views[0]["id"] for view in views):
            return {"state": None if live is None else live.agree([view["state"][0] for view in views])}
        missing = [rank for rank, view in enumerate(views) if "missing" in view]
        if len(missing) < len(views) and look_again:
            return {}
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
        answer = ranks.step_until(f"opening checkpoint {path!r}", look, compare, storage.visible_within_s)
        assert source is not None
        if live is not None:
            live.take(answer["state"])
        yield source
    finally:
        if source is not None:
            source.close()


def _digest(source: Source) -> str:
    """Return a digest of names, dtypes and shapes, for formats without a save id."""
    kinds = {n: {k: (t.dtype, t.shape) for k, t in c.tensors.items()} for n, c in source.components().items()}
    return checksum(json.dumps(kinds, sort_keys=True).encode())


def open_source(
    path: str, storage: Storage, *, verify: bool = True, weights_only: bool = True, for_export: bool = False
) -> tuple[Source, str]:
    """Open the source at a path in this process alone; one of this package without importing torch.

    Args:
        path: as in ``open_on_ranks``.
        storage: as in ``open_on_ranks``.
        verify: as in ``open_on_ranks``.
        weights_only: as in ``open_on_ranks``.
        for_export: as in ``sharded_source``.

    Returns:
        The source, which the caller closes, and an identity that is equal if other ranks see the same checkpoint.

    Raises:
        CheckpointNotFoundError: if there is no readable checkpoint; suggests other paths.
        FormatError: if several formats match.
    """
    if (other := detect_format(path)) is not None:
        source = other.open(path, weights_only)
        return source, f"{other.name}, {_digest(source)}"
    checkpoint = open_checkpoint(path, storage)
    source = sharded_source(checkpoint, verify, weights_only=weights_only, for_export=for_export)
    return source, checkpoint.root.save_id
