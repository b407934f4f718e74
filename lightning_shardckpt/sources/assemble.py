"""Lightning's checkpoint dict of what is stored, with tensors or with what stands for them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.state.documents import FROZEN, StoredOptimizer, document_of
from lightning_shardckpt.state.module_versions import with_versions
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.whole_tensors import WholeTensors


class StoredState(Protocol):
    """A checkpoint of any format, without the bytes of its tensors."""

    def components(self) -> Mapping[str, Component]:
        """Tensors by component."""

    def document(self, role: str) -> Any:
        """Return what was stored under a role, as JSON; None if nothing was."""

    def trainer(self, stored: Callable[[str], Any]) -> dict[str, Any]:
        """The trainer's state; ``stored`` gives the tensor of a key of the component trainer."""


class StoredCheckpoint:
    """An open checkpoint of this package: its tensors as bytes in files, and its documents."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tensors = WholeTensors(checkpoint)

    def components(self) -> dict[str, Component]:
        """Tensors by component."""
        return self._checkpoint.root.components

    def document(self, role: str) -> Any:
        """The JSON of a role, from all groups of ranks; None if nothing was stored."""
        return document_of(self._checkpoint, role)


def assemble(
    source: StoredState,
    tensor: Callable[[str, str], Any],
    decoded: Callable[[Any], Any],
    *,
    optimizers: bool = True,
) -> dict[str, Any]:
    """Lightning's checkpoint dict with whole tensors.

    Args:
        source: what is stored.
        tensor: gives the one of a component and key; called once for each.
        decoded: makes a value of what ``encode_small`` returned.
        optimizers: whether they are in it.
    """

    def equal(value: Any, count: int) -> list[Any]:
        return [decoded(value) for _ in range(count)]

    components = source.components()
    tensor = cache(tensor)  # a hostile document may refer to one tensor a million times
    found = source.trainer(lambda key: tensor("trainer", key))
    if "model" in components:
        state: dict[str, Any] = {key: tensor("model", key) for key in components["model"].tensors}
        state |= {alias: state[of] for alias, of in components["model"].aliases.items()}
        state |= {name: decoded(value) for name, value in (source.document("model") or {}).items()}
        versions = source.document("versions")
        decoded_versions = None if versions is None else {name: decoded(value) for name, value in versions.items()}
        found["state_dict"] = with_versions(state, decoded_versions)
        if frozen := source.document("frozen"):
            found[FROZEN] = frozen
    document = source.document("optimizer") if optimizers else None
    if document is not None:
        component = components.get("optimizer")
        whole = {key: tensor("optimizer", key) for key in component.tensors} if component is not None else {}
        stored = [StoredOptimizer(i, document[str(i)], component, equal) for i in range(len(document))]
        found["optimizer_states"] = [one.state_dict(whole) for one in stored]
    return found
