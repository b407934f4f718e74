"""Optimizer state by parameter FQN.

torch's ``get_optimizer_state_dict`` is not used: it takes a step with zero gradients if the state is still empty, which
changes momenta and parameters (torch 2.13).

Tensors with dims are leaves ``<optimizer>/<fqn>/<name>``. A JSON document holds the rest: 0-dim tensors and numbers
such as ``step``, the hyper-parameters of the param groups, state without a parameter (``optimizer.state["k"]``), and
the extra entries of an optimizer's ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.compat.torch_autograd import has_load_hooks, has_own_load_state_dict, has_own_state_dict
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.documents import add_value
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import bytes_of, is_host_memory

_OF_TORCH = ("state", "param_groups")
NOT_HYPER = ("params", "param_names")
"""Keys of a param group that are not hyper-parameters."""


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state dict with FQNs in place of numbers; tensors are live.

    Args:
        optimizer: any torch optimizer.
        names: FQN by ``id`` of the parameter.

    Raises:
        StateError: if the model lacks a parameter of the optimizer, or the key of some state is ambiguous.
    """
    refuse_zero_redundancy(optimizer, "the optimizer")
    _check_keys(optimizer)
    extra = extra_entries(optimizer)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise StateError(
                f"param group {number} of {type(optimizer).__name__} has parameters of shapes {unknown} that the "
                "module does not have; build the optimizer from the module's parameters in configure_optimizers"
            )
        groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
    every: Mapping[Any, Any] = optimizer.state
    own = {key: value for key, value in every.items() if isinstance(key, str)}
    if both := own.keys() & names.values():
        raise StateError(f"{type(optimizer).__name__} has state under {min(both)!r}, which is a parameter's name, too")
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items() if id(p) in names}
    return {"state": state | own, "param_groups": groups, **extra}


def refuse_zero_redundancy(optimizer: Optimizer, name: str) -> None:
    """Refuse a ZeroRedundancyOptimizer, which is sharded without DTensors."""
    if is_of_torch(optimizer, "ZeroRedundancyOptimizer"):
        raise StateError(
            f"{name} is a ZeroRedundancyOptimizer, of which each rank has the state of its own parameters only. Shard "
            "the model instead (torch's fully_shard, or ShardedStrategy), which shards optimizer state, too."
        )


def is_of_torch(value: object, name: str) -> bool:
    """Return whether a value is an instance of torch's class of that name, which is slow to import."""
    return any(kind.__name__ == name and kind.__module__.startswith("torch.") for kind in type(value).__mro__)


def _check_keys(optimizer: Optimizer) -> None:
    every: Mapping[Any, Any] = optimizer.state
    for key, values in every.items():
        of = f"{type(optimizer).__name__} has"
        if isinstance(key, str) and not isinstance(values, Mapping):
            continue
        if not isinstance(key, torch.Tensor):
            raise StateError(
                f"{of} state under {shown(key)}, which is not a parameter, so a load could not assign "
                "it; keep it in a param group, like a hyper-parameter"
            )
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise StateError(f"{of} state that is not a dict with string keys, for a parameter of {tuple(key.shape)}")


def extra_entries(optimizer: Optimizer) -> dict[str, Any]:
    """Return the entries that an optimizer's ``state_dict`` adds to torch's."""
    name, extra = type(optimizer).__name__, dict[str, Any]()
    problem = "hooks on load_state_dict" if has_load_hooks(optimizer) else ""
    if has_own_state_dict(optimizer):
        state_dict = optimizer.state_dict()
        extra = {key: value for key, value in state_dict.items() if key not in _OF_TORCH}
        if state_dict and not state_dict.keys() >= {*_OF_TORCH}:  # Lightning's mock for no optimizer is empty
            problem = f"a state_dict of its own, of {sorted(map(str, state_dict))}"
        elif extra and not _is_unchanged(optimizer, state_dict["state"]):
            problem = f"a state_dict that changes the state of parameters and adds {sorted(map(str, extra))}"
    if problem:
        raise StateError(
            f"{name} has {problem}, which a sharded checkpoint does not save, so a resumed run would differ. "
            "Entries beside torch's 'state' and 'param_groups' are kept; or keep such values in "
            "optimizer.param_groups, or save them in on_save_checkpoint and restore them in on_load_checkpoint."
        )
    return extra


def _is_unchanged(optimizer: Optimizer, saved: Mapping[Any, Any]) -> bool:
    live = {id(value) for value in optimizer.state.values()}
    return all(id(value) in live for value in saved.values())


def load_extra_entries(optimizer: Optimizer, own: Mapping[str, Any]) -> None:
    """Load state without a parameter and extra entries into an optimizer whose other state is loaded."""
    optimizer.state.update(own.get("state", {}))
    entries = {key: value for key, value in own.items() if key not in _OF_TORCH}
    if entries and has_own_load_state_dict(optimizer):
        optimizer.load_state_dict({**Optimizer.state_dict(optimizer), **entries})


def optimizer_leaves(states: list[dict[str, Any]]) -> tuple[Leaves, dict[str, Any]]:
    """Return the tensors and the document of optimizer state dicts, keyed by FQN or, as torch does, by number.

    Raises:
        StateError: for values that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    document: dict[str, Any] = {}
    for number, state in enumerate(states):
        state = state or {"state": {}, "param_groups": []}  # Lightning's, of a LightningModule without optimizers
        if not state.keys() >= {*_OF_TORCH}:
            raise StateError(
                f"optimizer_states/{number} is not a state dict of a torch optimizer, with 'state' and 'param_groups': "
                f"it has {sorted(map(str, state))}"
            )
        own = {k: v for k, v in state["state"].items() if isinstance(k, str) and not isinstance(v, Mapping)}
        values: dict[str, Any] = {}
        having: dict[tuple[Any, ...], list[str]] = {}  # the parameters with an equal value, by its key
        for param, entries in state["state"].items():
            if param in own:
                continue
            for name, value in entries.items():
                key = f"{number}/{_name(param)}/{name}"
                if "/" in name:
                    raise StateError(f"optimizer_states/{key}: the name {name!r} contains a slash")
                if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.ndim > 0):
                    tensors[key] = value
                elif (equal := _equality_key(name, value)) in having:
                    having[equal].append(_name(param))
                else:
                    encoded = encode_small(value, f"optimizer_states/{key}")
                    having[equal] = add_value(values, name, _name(param), encoded)
        groups = {}
        for i, group in enumerate(state["param_groups"]):
            hyper = {k: v for k, v in group.items() if k not in NOT_HYPER}
            where = f"optimizer_states/{number}/param_groups/{i}"
            groups[str(i)] = {"hyper": encode_small(hyper, where), "params": [_name(p) for p in group["params"]]}
        numbered = any(isinstance(p, int) for group in state["param_groups"] for p in group["params"])
        shared = {name: list(by_value.values()) for name, by_value in values.items()}
        document[str(number)] = {"groups": groups, "values": shared, "numbered": numbered}
        extra = {key: value for key, value in state.items() if key not in _OF_TORCH}
        if own or extra:
            document[str(number)]["own"] = _encode_own(own, extra, f"optimizer_states/{number}")
    return Leaves(tensors), document


def _encode_own(state: Mapping[str, Any], extra: Mapping[Any, Any], where: str) -> Any:
    if odd := [key for key in (*state, *extra) if not isinstance(key, str) or key.startswith("$")]:
        raise StateError(f"{where}: {odd[0]!r} cannot be stored as the name of an entry")
    return encode_small({**({"state": dict(state)} if state else {}), **extra}, where)


def _equality_key(name: str, value: Any) -> tuple[Any, ...]:
    """Return a key that only equal values share, quicker to make than their JSON; unique for other types."""
    if type(value) is torch.Tensor and value.layout is torch.strided and is_host_memory(value):
        return name, value.dtype, value.shape, bytes(bytes_of(value))
    return name, type(value), value if type(value) is int else object()


def _name(param: str | int) -> str:
    return param if isinstance(param, str) else f"#{param}"
