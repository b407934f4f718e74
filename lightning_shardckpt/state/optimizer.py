"""Optimizer state by parameter FQN, without torch's ``get_optimizer_state_dict``.

That function takes a step with zero gradients when the state is still empty, which changes momenta and parameters
(torch 2.13). Here an optimizer without state has no state.

Tensors shaped like their parameter are leaves ``<optimizer>/<fqn>/<name>``. Everything else (``step``, 0-dim tensors,
numbers) and the hyper-parameters of the param groups go into a JSON document; so does what is of no parameter: state
under a text (``optimizer.state["k"]``), and entries that an optimizer adds to its ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.compat.torch_autograd import has_load_hooks, loads_in_its_own_way, saves_in_its_own_way
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.compound_tensors import is_compound, take_apart
from lightning_shardckpt.state.documents import add_value
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import bytes_of, is_host_memory

_OF_TORCH = ("state", "param_groups")
NOT_HYPER = ("params", "param_names")
"""Keys of a param group that are no hyper-parameters."""


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state dict with FQNs in place of numbers; the tensors are the live ones.

    Args:
        optimizer: any torch optimizer.
        names: FQN by ``id`` of the parameter.

    Raises:
        StateError: if the optimizer has a parameter that the model does not have, or state that can't be told apart.
    """
    refuse_zero_redundancy(optimizer, "the optimizer")
    _check_keys(optimizer)
    own = own_entries(optimizer)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise StateError(
                f"param group {number} of {type(optimizer).__name__} has parameters of shapes {unknown} that the "
                "module does not have; build the optimizer from the module's parameters in configure_optimizers"
            )
        groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
    kept: Mapping[Any, Any] = optimizer.state
    of_none = {key: value for key, value in kept.items() if isinstance(key, str)}
    if both := of_none.keys() & names.values():
        raise StateError(f"{type(optimizer).__name__} has state under {min(both)!r}, which is a parameter's name, too")
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items() if id(p) in names}
    return {"state": state | of_none, "param_groups": groups, **own}


def refuse_zero_redundancy(optimizer: Optimizer, name: str) -> None:
    """Refuse an optimizer that is sharded in a way of its own.

    Raises:
        StateError: naming it by ``name``.
    """
    if is_of_torch(optimizer, "ZeroRedundancyOptimizer"):
        raise StateError(
            f"{name} is a ZeroRedundancyOptimizer, each rank of which has the state of its own parameters, and not a "
            "word of the others'. Shard the model instead (torch's fully_shard, or ShardedStrategy), which shards "
            "optimizer state, too."
        )


def is_of_torch(value: object, name: str) -> bool:
    """Return whether a value is of torch's class of that name, which takes a second to import."""
    return any(kind.__name__ == name and kind.__module__.startswith("torch.") for kind in type(value).__mro__)


def _check_keys(optimizer: Optimizer) -> None:
    kept: Mapping[Any, Any] = optimizer.state
    for key, values in kept.items():
        of = f"{type(optimizer).__name__} has"
        if isinstance(key, str) and not isinstance(values, Mapping):
            continue
        if not isinstance(key, torch.Tensor):
            raise StateError(
                f"{of} state under {shown(key)}, which is no parameter, so that no load could tell where it belongs; "
                "keep it in a param group, as hyper-parameters are"
            )
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise StateError(f"{of} state that is no dict with texts as keys, for a parameter of {tuple(key.shape)}")


def own_entries(optimizer: Optimizer) -> dict[str, Any]:
    """Return the entries that an optimizer adds to torch's ``state_dict``.

    Args:
        optimizer: any torch optimizer.

    Raises:
        StateError: for one that does more than that, there or when it is loaded, which is not known here.
    """
    name, found = type(optimizer).__name__, dict[str, Any]()
    doing = "hooks on load_state_dict" if has_load_hooks(optimizer) else ""
    if saves_in_its_own_way(optimizer):
        state_dict = optimizer.state_dict()
        found = {key: value for key, value in state_dict.items() if key not in _OF_TORCH}
        if state_dict and not state_dict.keys() >= {*_OF_TORCH}:  # Lightning's stand-in for no optimizer has none
            doing = f"a state_dict of its own, of {sorted(map(str, state_dict))}"
        elif found and not _is_left_alone(optimizer, state_dict["state"]):
            doing = f"a state_dict that changes the state of parameters and adds {sorted(map(str, found))}"
    if doing:
        raise StateError(
            f"{name} has {doing}, which a sharded checkpoint does not keep, so that a resumed run would be another "
            "one. Entries beside torch's 'state' and 'param_groups' are kept; or keep such values in "
            "optimizer.param_groups, or save them in on_save_checkpoint and take them back in on_load_checkpoint."
        )
    return found


def _is_left_alone(optimizer: Optimizer, saved: Mapping[Any, Any]) -> bool:
    live = {id(value) for value in optimizer.state.values()}
    return all(id(value) in live for value in saved.values())


def load_own(optimizer: Optimizer, own: Mapping[str, Any]) -> None:
    """Give an optimizer what is of no parameter, as its ``load_state_dict`` takes it; the rest of it is there already.

    Args:
        optimizer: whose state and param groups were loaded.
        own: like its ``state_dict``, without parameters.
    """
    optimizer.state.update(own.get("state", {}))
    entries = {key: value for key, value in own.items() if key not in _OF_TORCH}
    if entries and loads_in_its_own_way(optimizer):
        optimizer.load_state_dict({**Optimizer.state_dict(optimizer), **entries})


def optimizer_leaves(states: list[dict[str, Any]]) -> tuple[Leaves, dict[str, Any]]:
    """Tensors and document of a list of optimizer state dicts, keyed by FQN or, as torch does, by number.

    Raises:
        StateError: for values that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    document: dict[str, Any] = {}
    for number, state in enumerate(states):
        state = state or {"state": {}, "param_groups": []}  # of a LightningModule without optimizers, from Lightning
        if not state.keys() >= {*_OF_TORCH}:
            raise StateError(
                f"optimizer_states/{number} is no state dict as torch's optimizers have it, with 'state' and "
                f"'param_groups': it has {sorted(map(str, state))}"
            )
        own = {k: v for k, v in state["state"].items() if isinstance(k, str) and not isinstance(v, Mapping)}
        values: dict[str, Any] = {}
        having: dict[tuple[Any, ...], list[str]] = {}  # the parameters with a value, by its mark
        for param, found in state["state"].items():
            if param in own:
                continue
            for name, value in found.items():
                key = f"{number}/{_name(param)}/{name}"
                if "/" in name:
                    raise StateError(f"optimizer_states/{key}: the name {name!r} contains a slash")
                if isinstance(value, torch.Tensor) and is_compound(value):
                    inside, records = take_apart(key, value)
                    tensors |= inside
                    for of, record in records.items():
                        add_value(values, of.rpartition("/")[2], _name(param), record)
                elif isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.ndim > 0):
                    tensors[key] = value
                elif (mark := _mark(name, value)) in having:
                    having[mark].append(_name(param))
                else:
                    encoded = encode_small(value, f"optimizer_states/{key}")
                    having[mark] = add_value(values, name, _name(param), encoded)
        groups = {}
        for i, group in enumerate(state["param_groups"]):
            hyper = {k: v for k, v in group.items() if k not in NOT_HYPER}
            where = f"optimizer_states/{number}/param_groups/{i}"
            groups[str(i)] = {"hyper": encode_small(hyper, where), "params": [_name(p) for p in group["params"]]}
        numbered = any(isinstance(p, int) for group in state["param_groups"] for p in group["params"])
        shared = {name: list(by_value.values()) for name, by_value in values.items()}
        document[str(number)] = {"groups": groups, "values": shared, "numbered": numbered}
        entries = {key: value for key, value in state.items() if key not in _OF_TORCH}
        if own or entries:
            document[str(number)]["own"] = _own_document(own, entries, f"optimizer_states/{number}")
    return Leaves(tensors), document


def _own_document(state: Mapping[str, Any], entries: Mapping[Any, Any], where: str) -> dict[str, Any]:
    if odd := [key for key in (*state, *entries) if not isinstance(key, str) or key.startswith("$")]:
        raise StateError(f"{where}: {odd[0]!r} cannot be stored as the name of an entry")
    found: dict[str, Any] = encode_small({**({"state": dict(state)} if state else {}), **entries}, where)
    return found


def _mark(name: str, value: Any) -> tuple[Any, ...]:
    """Return what only equal values of state have in common, where that is sooner found than how they are stored."""
    if type(value) is torch.Tensor and value.layout is torch.strided and is_host_memory(value):
        return name, value.dtype, value.shape, bytes(bytes_of(value))
    return name, type(value), value if type(value) is int else object()


def _name(param: str | int) -> str:
    return param if isinstance(param, str) else f"#{param}"
