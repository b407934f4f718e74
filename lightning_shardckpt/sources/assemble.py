"""Lightning's checkpoint dict from stored state, with whole tensors or placeholders. No torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import FROZEN, StoredOptimizer
from lightning_shardckpt.state.state_dicts import add_versions


def assemble(
    source: Source,
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
        stored = [StoredOptimizer(i, document[str(i)], component, decode) for i in range(len(document))]
        checkpoint["optimizer_states"] = [one.state_dict(whole) for one in stored]
    return checkpoint
