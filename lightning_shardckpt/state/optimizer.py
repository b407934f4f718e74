"""Optimizer state by parameter FQN: its export for a save, and its load.

torch's ``get_optimizer_state_dict`` is not used: it takes a step with zero gradients if the state is still empty, which
changes momenta and parameters (torch 2.13).

Tensors with dims are leaves ``<optimizer>/<fqn>/<name>``. A JSON document holds the rest: 0-dim tensors and numbers
such as ``step``, the hyper-parameters of the param groups, state without a parameter (``optimizer.state["k"]``), and
the extra entries of an optimizer's ``state_dict``.

A load compares first, then fills tensors, then applies the rest. Parameters are matched by name; state that is stored
by number is named first. Live state of the right shape is filled in place. Hyper-parameters follow
the parameters into their current param groups.
"""

from __future__ import annotations

import copy
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
from lightning_shardckpt.state.documents import StoredOptimizer, add_value
from lightning_shardckpt.state.dtensor_layout import acts_as_whole, is_like, new_like
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of, is_host_memory

_OF_TORCH = ("state", "param_groups")
_NOT_HYPER = ("params", "param_names")
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
    extra, groups, kind = extra_entries(optimizer), list[dict[str, Any]](), type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if unknown:
            raise StateError(
                f"param group {number} of {kind} has parameters of shapes {unknown} that the module does not have; "
                "build the optimizer from the module's parameters in configure_optimizers"
            )
        groups.append({**group, "params": [names[id(p)] for p in group["params"]]})
    state, every = dict[str, Any](), dict[Any, Any](optimizer.state)
    for key, values in every.items():
        is_dict = isinstance(values, Mapping)
        if isinstance(key, torch.Tensor):
            if not is_dict or not all(isinstance(name, str) for name in values):
                shape = tuple(key.shape)
                raise StateError(f"{kind} has state that is not a dict with string keys, for a parameter of {shape}")
            if id(key) in names:
                state[names[id(key)]] = dict(values)
        elif not isinstance(key, str) or is_dict:
            raise StateError(
                f"{kind} has state under {shown(key)}, which is not a parameter, so a load could not assign it; keep "
                "it in a param group, like a hyper-parameter"
            )
    own = {key: value for key, value in every.items() if isinstance(key, str)}
    if both := own.keys() & names.values():
        raise StateError(f"{kind} has state under {min(both)!r}, which is a parameter's name, too")
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


def extra_entries(optimizer: Optimizer) -> dict[str, Any]:
    """Return the entries that an optimizer's ``state_dict`` adds to torch's."""
    name, extra = type(optimizer).__name__, dict[str, Any]()
    problem = "hooks on load_state_dict" if has_load_hooks(optimizer) else ""
    if has_own_state_dict(optimizer):
        state_dict = optimizer.state_dict()
        extra = {key: value for key, value in state_dict.items() if key not in _OF_TORCH}
        if state_dict and not state_dict.keys() >= {*_OF_TORCH}:  # Lightning's mock for no optimizer is empty
            problem = f"a state_dict of its own, of {sorted(map(str, state_dict))}"
        elif extra and not {*map(id, state_dict["state"].values())} <= {*map(id, optimizer.state.values())}:
            problem = f"a state_dict that changes the state of parameters and adds {sorted(map(str, extra))}"
    if problem:
        raise StateError(
            f"{name} has {problem}, which a sharded checkpoint does not save, so a resumed run would differ. "
            "Entries beside torch's 'state' and 'param_groups' are kept; or keep such values in "
            "optimizer.param_groups, or save them in on_save_checkpoint and restore them in on_load_checkpoint."
        )
    return extra


def load_extra_entries(optimizer: Optimizer, own: Mapping[str, Any]) -> None:
    """Load state without a parameter and extra entries into an optimizer whose other state is loaded."""
    optimizer.state.update(own.get("state", {}))
    entries = {key: value for key, value in own.items() if key not in _OF_TORCH}
    if entries and type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict({**Optimizer.state_dict(optimizer), **entries})


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
        if not state.keys() >= {*_OF_TORCH}:
            raise StateError(
                f"{where} is not a state dict of a torch optimizer, with 'state' and 'param_groups': it has "
                f"{sorted(map(str, state))}"
            )
        own = {k: v for k, v in state["state"].items() if isinstance(k, str) and not isinstance(v, Mapping)}
        values: dict[str, Any] = {}
        having: dict[tuple[Any, ...], list[str]] = {}  # the parameters with an equal value, by its key
        entries = ((p, *entry) for p, of in state["state"].items() if p not in own for entry in of.items())
        for param, name, value in entries:
            key = f"{number}/{_name(param)}/{name}"
            if "/" in name:
                raise StateError(f"optimizer_states/{key}: the name {name!r} contains a slash")
            if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.ndim > 0):
                tensors[key] = value
            elif (equal := _equality_key(name, value)) in having:
                having[equal].append(_name(param))
            else:
                having[equal] = add_value(values, name, _name(param), encode_small(value, f"optimizer_states/{key}"))
        groups = {}
        for i, group in enumerate(state["param_groups"]):
            hyper = {k: v for k, v in group.items() if k not in _NOT_HYPER}
            params = [_name(param) for param in group["params"]]
            groups[str(i)] = {"hyper": encode_small(hyper, f"{where}/param_groups/{i}"), "params": params}
        numbered = any(isinstance(p, int) for group in state["param_groups"] for p in group["params"])
        shared = {name: list(by_value.values()) for name, by_value in values.items()}
        document[str(number)] = {"groups": groups, "values": shared, "numbered": numbered}
        extra = {key: value for key, value in state.items() if key not in _OF_TORCH}
        if odd := [key for key in (*own, *extra) if not isinstance(key, str) or key.startswith("$")]:
            raise StateError(f"{where}: {odd[0]!r} cannot be stored as the name of an entry")
        if own or extra:
            document[str(number)]["own"] = encode_small({**({"state": own} if own else {}), **extra}, where)
    return Leaves(tensors), document


def _equality_key(name: str, value: Any) -> tuple[Any, ...]:
    """Return a key that only equal values share, quicker to make than their JSON; unique for other types."""
    if type(value) is torch.Tensor and value.layout is torch.strided and is_host_memory(value):
        return name, value.dtype, value.shape, bytes(bytes_of(value))
    return name, type(value), value if type(value) is int else object()


def _name(param: str | int) -> str:
    return param if isinstance(param, str) else f"#{param}"


# ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_OF_SCHEDULERS = "initial_lr"
_OF_ANY_CLASS = {
    *("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay", _OF_SCHEDULERS),
}
"""Settings that newer versions of torch or schedulers add, so that they do not identify the optimizer's class."""


@dataclass(slots=True, eq=False)
class _Row:
    """A live parameter and its stored state.

    Attributes:
        param: the parameter.
        group: the number of its param group.
        name: its FQN.
        stored: its names in the checkpoint: none if it is not stored, several if it is tied in the model only.
        filled: the tensors of state to fill, by name.
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
        optimizer: the live optimizer.
        stored: the optimizer in the checkpoint.
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
        for group, params in enumerate(group["params"] for group in optimizer.param_groups):
            for param, name in ((param, names[id(param)]) for param in params):
                stored_names = [one for one in same(name) if one in self._group_of]
                self._rows.append(_Row(param, group, name, stored_names))
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

        Args:
            elsewhere: parameters of other pipeline stages, which compare these.
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
                if spec.shape != shape and not acts_as_whole(row.param):
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
        """Return the tensors to fill, with their stored keys: live state that fits, and new memory.

        All are sharded like their parameters. Nothing live changes yet. Parameters that are tied only in the checkpoint
        get separate tensors; so does state that is not alone in its memory.

        Args:
            is_alone: whether a tensor shares its memory with no other.
            check: raises an error if the files cannot contain a stored tensor, which is about to get memory.
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
                    elif acts_as_whole(param):
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

        State of parameters without stored state is kept.

        Args:
            sources: the results of ``sources``, merged over ranks so that all pipeline stages decide alike.
        """
        groups, used = self._optimizer.param_groups, set[str]()
        for row in self._loaded:
            stored = row.stored[0]
            values = self._stored.values.get(stored, {})
            values = copy.deepcopy(values) if stored in used else values  # tied in the checkpoint only
            used.add(stored)
            on_device = bool(groups[row.group].get("capturable") or groups[row.group].get("fused"))
            state = {name: self._placed(name, value, row, on_device) for name, value in values.items()} | row.filled
            self._optimizer.state.pop(row.param, None)
            if state:
                self._optimizer.state[row.param] = state
        notes = [note for i, group in enumerate(groups) for note in self._apply_hyper(i, group, sources)]
        load_extra_entries(self._optimizer, self._stored.own)  # may replace the groups
        return notes

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
        missing = [k for k in group if numbers and k not in keys and k not in (*_NOT_HYPER, _OF_SCHEDULERS)]
        if missing:
            yield f"{where}: not in the checkpoint, kept as configured: {missing}"


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)
