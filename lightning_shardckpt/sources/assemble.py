"""Lightning's checkpoint dict from stored state, with whole tensors or placeholders. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from typing import Any, Protocol

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.detect import detect_format
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.state.documents import FROZEN, StoredOptimizer, document_of
from lightning_shardckpt.state.module_versions import add_versions
from lightning_shardckpt.storage.router import StorageRouter, is_url
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.whole_tensors import StoredTensors, WholeTensors


class StoredState(Protocol):
    """An open checkpoint of any format."""

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as bytes in files."""

    def components(self) -> Mapping[str, Component]:
        """Return the tensors by component."""

    def document(self, role: str) -> Any:
        """Return the JSON of a role; None if there is none."""

    def trainer(self, stored: Callable[[str], Any]) -> dict[str, Any]:
        """Return the trainer's state; ``stored`` returns a tensor of the component trainer by key."""


class StoredCheckpoint:
    """An open checkpoint of this package: its tensors as bytes in files, and its documents."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tensors = WholeTensors(checkpoint)

    def components(self) -> dict[str, Component]:
        """Return the tensors by component."""
        return self._checkpoint.root.components

    def document(self, role: str) -> Any:
        """Return the JSON of a role, from all groups of ranks; None if there is none."""
        return document_of(self._checkpoint, role)

    def trainer(self, stored: Callable[[str], Any]) -> dict[str, Any]:
        """Return the trainer's state; ``stored`` returns the value to put in place of a tensor."""
        from lightning_shardckpt.state.json_tree import decode  # imports torch, which nothing else here needs

        state: dict[str, Any] = decode(self.document("trainer") or {}, stored, makes_configs=False)
        return state


@contextmanager
def open_stored(path: str, storage_options: Mapping[str, Any] | None) -> Iterator[StoredState]:
    """Open a checkpoint of any format in this process alone; one of this package without importing torch.

    Args:
        path: of the checkpoint, or a URL.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: describing the content of the path, and suggesting others.
    """
    if is_url(path) or detect_format(path) is None:
        with open_checkpoint(path, storage_options=storage_options) as checkpoint:
            yield StoredCheckpoint(checkpoint)
        return
    from lightning_shardckpt.sources.open_source import open_source  # imports torch

    source, _ = open_source(path, StorageRouter())
    with closing(source):
        yield source


def assemble(
    source: StoredState,
    tensor: Callable[[str, str], Any],
    decode: Callable[[Any], Any],
    *,
    optimizers: bool = True,
) -> dict[str, Any]:
    """Return Lightning's checkpoint dict with whole tensors.

    Args:
        source: the stored state.
        tensor: returns the tensor of a component and key; called once for each.
        decode: decodes the result of ``encode_small``.
        optimizers: whether to include the optimizers.
    """

    def decode_equal(value: Any, count: int) -> list[Any]:
        return [decode(value) for _ in range(count)]

    components = source.components()
    tensor = cache(tensor)  # a hostile document may refer to one tensor a million times
    checkpoint = source.trainer(lambda key: tensor("trainer", key))
    if "model" in components:
        state: dict[str, Any] = {key: tensor("model", key) for key in components["model"].tensors}
        state |= {alias: state[of] for alias, of in components["model"].aliases.items()}
        state |= {name: decode(value) for name, value in (source.document("model") or {}).items()}
        versions = source.document("versions")
        decoded_versions = None if versions is None else {name: decode(value) for name, value in versions.items()}
        checkpoint["state_dict"] = add_versions(state, decoded_versions)
        if frozen := source.document("frozen"):
            checkpoint[FROZEN] = frozen
    document = source.document("optimizer") if optimizers else None
    if document is not None:
        component = components.get("optimizer")
        whole = {key: tensor("optimizer", key) for key in component.tensors} if component is not None else {}
        stored = [StoredOptimizer(i, document[str(i)], component, decode_equal) for i in range(len(document))]
        checkpoint["optimizer_states"] = [one.state_dict(whole) for one in stored]
    return checkpoint
