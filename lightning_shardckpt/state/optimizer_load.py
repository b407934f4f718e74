"""Bring a live optimizer to a stored state: compare first, then fill its tensors, then apply.

Parameters are matched by name, or by number as torch does where names were not stored. State that is there and fits is
filled in place; hyper-parameters follow the parameters into whatever param groups they are in now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.state.compound_tensors import MARK, compound_names, put_together
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.dtensor_layout import acts_as_whole, is_like, layout_of, new_like
from lightning_shardckpt.state.model import Differences
from lightning_shardckpt.state.optimizer import NOT_HYPER, load_own
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

Keyed: TypeAlias = tuple[str, torch.Tensor]
"""A tensor with the key under which it is stored."""


_OF_SCHEDULERS = "initial_lr"
_OF_ANY_CLASS = {
    *("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay", _OF_SCHEDULERS),
}
"""Settings that came to classes of torch over the years, or that schedulers add: they tell no class from another."""


@dataclass(slots=True, eq=False)
class _Row:
    """A live parameter, and the stored state that it takes.

    Attributes:
        param: the parameter.
        name: its FQN.
        stored: its name in the checkpoint; None while it is not known.
        tied: further stored names that are one with it here.
        keeps: whether all state that it has stays.
        filled: by name, the tensors of state that are filled.
    """

    param: torch.Tensor
    name: str
    stored: str | None
    tied: Sequence[str] = ()
    keeps: bool = False
    filled: dict[str, torch.Tensor] = field(default_factory=dict)


class OptimizerLoad:
    """The plan to bring one live optimizer to a stored state: compare first, then fill its tensors, then apply.

    Args:
        optimizer: the live optimizer.
        stored: its counterpart in the checkpoint.
        names: FQN by ``id`` of the live parameters.
        same: gives all names, live and stored, of the tensor that has a live FQN, see ``model.same_tensor``.
        whole: on a pipeline stage, the FQNs of all parameters of the model in order; what a stored number means is
            then found out together with the other stages, see ``join_groups``.
        parts: "optimizer" in it if the state of parameters is to be taken, "param_groups" if hyper-parameters are.
        skips: tells by name what is to be left besides; a parameter that is keeps its state, too. None: nothing.
        dtypes: the stored dtype of a parameter, by live FQN, if state may be converted to another dtype.
        reshaped: live FQNs of parameters that were stored with another shape; they get no state.
    """

    def __init__(
        self,
        number: int,
        optimizer: Optimizer,
        stored: StoredOptimizer,
        names: Mapping[int, str],
        same: Callable[[str], Sequence[str]],
        whole: Sequence[str] = (),
        *,
        parts: frozenset[str] = frozenset({"optimizer", "param_groups"}),
        skips: Callable[[str], bool] | None = None,
        dtypes: Callable[[str], str | None] | None = None,
        reshaped: Container[str] = (),
    ) -> None:
        self._dtype_of_parameter, self._reshaped = dtypes, reshaped
        self.number, self._optimizer, self._stored = number, optimizer, stored
        self.is_joined = stored.numbered and bool(whole)
        self._skips, self._takes_state, self._takes_hyper = skips, "optimizer" in parts, "param_groups" in parts
        self._is_other = bool(stored.hyper) and all(self._settings()) and (self._takes_state or self._takes_hyper)
        self._group_of = {p: number for number, group in enumerate(stored.groups) for p in group}
        live = [group["params"] for group in optimizer.param_groups]
        self._mapped = not stored.numbered or self.is_joined or [*map(len, live)] == [*map(len, stored.groups)]
        self._rows: list[list[_Row]] = []
        for group_number, params in enumerate(live):
            # torch numbers parameters in order; the order is the only thing to go by
            by_order = stored.groups[group_number] if stored.numbered and self._mapped and not self.is_joined else ()
            rows = []
            for place, param in enumerate(params):
                name = names[id(param)]
                found: Sequence[str] = [by_order[place]] if by_order else []
                if not stored.numbered:
                    found = [one for one in same(name) if one in self._group_of]
                    pruned = (f"{one}_orig" for one in same(name)) if not found else ()
                    found = found or [one for one in pruned if one in self._group_of] or [name]
                keeps = not self._takes_state or (skips is not None and skips(name))
                rows.append(_Row(param, name, found[0] if found else None, found[1:], keeps))
            self._rows.append(rows)
        if skips is not None:  # so that it is known which patterns are the name of something
            for entry in self._entries():
                self._stays(*entry)

    def _stays(self, *path: str) -> bool:
        """Return whether an entry of the optimizer is skipped by name: a parameter and a key, or a group and a key."""
        return self._skips is not None and self._skips("/".join(("optimizer", str(self.number), *path)))

    def _entries(self) -> Iterator[tuple[str, ...]]:
        """Live or stored name of a parameter and key of its state; param groups and their keys."""
        of = {param: self._stored.entries(param) for param in self._group_of}
        every = list(dict.fromkeys(key for keys in of.values() for key in keys))
        for number, (group, rows) in enumerate(zip(self._optimizer.param_groups, self._rows, strict=True)):
            for row in rows:
                for key in every if self.is_joined else of.pop(row.stored, ()) if row.stored is not None else ():
                    yield row.name, key
            yield from (("param_groups", str(number), key) for key in group if key not in NOT_HYPER)
        yield from (("own", key) for key in self._stored.own)
        if not self._stored.numbered:
            yield from ((name, key) for name, keys in of.items() for key in keys)

    def compare(
        self, differences: Differences, elsewhere: frozenset[str], alike: Callable[[Sequence[str], torch.Tensor], bool]
    ) -> None:
        """Note parameters that only one side has, and state whose shape no live parameter can take.

        Args:
            differences: collects them.
            elsewhere: parameters of other pipeline stages, which know better.
            alike: whether stored tensors are equal where a live one is.
        """
        where = f"optimizer {self.number}"
        if self._is_other:
            differences.add(where, self._other_class())
        if self._is_other or self.is_joined:
            return
        if not self._mapped:
            differences.add(where, self._unmapped(in_part=bool(elsewhere)))
            return
        rows = {row.stored: row for row in chain.from_iterable(self._rows)}
        tied = {name: row for row in rows.values() for name in row.tied}
        for name in sorted(self._group_of.keys() - rows.keys() - elsewhere):
            row = tied.get(name)
            skipped = not self._takes_state or (self._skips is not None and self._skips(name))
            if skipped or (row is not None and self._is_same_state(name, row, alike)):
                continue
            other = f"one with {row.name} in the model, with other state in the checkpoint" if row is not None else None
            differences.add(f"{where}: {name}", other or "in checkpoint only")
        for row in rows.values():
            if row.keeps:
                continue
            if row.stored not in self._group_of:
                differences.add(f"{where}: {row.name}", "in model only")
                continue
            self._compare_state(row, differences)

    def _settings(self) -> tuple[set[str], set[str]]:
        """Return the settings that the stored optimizer has alone, and those that the live one's class has alone."""
        stored = {key for hyper in self._stored.hyper for key in hyper} - _OF_ANY_CLASS
        own = set(getattr(self._optimizer, "defaults", ())) - _OF_ANY_CLASS
        return stored - own.union(*self._optimizer.param_groups), own - stored

    def _other_class(self) -> str:
        there, here = (", ".join(sorted(keys)) for keys in self._settings())
        return (
            f"is of another class in the checkpoint: that has {there}, and {type(self._optimizer).__name__} has {here} "
            "in param groups. To begin with a new optimizer, load the model without it"
        )

    def _is_same_state(self, name: str, row: _Row, alike: Callable[[Sequence[str], torch.Tensor], bool]) -> bool:
        """Return whether a stored parameter that is one with another here has the state of that one."""
        assert row.stored is not None
        values, tensors = self._stored.values, self._stored.tensors
        mine, its = values.get(name, {}), values.get(row.stored, {})
        my_tensors, its_tensors = tensors.get(name, {}), tensors.get(row.stored, {})
        if mine.keys() != its.keys() or my_tensors.keys() != its_tensors.keys():
            return False
        if not all(_same(value, its[key]) for key, value in mine.items()):
            return False
        return all(alike([key, its_tensors[entry]], row.param) for entry, key in my_tensors.items())

    def _compare_state(self, row: _Row, differences: Differences) -> None:
        shape = shape_of(row.param)
        for entry, key in self._stored.tensors.get(row.stored or "", {}).items():
            spec = self._stored.specs[key]
            if spec.shape == shape or row.keeps or self._stays(row.name, entry):
                continue
            inside = MARK in entry and isinstance(row.param, DTensor) and bool(layout_of(row.param).cuts)
            if inside or not acts_as_whole(row.param):
                what = f"shape {spec.shape} of state for a sharded parameter of {tuple(shape)}"
                differences.add(f"optimizer {self.number}: {key}", what)

    def groups(self) -> list[list[str]]:
        """FQNs of the live param groups, as this stage has them."""
        return [[row.name for row in rows] for rows in self._rows]

    def join_groups(
        self, parts: Sequence[list[list[str]]], whole: Sequence[str], differences: Differences
    ) -> list[list[str]]:
        """Return the param groups of the whole model, in its order, from what ``groups`` gave on all stages."""
        order = {name: i for i, name in enumerate(whole)}
        where, expected = f"optimizer {self.number}", [len(group) for group in self._stored.groups]
        if any(sorted(group, key=order.__getitem__) != group for part in parts for group in part):
            differences.add(where, "is in another order than the model's parameters, so numbers can't be told apart")
            return []
        count = max(map(len, parts))
        names = [{name for part in parts if g < len(part) for name in part[g]} for g in range(count)]
        joined = [sorted(group, key=order.__getitem__) for group in names]
        if [len(group) for group in joined] != expected:
            sizes = [len(group) for group in joined]
            differences.add(where, f"param groups of {expected} parameters in checkpoint, {sizes} in model")
            return []
        return joined

    def take_numbers(self, joined: Sequence[list[str]], differences: Differences) -> None:
        """Number parameters by the joined groups from now on; notes state whose shape no parameter can take."""
        pairs = zip(joined, self._stored.groups, strict=True) if joined else ()
        number_of = {name: number for a, b in pairs for name, number in zip(a, b, strict=True)}
        for row in chain.from_iterable(self._rows):
            if row.name in number_of:
                row.stored = number_of[row.name]
                self._compare_state(row, differences)

    def _unmapped(self, *, in_part: bool) -> str:
        if in_part:
            return (
                "numbers the parameters of the whole model in the checkpoint, and a pipeline stage cannot tell which "
                "are its own; resume from a directory that ShardedStrategy saved, or without pipeline parallelism"
            )
        sizes = [len(g["params"]) for g in self._optimizer.param_groups]
        return f"param groups of {[len(g) for g in self._stored.groups]} parameters in checkpoint, {sizes} in model"

    def sources(self) -> dict[str, list[int] | None]:
        """Return by ``<optimizer>/<live group>`` the stored groups that its parameters were in; None if it has none."""
        return {
            f"{self.number}/{number}": self._groups_of(number, rows) if rows else None
            for number, rows in enumerate(self._rows)
        }

    def _groups_of(self, number: int, rows: list[_Row]) -> list[int]:
        if self.is_joined:
            return [number] if number < len(self._stored.groups) else []
        return list(dict.fromkeys(self._group_of[row.stored] for row in rows if row.stored in self._group_of))

    def live_tensors(self) -> Iterator[torch.Tensor]:
        """The parameters and all that is in their state."""
        for row in chain.from_iterable(self._rows):
            yield row.param
            state = self._optimizer.state.get(row.param, {})
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def tensors(self, shared: Container[int]) -> tuple[list[Keyed], list[Keyed]]:
        """The tensors to fill, with their stored keys: live state that can take what is stored, and memory that is new.

        All are laid out like their parameters. Nothing live changes yet. Parameters that are tied in the checkpoint and
        not here have tensors of their own, and so has state whose ``id`` is in ``shared``: its memory is not its alone.
        """
        live, new = list[Keyed](), list[Keyed]()
        with without_torch_function():  # sharded tensors are asked for their layout, again and again
            for row, stored in self._taken():
                param, shape = row.param, shape_of(row.param)
                state, kept = self._optimizer.state.get(param, {}), self._kept_entries(row, stored)
                for name, key in self._stored.tensors.get(stored, {}).items():
                    spec, there = self._stored.specs[key], state.get(name)
                    if name in kept or (spec.shape != shape and not acts_as_whole(param)):
                        continue
                    dtype, place = self._dtype(name, spec.dtype, row), new
                    if spec.shape != shape:
                        tensor = torch.empty(spec.shape, dtype=dtype, device=param.device)
                    elif there is not None and is_like(there, param, dtype) and id(there) not in shared:
                        tensor, place = there, live
                    else:
                        tensor = new_like(param, dtype)
                    place.append((key, tensor))
                    row.filled[name] = tensor
        return live, new

    def _dtype(self, name: str, stored: str, row: _Row) -> torch.dtype:
        """The parameter's dtype for state that was stored in the parameter's dtype, else the stored one."""
        same, param = TORCH_DTYPES[stored], row.param
        is_own = MARK in name or not same.is_floating_point
        if self._dtype_of_parameter is None or is_own or same == param.dtype:
            return same
        before = self._dtype_of_parameter(row.name)
        return param.dtype if before == stored and param.is_floating_point() else same

    def apply(self, sources: Mapping[str, list[int] | None]) -> list[str]:
        """Put the tensors, which are filled, the values and the hyper-parameters in place.

        State of parameters that the checkpoint does not have stays as it is. Returns what a person should know.

        Args:
            sources: of ``sources``, the union over ranks: so all stages of a pipeline decide alike.
        """
        on_device = {
            id(param)
            for group in self._optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for param in group["params"]
        }
        given = set[str]()
        for row, stored in self._taken():
            values = self._stored.values.get(stored, {})
            values = copy.deepcopy(values) if stored in given else values  # what was tied and is not here
            given.add(stored)
            state = {k: _placed(k, v, row.param, id(row.param) in on_device) for k, v in values.items()} | row.filled
            for compound in compound_names(state):
                put_together(compound, state, row.param)
            kept, before = self._kept_entries(row, stored), self._optimizer.state.pop(row.param, {})
            state = {k: v for k, v in state.items() if k not in kept} | {k: before[k] for k in kept if k in before}
            if state:
                self._optimizer.state[row.param] = state
        groups = enumerate(self._optimizer.param_groups if self._takes_hyper and not self._is_other else ())
        notes = [note for i, group in groups for note in self._apply_hyper(i, group, sources[f"{self.number}/{i}"])]
        own = self._stored.own if self._takes_state and not self._is_other else {}
        load_own(self._optimizer, {key: value for key, value in own.items() if not self._stays("own", key)})
        return notes

    def _taken(self) -> Iterator[tuple[_Row, str]]:
        """Yield the parameters that get the state that the checkpoint has of them, with their stored names."""
        for row in chain.from_iterable(self._rows if not self._is_other else ()):
            takes = not row.keeps and row.name not in self._reshaped
            if takes and row.stored is not None and row.stored in self._group_of:
                yield row, row.stored

    def _kept_entries(self, row: _Row, stored: str) -> set[str]:
        """Return the stored entries of a parameter's state that stay as they are.

        Raises:
            MismatchError: if some are to stay that are not there, beside others that are taken.
        """
        if self._skips is None:
            return set()
        entries = {*self._stored.entries(stored)}
        kept = {key for key in entries if self._stays(row.name, key)}
        missing = sorted(kept - self._optimizer.state.get(row.param, {}).keys())
        if missing and kept < entries:
            raise MismatchError(
                f"optimizer {self.number}: {missing} of {row.name} cannot be skipped alone, since the live optimizer "
                f"has none yet: skip 'optimizer/{self.number}/{row.name}/*', or nothing of it"
            )
        return kept

    def _apply_hyper(self, number: int, group: dict[str, Any], sources: list[int] | None) -> list[str]:
        """Hyper-parameters follow the parameters: a group takes those of the groups that its parameters were in.

        One without parameters on any rank takes those of the same number, where that can be the same group.
        """
        if sources is None:
            stored, same_count = self._stored.groups, len(self._stored.groups) == len(self._optimizer.param_groups)
            sources = [number] if number < len(stored) and (same_count or not stored[number]) else []
        where = f"optimizer {self.number}, param group {number}"
        notes = []
        for key in dict.fromkeys(k for i in sources for k in self._stored.hyper[i]):
            if self._stays("param_groups", str(number), key):
                continue
            values = [self._stored.hyper[i][key] for i in sources if key in self._stored.hyper[i]]
            if any(not _same(v, values[0]) for v in values[1:]):
                kept = group.get(key)
                notes.append(f"{where}: its parameters were in groups {sources} with {key} = {values}; kept {kept!r}")
            else:
                group[key] = copy.deepcopy(values[0])  # another group may take it, too
        known = {k for i in sources for k in self._stored.hyper[i]}
        missing = [k for k in group if sources and k not in known and k not in (*NOT_HYPER, _OF_SCHEDULERS)]
        if missing:
            notes.append(f"{where}: not in the checkpoint, kept as configured: {missing}")
        return notes


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


def _placed(name: str, value: Any, param: torch.Tensor, on_device: bool) -> Any:
    """Tensors go where torch's ``Optimizer.load_state_dict`` puts them: ``step`` stays on the host unless fused."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(param.device) if on_device or name != "step" else value
