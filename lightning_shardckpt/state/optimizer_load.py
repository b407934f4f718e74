"""Bring a live optimizer to a stored state: compare first, then fill its tensors, then apply.

Parameters are matched by name, or by number as torch does where names were not stored. State that is there and fits is
filled in place; hyper-parameters follow the parameters into whatever param groups they are in now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.state.compound_tensors import MARK, compound_names, put_together
from lightning_shardckpt.state.dtensor_layout import acts_as_whole, is_like, layout_of, new_like
from lightning_shardckpt.state.model import Differences
from lightning_shardckpt.state.optimizer import NOT_HYPER, load_own
from lightning_shardckpt.state.stored_optimizer import StoredOptimizer
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

# ── parts that stay as they are ───────────────────────────────────────────────────────────────────────────────────────
# Parts of an optimizer that a load leaves: hyper-parameters, state of parameters, single entries of it.


class Leaving:
    """The parts of one optimizer that stay as they are.

    Args:
        number: which one it is, for the names.
        parts: "optimizer" in it if the state of parameters is to be taken, "param_groups" if hyper-parameters are.
        is_skipped: tells by name what is to be left besides; a parameter that is keeps its state, too. None: nothing.
    """

    def __init__(
        self,
        number: int,
        parts: frozenset[str] = frozenset({"optimizer", "param_groups"}),
        is_skipped: Callable[[str], bool] | None = None,
    ) -> None:
        self._number, self._state, self.hyper = number, "optimizer" in parts, "param_groups" not in parts
        self._is_skipped = is_skipped

    @property
    def all(self) -> bool:
        """Whether nothing of the optimizer is taken."""
        return not self._state and self.hyper

    @property
    def has_names(self) -> bool:
        """Whether anything is left by its name. Where nothing is, as in nearly all loads, nobody need ask for each."""
        return self._is_skipped is not None

    def look_at(self, entries: Iterable[tuple[str, str]]) -> None:
        """Ask for all of these, so that it is known which patterns are the name of something."""
        for name, key in entries:
            self.entry(name, key)

    def param(self, name: str) -> bool:
        """Return whether all state of a parameter stays."""
        return not self._state or (self._is_skipped is not None and self._is_skipped(name))

    def entry(self, name: str, key: str) -> bool:
        """Return whether an entry of a parameter's state stays."""
        return self._is_skipped is not None and self._is_skipped(f"optimizer/{self._number}/{name}/{key}")

    def own(self, key: str) -> bool:
        """Return whether an entry of the state that is of no parameter stays."""
        return not self._state or self.entry("own", key)

    def setting(self, group: int, key: str) -> bool:
        """Return whether a hyper-parameter of a param group stays."""
        return self.entry(f"param_groups/{group}", key)

    def entries(self, name: str, stored: Iterable[str], live: Mapping[str, Any]) -> set[str]:
        """The stored entries of a parameter's state that stay.

        Raises:
            MismatchError: if some are to stay that are not there, beside others that are taken.
        """
        stored = {*stored}
        left = {key for key in stored if self.entry(name, key)}
        missing = sorted(left - live.keys())
        if missing and left < stored:
            raise MismatchError(
                f"optimizer {self._number}: {missing} of {name} cannot be skipped alone, since the live optimizer has "
                f"none yet: skip 'optimizer/{self._number}/{name}/*', or nothing of it"
            )
        return left


Keyed: TypeAlias = tuple[str, torch.Tensor]
"""A tensor with the key under which it is stored."""


_OF_SCHEDULERS = "initial_lr"
_OF_ANY_CLASS = {
    *("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay", _OF_SCHEDULERS),
}
"""Settings that came to classes of torch over the years, or that schedulers add: they tell no class from another."""


class OptimizerLoad:
    """The plan to bring one live optimizer to a stored state: compare first, then fill its tensors, then apply.

    Args:
        optimizer: the live optimizer.
        stored: its counterpart in the checkpoint.
        names: FQN by ``id`` of the live parameters.
        same: gives all names, live and stored, of the tensor that has a live FQN, see ``model.same_tensor``.
        whole: on a pipeline stage, the FQNs of all parameters of the model in order; what a stored number means is
            then found out together with the other stages, see ``join_groups``.
        leaving: what stays as it is.
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
        leaving: Leaving | None = None,
        dtypes: Callable[[str], str | None] | None = None,
        reshaped: Container[str] = (),
    ) -> None:
        self._dtype_of_parameter, self._reshaped = dtypes, reshaped
        self.number, self._optimizer, self._stored = number, optimizer, stored
        self.is_joined = stored.numbered and bool(whole)
        self._stored_name: dict[int, str] = {}
        self._filled: dict[tuple[int, str], torch.Tensor] = {}  # by id of the parameter and name
        self._names, self._leaving = names, leaving or Leaving(number)
        self._mapped = True
        self._is_other = bool(stored.hyper) and all(self._settings()) and not self._leaving.all
        self._group_of = {p: number for number, group in enumerate(stored.groups) for p in group}
        self._apart: dict[str, int] = {}  # stored names that a live parameter has, too, by its id
        live = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        if self.is_joined:
            pass
        elif stored.numbered:  # torch numbers parameters in order; the order is the only thing to go by
            self._mapped = [len(g) for g in live] == [len(g) for g in stored.groups]
            if self._mapped:
                for a, b in zip(live, stored.groups, strict=True):
                    self._stored_name.update(zip(a, b, strict=True))
        else:
            for i in (i for group in live for i in group):
                found = [n for n in same(names[i]) if n in self._group_of]
                found = found or [n for one in same(names[i]) if (n := f"{one}_orig") in self._group_of]  # pruned
                self._stored_name[i] = found[0] if found else names[i]
                self._apart |= dict.fromkeys(found[1:], i)
        if self._leaving.has_names:
            self._leaving.look_at(self._entries())

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Live or stored name of a parameter and key of its state; param groups and their keys."""
        values, tensors = self._stored.values, self._stored.tensors
        of = {param: [*values.get(param, {}), *tensors.get(param, {})] for param in self._group_of}
        every = list(dict.fromkeys(key for keys in of.values() for key in keys))
        for number, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                stored = self._stored_name.get(id(param))
                for key in every if self.is_joined else of.pop(stored, ()) if stored is not None else ():
                    yield self._names[id(param)], key
            yield from ((f"param_groups/{number}", key) for key in group if key not in NOT_HYPER)
        yield from (("own", key) for key in self._stored.own)
        if not self._stored.numbered:
            yield from ((name, key) for name, keys in of.items() for key in keys)

    def compare(
        self,
        component: Component | None,
        differences: Differences,
        elsewhere: frozenset[str],
        alike: Callable[[Sequence[str], torch.Tensor], bool],
    ) -> None:
        """Note parameters that only one side has, and state whose shape no live parameter can take.

        Args:
            component: the stored tensors of optimizers.
            differences: collects them.
            elsewhere: parameters of other pipeline stages, which know better.
            alike: whether stored tensors are equal where a live one is.
        """
        where = f"optimizer {self.number}"
        known = set(self._group_of)
        if self._is_other:
            differences.add(where, self._other_class())
        if self._is_other or self.is_joined:
            return
        if not self._mapped:
            differences.add(where, self._unmapped(in_part=bool(elsewhere)))
            return
        live = {self._stored_name[id(p)]: p for g in self._optimizer.param_groups for p in g["params"]}
        for name in sorted(known - live.keys() - elsewhere):
            if self._leaving.param(name) or self._is_same_state(name, alike):
                continue
            own = self._names.get(self._apart.get(name, 0))
            what = f"one with {own} in the model, with other state in the checkpoint" if own else "in checkpoint only"
            differences.add(f"{where}: {name}", what)
        for name, param in live.items():
            if self._leaving.param(self._names[id(param)]):
                continue
            if name not in known:
                differences.add(f"{where}: {self._names[id(param)]}", "in model only")
                continue
            self._compare_state(name, param, component, differences)

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

    def _is_same_state(self, name: str, alike: Callable[[Sequence[str], torch.Tensor], bool]) -> bool:
        """Return whether a stored parameter that is one with another here has the state of that one."""
        if name not in self._apart:
            return False
        param = next(p for g in self._optimizer.param_groups for p in g["params"] if id(p) == self._apart[name])
        one, other = name, self._stored_name[id(param)]
        values, tensors = self._stored.values, self._stored.tensors.get(one, {})
        mine, its = values.get(one, {}), values.get(other, {})
        if mine.keys() != its.keys() or tensors.keys() != self._stored.tensors.get(other, {}).keys():
            return False
        if not all(_same(value, its[key]) for key, value in mine.items()):
            return False
        pairs = ([key, self._stored.tensors[other][entry]] for entry, key in tensors.items())
        return all(alike(pair, param) for pair in pairs)

    def _compare_state(
        self, name: str, param: torch.Tensor, component: Component | None, differences: Differences
    ) -> None:
        own, shape = self._names[id(param)], shape_of(param)
        for entry, key in self._stored.tensors.get(name, {}).items():
            spec = component.tensors[key] if component is not None else None
            if spec is None or spec.shape == shape:
                continue
            if self._leaving.param(own) or self._leaving.entry(own, entry):
                continue
            inside = MARK in entry and isinstance(param, DTensor) and bool(layout_of(param).cuts)
            if inside or not acts_as_whole(param):
                what = f"shape {spec.shape} of state for a sharded parameter of {tuple(shape)}"
                differences.add(f"optimizer {self.number}: {key}", what)

    def groups(self) -> list[list[str]]:
        """FQNs of the live param groups, as this stage has them."""
        return [[self._names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]

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

    def take_numbers(self, joined: Sequence[list[str]], component: Component | None, differences: Differences) -> None:
        """Number parameters by the joined groups from now on; notes state whose shape no parameter can take."""
        pairs = zip(joined, self._stored.groups, strict=True) if joined else ()
        number_of = {name: number for a, b in pairs for name, number in zip(a, b, strict=True)}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if self._names[id(param)] in number_of:
                    self._stored_name[id(param)] = name = number_of[self._names[id(param)]]
                    self._compare_state(name, param, component, differences)

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
            f"{self.number}/{number}": self._groups_of(number, group["params"]) if group["params"] else None
            for number, group in enumerate(self._optimizer.param_groups)
        }

    def _groups_of(self, number: int, params: list[torch.Tensor]) -> list[int]:
        if self.is_joined:
            return [number] if number < len(self._stored.groups) else []
        found = [self._group_of.get(self._stored_name.get(id(p), "")) for p in params]
        return list(dict.fromkeys(i for i in found if i is not None))

    def live_tensors(self) -> Iterator[torch.Tensor]:
        """The parameters and all that is in their state."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                yield param
                state = self._optimizer.state.get(param, {})
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def tensors(self, component: Component | None, shared: Container[int]) -> tuple[list[Keyed], list[Keyed]]:
        """The tensors to fill, with their stored keys: live state that can take what is stored, and memory that is new.

        All are laid out like their parameters. Nothing live changes yet. Parameters that are tied in the checkpoint and
        not here have tensors of their own, and so has state whose ``id`` is in ``shared``: its memory is not its alone.
        """
        with without_torch_function():  # sharded tensors are asked for their layout, again and again
            return self._divided(component, shared)

    def _divided(self, component: Component | None, shared: Container[int]) -> tuple[list[Keyed], list[Keyed]]:
        live, new = list[Keyed](), list[Keyed]()
        for param in self._params():
            state, left, shape = self._optimizer.state.get(param, {}), self._left(param), shape_of(param)
            for name, key in self._stored.tensors.get(self._stored_name[id(param)], {}).items():
                if name in left:
                    continue
                assert component is not None
                spec = component.tensors[key]
                there = state.get(name)
                dtype = self._dtype(name, spec.dtype, param)
                if spec.shape == shape:
                    if there is not None and is_like(there, param, dtype) and id(there) not in shared:
                        tensor, found = there, live
                    else:
                        tensor, found = new_like(param, dtype), new
                elif not acts_as_whole(param):
                    continue
                else:
                    tensor, found = torch.empty(spec.shape, dtype=dtype, device=param.device), new
                found.append((key, tensor))
                self._filled[id(param), name] = tensor
        return live, new

    def _dtype(self, name: str, stored: str, param: torch.Tensor) -> torch.dtype:
        """The parameter's dtype for state that was stored in the parameter's dtype, else the stored one."""
        same = TORCH_DTYPES[stored]
        is_own = MARK in name or not same.is_floating_point
        if self._dtype_of_parameter is None or is_own or same == param.dtype:
            return same
        before = self._dtype_of_parameter(self._names.get(id(param), ""))
        return param.dtype if before == stored and param.is_floating_point() else same

    def apply(self, sources: Mapping[str, list[int] | None]) -> list[str]:
        """Put the tensors, which are filled, the values and the hyper-parameters in place.

        State of parameters that the checkpoint does not have stays as it is. Returns what a person should know.

        Args:
            sources: of ``sources``, the union over ranks: so all stages of a pipeline decide alike.
        """
        given = set[str]()
        for group in self._optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for param in group["params"]:
                name = self._stored_name.get(id(param))
                if name not in self._group_of or not self._is_taken(param):
                    continue
                values = self._stored.values.get(name, {})
                values = copy.deepcopy(values) if name in given else values  # what was tied and is not here
                given.add(name)
                state = {k: _placed(k, v, param, on_device) for k, v in values.items()}
                filled = {k: self._filled.get((id(param), k)) for k in self._stored.tensors.get(name, {})}
                state |= {k: tensor for k, tensor in filled.items() if tensor is not None}
                for compound in compound_names(state):
                    put_together(compound, state, param)
                left, before = self._left(param), self._optimizer.state.pop(param, {})
                if left:
                    kept = {k: before[k] for k in left if k in before}
                    state = {k: v for k, v in state.items() if k not in left} | kept
                if state:
                    self._optimizer.state[param] = state
        groups = enumerate(() if self._leaving.hyper or self._is_other else self._optimizer.param_groups)
        notes = [note for i, group in groups for note in self._apply_hyper(i, group, sources[f"{self.number}/{i}"])]
        own = {} if self._is_other else self._stored.own
        load_own(self._optimizer, {k: v for k, v in own.items() if not self._leaving.own(k)})
        return notes

    def _params(self) -> list[torch.Tensor]:
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        there = [p for p in params if self._stored_name.get(id(p)) in self._group_of]
        return [p for p in there if self._is_taken(p)]

    def _is_taken(self, param: torch.Tensor) -> bool:
        """Return whether a parameter gets the state that the checkpoint has of it."""
        name = self._names[id(param)]
        return not self._is_other and name not in self._reshaped and not self._leaving.param(name)

    def _left(self, param: torch.Tensor) -> set[str]:
        if not self._leaving.has_names:
            return set()
        name = self._stored_name[id(param)]
        stored = (*self._stored.values.get(name, {}), *self._stored.tensors.get(name, {}))
        return self._leaving.entries(self._names[id(param)], stored, self._optimizer.state.get(param, {}))

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
            if self._leaving.setting(number, key):
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
