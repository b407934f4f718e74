"""Optimizer state by parameter FQN: its export for a save, and its load.

torch's ``get_optimizer_state_dict`` is not used: it takes a step with zero gradients if the state is still empty, which
changes momenta and parameters (torch 2.13).

Tensors with dims are leaves ``<optimizer>/<fqn>/<name>``. A JSON document holds the rest: 0-dim tensors and numbers
such as ``step``, and the hyper-parameters of the param groups. State of no parameter and in no group is refused.

A load compares first, then fills live state of the right shape in place, then applies the rest. Parameters are matched
by name; state that is stored by number is named first. Hyper-parameters follow parameters into their current groups.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.compat.torch_modules import has_load_hooks, has_own_state_dict
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.local_tensors import DTYPES, TORCH_DTYPES, bytes_of, is_host_memory, is_like, new_like
from lightning_shardckpt.state.model import Leaves

_OF_TORCH = ("state", "param_groups")
_NOT_HYPER = ("params", "param_names")
"""Keys of a param group that are not hyper-parameters."""


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state dict with FQNs, ``names`` by ``id`` of the parameter, for numbers. Tensors are live.

    Raises:
        StateError: if the model lacks a parameter of the optimizer, or the optimizer has state of its own.
    """
    refuse_zero_redundancy(optimizer, "the optimizer")
    refuse_own_state(optimizer)
    groups, kind = list[dict[str, Any]](), type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if unknown := [tuple(p.shape) for p in group["params"] if id(p) not in names]:
            raise StateError(
                f"param group {number} of {kind} has parameters of shapes {unknown} that the module does not have; "
                "build the optimizer from the module's parameters in configure_optimizers"
            )
        groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
    state = dict[str, Any]()
    for key, values in optimizer.state.items():
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            shape = tuple(key.shape)
            raise StateError(f"{kind} has state that is not a dict with string keys, for a parameter of {shape}")
        if id(key) in names:
            state[names[id(key)]] = dict(values)
    return {"state": state, "param_groups": groups}


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


def refuse_own_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer with hooks on its load, or with state that is neither of a parameter nor in a param group."""
    entries = optimizer.state_dict() if has_own_state_dict(optimizer) else {}
    keys = (key for key in (*optimizer.state, *entries) if not isinstance(key, torch.Tensor))
    own = [f"state of its own, {shown(key)}," for key in keys if key not in _OF_TORCH]
    if problems := [*own, *(["hooks on load_state_dict"] if has_load_hooks(optimizer) else [])]:
        raise StateError(
            f"{type(optimizer).__name__} has {problems[0]} which a sharded checkpoint does not save, so a resumed run "
            "would differ: keep such values in optimizer.param_groups, in a subclass"
        )


def optimizer_leaves(states: list[dict[str, Any]]) -> tuple[Leaves, dict[str, Any]]:
    """Return the tensors and the document of optimizer state dicts, keyed by FQN or, as torch does, by number.

    Raises:
        StateError: for values that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    document: dict[str, Any] = {}
    for number, state in enumerate(states):
        where = f"optimizer_states/{number}"
        state = state or {"state": {}, "param_groups": []}  # Lightning's, of a LightningModule without optimizers
        if state.keys() != {*_OF_TORCH}:
            raise StateError(
                f"{where} is not a state dict of a torch optimizer, of 'state' and 'param_groups': it has "
                f"{sorted(map(str, state))}"
            )
        if odd := [key for key, entries in state["state"].items() if not isinstance(entries, Mapping)]:
            raise StateError(f"{where}/state: {shown(odd[0])} is not a parameter with a dict of state")
        values: dict[str, dict[Any, Any]] = {}  # by name and key: an equal value, and its parameters
        entries = ((p, *entry) for p, of in state["state"].items() for entry in of.items())
        for param, name, value in entries:
            key = f"{number}/{_name(param)}/{name}"
            if "/" in name:
                raise StateError(f"optimizer_states/{key}: the name {name!r} contains a slash")
            if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.ndim > 0):
                tensors[key] = value
                continue
            equal, shared = _equality_key(value, f"optimizer_states/{key}"), values.setdefault(name, {})
            if equal not in shared:
                shared[equal] = {"value": encode_small(value, f"optimizer_states/{key}"), "params": []}
            shared[equal]["params"].append(_name(param))
        groups = {}
        for i, group in enumerate(state["param_groups"]):
            hyper = {k: v for k, v in group.items() if k not in _NOT_HYPER}
            params = [_name(param) for param in group["params"]]
            groups[str(i)] = {"hyper": encode_small(hyper, f"{where}/param_groups/{i}"), "params": params}
        numbered = any(isinstance(p, int) for group in state["param_groups"] for p in group["params"])
        listed = {name: [*shared.values()] for name, shared in values.items()}
        document[str(number)] = {"groups": groups, "values": listed, "numbered": numbered}
    return Leaves(tensors), document


def _equality_key(value: Any, path: str) -> Any:
    """Return a key that only equal values share: their JSON, or what is quicker to make."""
    if type(value) is torch.Tensor and value.layout is torch.strided and is_host_memory(value):
        return value.dtype, value.shape, bytes(bytes_of(value))
    return value if type(value) is int else json.dumps(encode_small(value, path), sort_keys=True)


def _name(param: str | int) -> str:
    return param if isinstance(param, str) else f"#{param}"


# ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_OF_ANY_CLASS = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay", "initial_lr"}
"""Settings that newer versions of torch or schedulers add, so that they do not identify the optimizer's class."""


@dataclass(slots=True, eq=False)
class _Row:
    """A live parameter, the number of its param group, and its FQN.

    ``stored`` has its names in the checkpoint: none if it is not stored, several if it is tied in the model only;
    ``filled`` the tensors of state to fill, by name.
    """

    param: torch.Tensor
    group: int
    name: str
    stored: list[str]
    filled: dict[str, torch.Tensor] = field(default_factory=dict)


class OptimizerLoad:
    """The load of one optimizer: compare first, then fill its tensors, then apply.

    Args:
        number: of the optimizer.
        optimizer: the live one, ``stored`` the one in the checkpoint.
        names: FQN by ``id`` of the live parameters.
        same: returns all names, live and stored, of the tensor with a live FQN.
        dtypes: the stored dtypes of parameters by live FQN.
        reshaped: live FQNs of parameters that were stored with another shape; they get no state.
    """

    def __init__(
        self,
        number: int,
        optimizer: Optimizer,
        stored: StoredOptimizer,
        names: Mapping[int, str],
        same: Callable[[str], Sequence[str]],
        *,
        dtypes: Mapping[str, str],
        reshaped: Container[str],
    ) -> None:
        self._number, self._optimizer, self._stored, self._dtypes = number, optimizer, stored, dtypes
        self._group_of = {p: number for number, group in enumerate(stored.groups) for p in group}
        self._rows = list[_Row]()
        for param, group in ((p, number) for number, of in enumerate(optimizer.param_groups) for p in of["params"]):
            stored_names = [name for name in same(names[id(param)]) if name in self._group_of]
            self._rows.append(_Row(param, group, names[id(param)], stored_names))
        self._loaded = [row for row in self._rows if row.stored and row.name not in reshaped]

    def other_class(self) -> str | None:
        """Return a line if the settings in the checkpoint are those of another class, so that it cannot be loaded."""
        stored = {key for hyper in self._stored.hyper for key in hyper} - _OF_ANY_CLASS
        own = set(getattr(self._optimizer, "defaults", ())) - _OF_ANY_CLASS
        only_stored, only_live = stored - own.union(*self._optimizer.param_groups), own - stored
        if not (self._stored.hyper and only_stored and only_live):
            return None
        return (
            f"optimizer {self._number}  is of another class in the checkpoint, with {', '.join(sorted(only_stored))} "
            f"in param groups; {type(self._optimizer).__name__} has {', '.join(sorted(only_live))}. To begin with a "
            "new optimizer, load the model without it"
        )

    def compare(self, elsewhere: frozenset[str]) -> Iterator[str]:
        """Yield a line for each parameter that only one side has, and for state whose shape does not fit its parameter.

        Other pipeline stages compare the parameters ``elsewhere``.
        """
        where, found = f"optimizer {self._number}", {name for row in self._rows for name in row.stored}
        for name in sorted(self._group_of.keys() - found - elsewhere):
            yield f"{where}: {name}  in checkpoint only"
        for row in self._rows:
            if not row.stored:
                yield f"{where}: {row.name}  in model only"
                continue
            for other in row.stored[1:]:
                yield f"{where}: {other}  tied to {row.name} in the model, with state of its own in the checkpoint"
            shape = shape_of(row.param)
            for key in self._stored.tensors.get(row.stored[0], {}).values():
                spec = self._stored.specs[key]
                if spec.shape != shape and type(row.param) is DTensor:  # code sees local rows of torch's
                    yield f"{where}: {key}  shape {spec.shape} of state for a sharded parameter of {tuple(shape)}"

    def sources(self) -> dict[str, list[int] | None]:
        """Return the stored groups of the parameters of each live group, by ``<optimizer>/<group>``; None if empty."""
        found = dict[str, list[int] | None]()
        for number, group in enumerate(self._optimizer.param_groups):
            numbers = (self._group_of[row.stored[0]] for row in self._rows if row.group == number and row.stored)
            found[f"{self._number}/{number}"] = list(dict.fromkeys(numbers)) if group["params"] else None
        return found

    def live_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters and the tensors of their state."""
        for row in self._rows:
            state = self._optimizer.state.get(row.param, {})
            yield from (row.param, *(value for value in state.values() if isinstance(value, torch.Tensor)))

    def tensors(
        self, is_alone: Callable[[torch.Tensor], bool], check: Callable[[str], object]
    ) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors to fill, with their stored keys: live state that fits and ``is_alone``, or new.

        All are sharded like their parameters. Nothing live changes yet. Parameters that are tied only in the checkpoint
        get separate tensors. ``check`` raises an error if the files cannot contain a tensor, before it gets memory.
        """
        tensors = list[tuple[str, torch.Tensor]]()
        with without_torch_function():  # for speed: sharded tensors are asked for their layout many times
            for row in self._loaded:
                param, state = row.param, self._optimizer.state.get(row.param, {})
                for name, key in self._stored.tensors.get(row.stored[0], {}).items():
                    spec, current = self._stored.specs[key], state.get(name)
                    dtype = self._dtype(spec.dtype, row)
                    if spec.shape == shape_of(param):
                        fits = current is not None and is_like(current, param, dtype) and is_alone(current)
                        row.filled[name] = current if fits else new_like(param, dtype)
                    elif type(param) is not DTensor:
                        check(key)
                        row.filled[name] = torch.empty(spec.shape, dtype=dtype, device=param.device)
                    else:
                        continue
                    tensors.append((key, row.filled[name]))
        return tensors

    def _dtype(self, stored: str, row: _Row) -> torch.dtype:
        """Return the parameter's dtype for state that was stored in the parameter's stored dtype, else the state's."""
        dtype, param = TORCH_DTYPES[stored], row.param
        follows = dtype.is_floating_point and param.is_floating_point() and self._dtypes.get(row.name) == stored
        return param.dtype if follows else dtype

    def apply(self, sources: Mapping[str, list[int] | None]) -> list[str]:
        """Put the filled tensors, the values and the hyper-parameters in place; return notes for the user.

        State of parameters without stored state is kept. ``sources`` is merged over ranks, so that all pipeline stages
        decide alike.
        """
        groups, used = self._optimizer.param_groups, set[str]()
        for row in self._loaded:
            values = self._stored.values.get(row.stored[0], {})
            values = copy.deepcopy(values) if row.stored[0] in used else values  # tied in the checkpoint only
            used.add(row.stored[0])
            on_device = bool(groups[row.group].get("capturable") or groups[row.group].get("fused"))
            state = {name: self._placed(name, value, row, on_device) for name, value in values.items()} | row.filled
            self._optimizer.state.pop(row.param, None)
            if state:
                self._optimizer.state[row.param] = state
        return [note for i, group in enumerate(groups) for note in self._apply_hyper(i, group, sources)]

    def _placed(self, name: str, value: Any, row: _Row, on_device: bool) -> Any:
        """Move a tensor as ``Optimizer.load_state_dict`` does: ``step`` stays as it is, on the host unless fused."""
        if not isinstance(value, torch.Tensor) or (name == "step" and not on_device):
            return value
        is_moment = name != "step" and value.shape == shape_of(row.param)  # of a parameter without dims
        return value.to(row.param.device, self._dtype(DTYPES[value.dtype], row) if is_moment else None)

    def _apply_hyper(
        self, number: int, group: dict[str, Any], sources: Mapping[str, list[int] | None]
    ) -> Iterator[str]:
        """Load a group's hyper-parameters from the stored groups of its parameters; yield notes for the user.

        A group without parameters on any rank uses the stored group of the same number, if that can be the same group.
        """
        numbers = sources[f"{self._number}/{number}"]
        if numbers is None:
            stored, same_count = self._stored.groups, len(self._stored.groups) == len(self._optimizer.param_groups)
            numbers = [number] if number < len(stored) and (same_count or not stored[number]) else []
        where, hyper = f"optimizer {self._number}, param group {number}", [self._stored.hyper[i] for i in numbers]
        keys = dict.fromkeys(chain(*hyper))
        for key in keys:
            values = [one[key] for one in hyper if key in one]
            if all(_is_equal(value, values[0]) for value in values):
                group[key] = copy.deepcopy(values[0])  # another group may use it, too
            else:
                kept = group.get(key)
                yield f"{where}: its parameters were in groups {numbers} with {key} = {values}; kept {kept!r}"
        if missing := [k for k in group if numbers and k not in (*keys, *_NOT_HYPER, "initial_lr")]:
            yield f"{where}: not in the checkpoint, kept as configured: {missing}"


def _is_equal(a: Any, b: Any) -> bool:
    are_tensors = isinstance(a, torch.Tensor), isinstance(b, torch.Tensor)
    return torch.equal(a, b) if all(are_tensors) else not any(are_tensors) and bool(a == b)
