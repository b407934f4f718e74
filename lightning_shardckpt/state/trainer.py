"""Lightning's checkpoint dict as a snapshot, and what a checkpoint holds as that dict again.

``state_dict`` and ``optimizer_states`` become the components model and optimizer. Everything else is the trainer's
state, whatever its keys: a JSON tree, with its larger tensors in the component trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.state.model import model_leaves
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from lightning_shardckpt.state.tree import Encoder, encode_small

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
"""Keys whose unstorable values are replaced by placeholders, with a warning: users put anything there."""


def snapshot(checkpoint: Mapping[str, Any], module: nn.Module | None = None, rank_state: Any = None) -> Snapshot:
    """What this rank contributes to a save of Lightning's checkpoint dict.

    Args:
        checkpoint: as Lightning's ``dump_checkpoint`` made it.
        module: the live module, which tells buffers and ties; see ``model_leaves``.
        rank_state: what only this rank knows, such as its random state.

    Raises:
        StateError: listing every value that cannot be stored, by path.
    """
    encoder = Encoder(droppable=HYPER_PARAMETERS)
    tree = {k: encoder.encode(v, k) for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    encoder.check()
    dropped = (
        "hyper-parameters that cannot be stored without pickle are left out of the checkpoint: "
        + ", ".join(encoder.dropped)
        + ". Pass them again when you load, or exclude them by save_hyperparameters(ignore=…)."
    )
    leaves = {"trainer": Leaves({k: t for k, t in encoder.tensors.items() if isinstance(t, DTensor)})}
    documents: dict[str, Any] = {"trainer": tree, "rank": encode_small(rank_state, "rank_state")}
    if "state_dict" in checkpoint:
        leaves["model"], documents["model"] = model_leaves(checkpoint["state_dict"], module)
    if "optimizer_states" in checkpoint:
        leaves["optimizer"], documents["optimizer"] = optimizer_leaves(checkpoint["optimizer_states"])
    own = {k: t for k, t in encoder.tensors.items() if not isinstance(t, DTensor)}
    return Snapshot(leaves, own, documents, (dropped,) if encoder.dropped else ())


def sharded_like(key: str, shape: tuple[int, ...], live: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The live DTensor of that shape whose FQN is the tail of a trainer key, such as an average of it; None if none.

    Averages of sharded weights must not be gathered to be restored: they are laid out like the weights.
    """
    name = key.rpartition("/")[2]
    while name:
        found = live.get(name)
        if isinstance(found, DTensor) and tuple(found.shape) == shape:
            return found
        name = name.partition(".")[2]
    return None
