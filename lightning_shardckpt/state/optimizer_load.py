"""Loading the state of one optimizer: compare first, then fill its tensors, then apply.

Parameters are matched by name; state that is stored by number is named first, see ``join_groups``. Live state of the
right shape is filled in place. Hyper-parameters follow the parameters into their current param groups.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.dtensor_layout import acts_as_whole, is_like, new_like
from lightning_shardckpt.state.optimizer import NOT_HYPER, load_extra_entries
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

Keyed: TypeAlias = tuple[str, torch.Tensor]
"""A tensor with the key under which it is stored."""
Groups: TypeAlias = list[list[list[str]]]
"""The names of the parameters in each param group of each optimizer."""


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
        name: its FQN.
        stored: its name in the checkpoint.
        tied: further stored names of parameters that are tied to it in the model.
        filled: the tensors of state to fill, by name.
    """

    param: torch.Tensor
    name: str
    stored: str
    tied: Sequence[str] = ()
    filled: dict[str, torch.Tensor] = field(default_factory=dict)


def join_groups(parts: Sequence[Groups], order: Sequence[str]) -> Groups:
    """Return the param groups of the whole model from those of all ranks, of which pipeline stages have a part.

    Numbers in torch's state dicts count the parameters in them. A group that stages have in another order than the
    model's is empty in the result.

    Args:
        parts: the groups of each rank.
        order: the names of all parameters of the model in order; needed if ranks have different ones.
    """
    if all(part == parts[0] for part in parts):
        return parts[0]
    places = {name: place for place, name in enumerate(order)}

    def join(groups: Sequence[list[str]]) -> list[str]:
        in_order = all(sorted(group, key=places.__getitem__) == group for group in groups)
        return sorted({*chain(*groups)}, key=places.__getitem__) if in_order else []

    by_optimizer = (zip_longest(*optimizers, fillvalue=[]) for optimizers in zip_longest(*parts, fillvalue=[]))
    return [[join(groups) for groups in optimizer] for optimizer in by_optimizer]


class OptimizerLoad:
    """The load of one optimizer: compare first, then fill its tensors, then apply.

    Args:
        number: of the optimizer.
        optimizer: the live optimizer.
        stored: the optimizer in the checkpoint.
        names: FQN by ``id`` of the live parameters.
        same: returns all names, live and stored, of the tensor with a live FQN.
        dtypes: returns the stored dtype of a parameter by live FQN.
        reshaped: live FQNs of parameters that were stored with another shape; they get no state.

    Attributes:
        settings: the hyper-parameters that ``apply`` has loaded: optimizer, param group and key.
    """

    def __init__(
        self,
        number: int,
        optimizer: Optimizer,
        stored: StoredOptimizer,
        names: Mapping[int, str],
        same: Callable[[str], Sequence[str]],
        *,
        dtypes: Callable[[str], str | None] = lambda name: None,
        reshaped: Container[str] = (),
    ) -> None:
        self._dtype_of_parameter, self._reshaped = dtypes, reshaped
        self.number, self._optimizer, self._stored = number, optimizer, stored
        self._is_other = bool(stored.hyper) and all(self._settings())
        self._group_of = {p: number for number, group in enumerate(stored.groups) for p in group}
        groups = [group["params"] for group in optimizer.param_groups]
        self._rows = [[self._row(param, names[id(param)], same) for param in params] for params in groups]
        self.settings: set[tuple[int, int, str]] = set()

    def _row(self, param: torch.Tensor, name: str, same: Callable[[str], Sequence[str]]) -> _Row:
        stored = [one for one in same(name) if one in self._group_of]
        pruned = (f"{one}_orig" for one in same(name)) if not stored else ()
        stored = stored or [one for one in pruned if one in self._group_of] or [name]
        return _Row(param, name, stored[0], stored[1:])

    def compare(
        self, differences: list[str], elsewhere: frozenset[str], alike: Callable[[Sequence[str], torch.Tensor], bool]
    ) -> None:
        """Add parameters that only one side has, and state whose shape does not fit its parameter, to ``differences``.

        Args:
            differences: collects them.
            elsewhere: parameters of other pipeline stages, which compare these.
            alike: returns whether stored tensors are equal in the boxes of a live tensor.
        """
        where = f"optimizer {self.number}"
        if self._is_other:
            differences.append(f"{where}  {self._other_class()}")
            return
        rows = {row.stored: row for row in chain.from_iterable(self._rows)}
        tied = {name: row for row in rows.values() for name in row.tied}
        for name in sorted(self._group_of.keys() - rows.keys() - elsewhere):
            row = tied.get(name)
            if row is not None and self._is_same_state(name, row, alike):
                continue
            tie = f"tied to {row.name} in the model, with other state in the checkpoint" if row is not None else None
            differences.append(f"{where}: {name}  {tie or 'in checkpoint only'}")
        for row in rows.values():
            if row.stored not in self._group_of:
                differences.append(f"{where}: {row.name}  in model only")
                continue
            self._compare_state(row, differences)

    def _settings(self) -> tuple[set[str], set[str]]:
        """Return the settings that only the stored optimizer has, and those that only the live one's class has."""
        stored = {key for hyper in self._stored.hyper for key in hyper} - _OF_ANY_CLASS
        own = set(getattr(self._optimizer, "defaults", ())) - _OF_ANY_CLASS
        return stored - own.union(*self._optimizer.param_groups), own - stored

    def _other_class(self) -> str:
        stored, live = (", ".join(sorted(keys)) for keys in self._settings())
        return (
            f"is of another class in the checkpoint, with {stored} in param groups; {type(self._optimizer).__name__} "
            f"has {live}. To begin with a new optimizer, load the model without it"
        )

    def _is_same_state(self, name: str, row: _Row, alike: Callable[[Sequence[str], torch.Tensor], bool]) -> bool:
        """Return whether a stored parameter has the same state as another that it is tied to in the model."""
        values, tensors = self._stored.values, self._stored.tensors
        own, other = values.get(name, {}), values.get(row.stored, {})
        own_tensors, other_tensors = tensors.get(name, {}), tensors.get(row.stored, {})
        if own.keys() != other.keys() or own_tensors.keys() != other_tensors.keys():
            return False
        if not all(_is_equal(value, other[key]) for key, value in own.items()):
            return False
        return all(alike([key, other_tensors[entry]], row.param) for entry, key in own_tensors.items())

    def _compare_state(self, row: _Row, differences: list[str]) -> None:
        shape = shape_of(row.param)
        for key in self._stored.tensors.get(row.stored, {}).values():
            spec = self._stored.specs[key]
            if spec.shape != shape and not acts_as_whole(row.param):
                problem = f"shape {spec.shape} of state for a sharded parameter of {tuple(shape)}"
                differences.append(f"optimizer {self.number}: {key}  {problem}")

    def sources(self) -> dict[str, list[int] | None]:
        """Return the stored groups of the parameters of each live group, by ``<optimizer>/<group>``; None if empty."""
        return {
            f"{self.number}/{number}": self._groups_of(rows) if rows else None
            for number, rows in enumerate(self._rows)
        }

    def _groups_of(self, rows: list[_Row]) -> list[int]:
        return list(dict.fromkeys(self._group_of[row.stored] for row in rows if row.stored in self._group_of))

    def live_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters and the tensors of their state."""
        for row in chain.from_iterable(self._rows):
            yield row.param
            state = self._optimizer.state.get(row.param, {})
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def tensors(self, shared: Container[int]) -> tuple[list[Keyed], list[Keyed]]:
        """Return the tensors to fill, with their stored keys: live state that fits, and new memory.

        All are sharded like their parameters. Nothing live changes yet. Parameters that are tied only in the checkpoint
        get separate tensors; so does state whose ``id`` is in ``shared``, since it shares memory.
        """
        live, new = list[Keyed](), list[Keyed]()
        with without_torch_function():  # for speed: sharded tensors are asked for their layout many times
            for row in self._loaded_rows():
                param, shape = row.param, shape_of(row.param)
                state = self._optimizer.state.get(param, {})
                for name, key in self._stored.tensors.get(row.stored, {}).items():
                    spec, current = self._stored.specs[key], state.get(name)
                    if spec.shape != shape and not acts_as_whole(param):
                        continue
                    dtype, place = self._dtype(spec.dtype, row), new
                    if spec.shape != shape:
                        tensor = torch.empty(spec.shape, dtype=dtype, device=param.device)
                    elif current is not None and is_like(current, param, dtype) and id(current) not in shared:
                        tensor, place = current, live
                    else:
                        tensor = new_like(param, dtype)
                    place.append((key, tensor))
                    row.filled[name] = tensor
        return live, new

    def _dtype(self, stored: str, row: _Row) -> torch.dtype:
        """Return the parameter's dtype for state that was stored in the parameter's stored dtype, else the state's."""
        dtype, param = TORCH_DTYPES[stored], row.param
        if not dtype.is_floating_point or dtype == param.dtype:
            return dtype
        before = self._dtype_of_parameter(row.name)
        return param.dtype if before == stored and param.is_floating_point() else dtype

    def apply(self, sources: Mapping[str, list[int] | None]) -> list[str]:
        """Put the filled tensors, the values and the hyper-parameters in place; return notes for the user.

        State of parameters without stored state is kept.

        Args:
            sources: the results of ``sources``, merged over ranks so that all pipeline stages decide alike.
        """
        on_device = {
            id(param)
            for group in self._optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for param in group["params"]
        }
        used = set[str]()
        for row in self._loaded_rows():
            values = self._stored.values.get(row.stored, {})
            values = copy.deepcopy(values) if row.stored in used else values  # tied in the checkpoint only
            used.add(row.stored)
            state = {k: _move(k, v, row.param, id(row.param) in on_device) for k, v in values.items()} | row.filled
            self._optimizer.state.pop(row.param, None)
            if state:
                self._optimizer.state[row.param] = state
        groups = enumerate(self._optimizer.param_groups if not self._is_other else ())
        notes = [note for i, group in groups for note in self._apply_hyper(i, group, sources[f"{self.number}/{i}"])]
        load_extra_entries(self._optimizer, self._stored.own if not self._is_other else {})
        return notes

    def _loaded_rows(self) -> Iterator[_Row]:
        """Yield the parameters whose state is loaded."""
        for row in chain.from_iterable(self._rows if not self._is_other else ()):
            if row.name not in self._reshaped and row.stored in self._group_of:
                yield row

    def _apply_hyper(self, number: int, group: dict[str, Any], sources: list[int] | None) -> list[str]:
        """Load a group's hyper-parameters from the stored groups of its parameters; return notes for the user.

        A group without parameters on any rank uses the stored group of the same number, if that can be the same group.
        """
        if sources is None:
            stored, same_count = self._stored.groups, len(self._stored.groups) == len(self._optimizer.param_groups)
            sources = [number] if number < len(stored) and (same_count or not stored[number]) else []
        where = f"optimizer {self.number}, param group {number}"
        notes = []
        for key in dict.fromkeys(k for i in sources for k in self._stored.hyper[i]):
            values = [self._stored.hyper[i][key] for i in sources if key in self._stored.hyper[i]]
            if any(not _is_equal(v, values[0]) for v in values[1:]):
                kept = group.get(key)
                notes.append(f"{where}: its parameters were in groups {sources} with {key} = {values}; kept {kept!r}")
            else:
                group[key] = copy.deepcopy(values[0])  # another group may use it, too
                self.settings.add((self.number, number, key))
        stored_keys = {k for i in sources for k in self._stored.hyper[i]}
        missing = [k for k in group if sources and k not in stored_keys and k not in (*NOT_HYPER, _OF_SCHEDULERS)]
        if missing:
            notes.append(f"{where}: not in the checkpoint, kept as configured: {missing}")
        return notes


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


def _move(name: str, value: Any, param: torch.Tensor, on_device: bool) -> Any:
    """Move a tensor to the device of ``Optimizer.load_state_dict``: ``step`` stays on the host unless fused."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(param.device) if on_device or name != "step" else value
