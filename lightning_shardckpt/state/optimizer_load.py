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
        group: the number of its param group.
        name: its FQN.
        stored: its name in the checkpoint; None if it is not stored.
        tied: further stored names of parameters that are tied to it in the model.
        filled: the tensors of state to fill, by name.
    """

    param: torch.Tensor
    group: int
    name: str
    stored: str | None
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
        dtypes: the stored dtypes of parameters by live FQN.
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
        dtypes: Mapping[str, str] | None = None,
        reshaped: Container[str] = (),
    ) -> None:
        self.number, self._optimizer, self._stored = number, optimizer, stored
        self._dtypes, self._reshaped = dtypes or {}, reshaped
        self._group_of = {p: number for number, group in enumerate(stored.groups) for p in group}
        self._rows = [
            self._row(param, group, names[id(param)], same)
            for group, params in enumerate(group["params"] for group in optimizer.param_groups)
            for param in params
        ]
        in_stored = {key for hyper in stored.hyper for key in hyper} - _OF_ANY_CLASS
        own = set(getattr(optimizer, "defaults", ())) - _OF_ANY_CLASS
        only_stored, only_live = in_stored - own.union(*optimizer.param_groups), own - in_stored
        self._other_class: str | None = None
        if stored.hyper and only_stored and only_live:
            self._other_class = (
                f"is of another class in the checkpoint, with {', '.join(sorted(only_stored))} in param groups; "
                f"{type(optimizer).__name__} has {', '.join(sorted(only_live))}. To begin with a new optimizer, load "
                "the model without it"
            )
        self.settings: set[tuple[int, int, str]] = set()

    def _row(self, param: torch.Tensor, group: int, name: str, same: Callable[[str], Sequence[str]]) -> _Row:
        stored = [one for one in same(name) if one in self._group_of]
        pruned = (f"{one}_orig" for one in same(name)) if not stored else ()
        stored = stored or [one for one in pruned if one in self._group_of]
        return _Row(param, group, name, stored[0] if stored else None, stored[1:])

    def compare(
        self, elsewhere: frozenset[str], alike: Callable[[Sequence[str], torch.Tensor], bool]
    ) -> Iterator[str]:
        """Yield a line for each parameter that only one side has, and for state whose shape does not fit its parameter.

        Args:
            elsewhere: parameters of other pipeline stages, which compare these.
            alike: returns whether stored tensors are equal in the boxes of a live tensor.
        """
        where = f"optimizer {self.number}"
        if self._other_class is not None:
            yield f"{where}  {self._other_class}"
            return
        found = {row.stored: row for row in self._rows if row.stored is not None}
        tied = {name: row for row in self._rows for name in row.tied}
        for name in sorted(self._group_of.keys() - found.keys() - elsewhere):
            row = tied.get(name)
            if row is None:
                yield f"{where}: {name}  in checkpoint only"
            elif not self._is_same_state(name, row, alike):
                yield f"{where}: {name}  tied to {row.name} in the model, with other state in the checkpoint"
        for row in self._rows:
            if row.stored is None:
                yield f"{where}: {row.name}  in model only"
                continue
            shape = shape_of(row.param)
            for key in self._stored.tensors.get(row.stored, {}).values():
                spec = self._stored.specs[key]
                if spec.shape != shape and not acts_as_whole(row.param):
                    yield f"{where}: {key}  shape {spec.shape} of state for a sharded parameter of {tuple(shape)}"

    def _is_same_state(self, name: str, row: _Row, alike: Callable[[Sequence[str], torch.Tensor], bool]) -> bool:
        """Return whether a stored parameter has the same state as another that it is tied to in the model."""
        assert row.stored is not None  # it is the first of the stored names
        (own, other), (tensors, others) = (
            [kind.get(one, {}) for one in (name, row.stored)] for kind in (self._stored.values, self._stored.tensors)
        )
        if own.keys() != other.keys() or tensors.keys() != others.keys():
            return False
        if not all(_is_equal(value, other[key]) for key, value in own.items()):
            return False
        return all(alike([key, others[entry]], row.param) for entry, key in tensors.items())

    def sources(self) -> dict[str, list[int] | None]:
        """Return the stored groups of the parameters of each live group, by ``<optimizer>/<group>``; None if empty."""
        found = dict[str, list[int] | None]()
        for number, group in enumerate(self._optimizer.param_groups):
            stored = [row.stored for row in self._rows if row.group == number]
            numbers = list(dict.fromkeys(self._group_of[name] for name in stored if name is not None))
            found[f"{self.number}/{number}"] = numbers if group["params"] else None
        return found

    def live_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters and the tensors of their state."""
        for row in self._rows:
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
            for stored, row in self._loaded_rows():
                param, shape = row.param, shape_of(row.param)
                state = self._optimizer.state.get(param, {})
                for name, key in self._stored.tensors.get(stored, {}).items():
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
        follows = dtype.is_floating_point and param.is_floating_point() and self._dtypes.get(row.name) == stored
        return param.dtype if follows else dtype

    def apply(self, sources: Mapping[str, list[int] | None]) -> list[str]:
        """Put the filled tensors, the values and the hyper-parameters in place; return notes for the user.

        State of parameters without stored state is kept.

        Args:
            sources: the results of ``sources``, merged over ranks so that all pipeline stages decide alike.
        """
        groups, used = self._optimizer.param_groups, set[str]()
        for stored, row in self._loaded_rows():
            values = self._stored.values.get(stored, {})
            values = copy.deepcopy(values) if stored in used else values  # tied in the checkpoint only
            used.add(stored)
            on_device = bool(groups[row.group].get("capturable") or groups[row.group].get("fused"))
            state = {name: _move(name, value, row.param, on_device) for name, value in values.items()} | row.filled
            self._optimizer.state.pop(row.param, None)
            if state:
                self._optimizer.state[row.param] = state
        if self._other_class is not None:
            return []
        notes = [note for i, group in enumerate(groups) for note in self._apply_hyper(i, group, sources)]
        load_extra_entries(self._optimizer, self._stored.own)  # may replace the groups
        return notes

    def _loaded_rows(self) -> Iterator[tuple[str, _Row]]:
        """Yield the parameters whose state is loaded, with their stored names."""
        for row in self._rows if self._other_class is None else ():
            if row.name not in self._reshaped and row.stored is not None:
                yield row.stored, row

    def _apply_hyper(
        self, number: int, group: dict[str, Any], sources: Mapping[str, list[int] | None]
    ) -> Iterator[str]:
        """Load a group's hyper-parameters from the stored groups of its parameters; yield notes for the user.

        A group without parameters on any rank uses the stored group of the same number, if that can be the same group.
        """
        numbers = sources[f"{self.number}/{number}"]
        if numbers is None:
            stored, same_count = self._stored.groups, len(self._stored.groups) == len(self._optimizer.param_groups)
            numbers = [number] if number < len(stored) and (same_count or not stored[number]) else []
        where, hyper = f"optimizer {self.number}, param group {number}", [self._stored.hyper[i] for i in numbers]
        keys = dict.fromkeys(chain(*hyper))
        for key in keys:
            values = [one[key] for one in hyper if key in one]
            if all(_is_equal(value, values[0]) for value in values):
                group[key] = copy.deepcopy(values[0])  # another group may use it, too
                self.settings.add((self.number, number, key))
            else:
                kept = group.get(key)
                yield f"{where}: its parameters were in groups {numbers} with {key} = {values}; kept {kept!r}"
        missing = [k for k in group if numbers and k not in keys and k not in (*NOT_HYPER, _OF_SCHEDULERS)]
        if missing:
            yield f"{where}: not in the checkpoint, kept as configured: {missing}"


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


def _move(name: str, value: Any, param: torch.Tensor, on_device: bool) -> Any:
    """Move a tensor to the device of ``Optimizer.load_state_dict``: ``step`` stays on the host unless fused."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(param.device) if on_device or name != "step" else value
