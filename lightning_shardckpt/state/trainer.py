"""Lightning's checkpoint dict as a snapshot: live tensors by key, and JSON documents. Nothing is copied.

``state_dict`` and ``optimizer_states`` become the components model and optimizer. All other keys are the trainer's
state: a JSON tree, with its larger tensors in the component trainer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.documents import TAG
from lightning_shardckpt.state.json_tree import Encoder, encode_small
from lightning_shardckpt.state.libraries import adapter_tensors, alters_base, wrapped_models
from lightning_shardckpt.state.local_tensors import dtype_name, is_elsewhere, local_tensor
from lightning_shardckpt.state.model import Leaves, WholeNames, is_extra_state, model_leaves
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.state_dicts import versions_of

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
"""Keys whose unstorable values are replaced by placeholders, with a warning, since they may hold any object."""

_MAY_DIFFER = (*HYPER_PARAMETERS, "callbacks", "loops", "lr_schedulers")  # metrics may come from a rank's own batches
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's part of a save. Its values must not change until the save has returned.

    Documents are by role: of "trainer", "peft" and "huggingface" rank 0's is stored, of "rank" every rank's, of
    "model", "optimizer", "frozen" and "versions" one of each group of ranks that hold the same tensors. Other groups
    add keys to the trainer's state that rank 0 does not have.
    """

    leaves: dict[str, Leaves]  # by component
    own: dict[str, torch.Tensor]  # plain tensors of the trainer's state; rank 0's are stored
    documents: dict[str, Any]
    notes: tuple[str, ...] = ()  # for the user
    replicated: dict[str, torch.Tensor] = field(default_factory=dict)  # must be equal on all ranks
    # of components whose tensors have no values yet: returns the content of a key's tensor when it is written
    contents: dict[str, Callable[[str], memoryview]] = field(default_factory=dict)


def snapshot(
    checkpoint: Mapping[str, Any],
    module: nn.Module | None = None,
    rank_state: Any = None,
    whole: WholeNames | None = None,
    *,
    adapters_only: bool = False,
    pickle_objects: bool | None = None,
) -> Snapshot:
    """Return this rank's part of a save of Lightning's checkpoint dict.

    Args:
        checkpoint: the result of Lightning's ``dump_checkpoint``.
        module: the live module, which tells buffers and ties; ``whole``, the names over all pipeline stages.
        rank_state: state of this rank alone.
        adapters_only: leave out the parameters of ``module`` that training does not change.
        pickle_objects: pickle objects that JSON cannot hold; None if the caller has no such option.

    Raises:
        StateError: listing all values that cannot be stored, by path.
    """
    encoder = Encoder(droppable=HYPER_PARAMETERS, pickles=pickle_objects)
    if odd := [key for key in checkpoint if not isinstance(key, str) or key == TAG]:
        raise StateError(f"the checkpoint has an entry {odd[0]!r}, but only strings other than {TAG!r} can name one")
    # the class of hyper-parameters is left out: their value shows whether it is OmegaConf's
    others = {k: v for k, v in checkpoint.items() if not (k == "hparams_type" and isinstance(v, type))}
    tree = {k: encoder.encode(v, k) for k, v in others.items() if k not in ("state_dict", "optimizer_states")}
    encoder.check()
    notes: tuple[str, ...] = ()
    if encoder.dropped:
        notes = (
            "hyper-parameters that cannot be stored without pickle are left out of the checkpoint: "
            f"{', '.join(encoder.dropped)}. Pass them again when you load, or exclude them by "
            "save_hyperparameters(ignore=…).",
        )
    leaves = {"trainer": Leaves({k: t for k, t in encoder.tensors.items() if isinstance(t, DTensor)})}
    documents: dict[str, Any] = {"trainer": tree, "rank": encode_small(rank_state, "rank_state")}
    if "state_dict" in checkpoint:
        leaves["model"], values = model_leaves(checkpoint["state_dict"], module, whole)
        documents["model"] = {key: encode_small(value, f"state_dict/{key}") for key, value in values.items()}
        if module is None:  # buffers are not known
            statistics = frozenset(key for key in leaves["model"].tensors if _is_statistic(key))
            leaves["model"] = replace(leaves["model"], pinned=statistics)
        documents["versions"] = versions_of(checkpoint["state_dict"], encode_small)
        if adapters_only and module is not None:
            frozen = frozen_base_parameters(module, checkpoint.get("optimizer_states", ()))
            leaves["model"], documents["frozen"] = _leave_out(leaves["model"], frozen)
    if "optimizer_states" in checkpoint:
        leaves["optimizer"], documents["optimizer"] = optimizer_leaves(checkpoint["optimizer_states"])
    own = {k: t for k, t in encoder.tensors.items() if not isinstance(t, DTensor)}
    equal = (k for k in encoder.plain if k.partition("/")[0] not in _MAY_DIFFER and not _is_statistic(k))
    replicated = {key: encoder.plain[key] for key in equal}
    return Snapshot(leaves, own, documents, notes, replicated)


def frozen_base_parameters(module: nn.Module, optimizers: Collection[Mapping[str, Any]] = ()) -> frozenset[str]:
    """Return the canonical FQNs of base parameters that PEFT froze, whose values the pretrained model has, too.

    Leaves out parameters with optimizer state, which were trained, base weights that an adapter's initialization
    changed, and frozen parameters outside of models with adapters, such as averages.
    """
    named = {clean_fqn(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}
    frozen: set[str] = set()
    for prefix, wrapped in wrapped_models(module):
        inside = {n for n, p in named.items() if n.startswith(prefix) and not p.requires_grad and not is_elsewhere(p)}
        frozen |= {n for n in inside if ".base_layer." not in n} if alters_base(wrapped) else inside
    trained = {str(name) for state in optimizers for name, values in state.get("state", {}).items() if values}
    return frozenset(frozen - trained - adapter_tensors(module, frozen))


def _leave_out(leaves: Leaves, names: Collection[str]) -> tuple[Leaves, dict[str, Any]]:
    """Return leaves without the tensors of which ``names`` has a name, and the document "frozen" of these."""
    owners = {key: key for key in leaves.tensors} | leaves.aliases
    out, document = {owners[name] for name in names if name in owners}, dict[str, Any]()
    for name in sorted(name for name, key in owners.items() if key in out):
        tensor = leaves.tensors[owners[name]]
        document[name] = [dtype_name(local_tensor(tensor), f"model/{shown(name)}"), list(tensor.shape)]
    tensors = {key: tensor for key, tensor in leaves.tensors.items() if key not in out}
    aliases = {alias: key for alias, key in leaves.aliases.items() if key not in out}
    return Leaves(tensors, aliases, leaves.pinned - out), document


def _is_statistic(name: str) -> bool:
    """Return whether these are running statistics of a norm, which each rank may have of its own."""
    return name.replace("/", ".").rpartition(".")[2] in _STATISTICS


def find_counterpart(key: str, shape: tuple[int, ...], live: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the live DTensor of a shape whose FQN ends a key of trainer state, such as an average's; else None."""
    named = map(live.get, fqns_of(key))
    return next((tensor for tensor in named if isinstance(tensor, DTensor) and tuple(tensor.shape) == shape), None)


def fqns_of(key: str) -> Iterator[str]:
    """Yield the possible FQNs at the end of a key of trainer state, the longest first.

    >>> list(fqns_of("callbacks/Average/module.head.weight"))
    ['module.head.weight', 'head.weight', 'weight']
    """
    name = key.rpartition("/")[2]
    while name:
        yield name
        name = name.partition(".")[2]


def drop_elsewhere(state: Any, is_elsewhere: Callable[[str], bool], path: str = "") -> None:
    """Remove tensors and extra state of other pipeline stages from decoded trainer state, by their keys. In place.

    So state that a callback keeps by parameter name has only names of this stage after a load.
    """
    if isinstance(state, argparse.Namespace):
        state = vars(state)
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in list(items):
        name = f"{path}/{key}" if path else str(key)
        is_entry = isinstance(key, str) and (isinstance(value, torch.Tensor) or is_extra_state(key))
        if is_entry and is_elsewhere(name):
            del state[key]
        else:
            drop_elsewhere(value, is_elsewhere, name)
