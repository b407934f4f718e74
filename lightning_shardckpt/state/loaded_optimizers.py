"""The state of loaded optimizers for ``on_load_checkpoint`` hooks, and the changes that the hooks make.

The optimizers are loaded before the hooks run. Lightning's own strategies load them after ``on_fit_start``, from the
dict that the hooks changed, which overwrites settings of ``on_fit_start``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.module_io import cut
from lightning_shardckpt.state.optimizer import NOT_HYPER, load_extra_entries, optimizer_state


class LoadedOptimizers:
    """Optimizers that are about to be loaded.

    Args:
        optimizers: all of the run.
        names: FQN by ``id`` of their parameters.
        elsewhere: FQNs that only other pipeline stages have.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str], elsewhere: Set[str]) -> None:
        self._optimizers, self._names, self._elsewhere = optimizers, names, elsewhere
        self._new = [None if _has_state(optimizer) else self._state_of(optimizer) for optimizer in optimizers]
        self._loaded: list[dict[str, Any]] = []
        self._settings: set[tuple[int, int, str]] = set()

    def show(self, settings: set[tuple[int, int, str]]) -> list[dict[str, Any]]:
        """Return the loaded state for hooks, in the form of ``on_save_checkpoint``; only tensors are live.

        Args:
            settings: the hyper-parameters that were loaded: optimizer, param group and key.
        """
        self._settings = settings
        self._loaded = [self._state_of(optimizer) for optimizer in self._optimizers]
        return [self._state_of(optimizer) for optimizer in self._optimizers]

    def take(self, left: Sequence[Mapping[str, Any]]) -> None:
        """Apply the changes that hooks made to the result of ``show``; reset optimizers that they removed.

        Hyper-parameters that were loaded are set again, since ``on_fit_start`` may have changed them.

        Raises:
            StateError: for state without a parameter, for param groups or hyper-parameters that are missing, and for a
                removed optimizer that had state before the load.
        """
        for number, (optimizer, loaded, new) in enumerate(zip(self._optimizers, self._loaded, self._new, strict=True)):
            if number < len(left):
                state = left[number]
            elif new is not None:
                groups = loaded["param_groups"]  # the load of a callback's state may have added some
                of_groups = zip(optimizer.param_groups, groups, new["param_groups"], strict=False)
                kept = [_reset(*of_group) for of_group in of_groups]
                state = {**new, "param_groups": kept + groups[len(kept) :]}
            else:
                raise StateError(
                    f"on_load_checkpoint took optimizer {number} out of optimizer_states, but it is loaded, and "
                    f"{type(optimizer).__name__} had state before. To begin with a new one, leave "
                    '"optimizer" and "param_groups" out of ShardCkptIO(resume=[…]).'
                )
            self._change_settings(number, loaded["param_groups"], state["param_groups"])
            self._change_state(optimizer, loaded["state"], state["state"])
            _change_own(optimizer, _own(loaded), _own(state))

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict, in which only the tensors of parameters' state are live."""
        state = optimizer_state(optimizer, self._names)
        of_parameters = {name: values for name, values in state["state"].items() if isinstance(values, Mapping)}
        copied = copy.deepcopy({"param_groups": state["param_groups"], **_own(state)})
        return {**copied, "state": of_parameters | copied["state"]}

    def _change_settings(
        self, number: int, loaded: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]]
    ) -> None:
        optimizer = self._optimizers[number]
        name = f"optimizer {number} ({type(optimizer).__name__})"
        if len(left) != len(loaded):
            raise StateError(f"on_load_checkpoint left {len(left)} of {len(loaded)} param groups of {name}: leave all")
        for i, (group, before, settings) in enumerate(zip(optimizer.param_groups, loaded, left, strict=False)):
            if missing := sorted(before.keys() - settings.keys() - {*NOT_HYPER}):
                raise StateError(f"on_load_checkpoint deleted {missing} of param group {i} of {name}: set other values")
            for key in settings.keys() - {*NOT_HYPER}:
                is_loaded = (number, i, key) in self._settings
                if is_loaded or key not in before or not _is_same(settings[key], before[key]):
                    group[key] = settings[key]

    def _change_state(self, optimizer: Optimizer, loaded: Mapping[str, Any], left: Mapping[str, Any]) -> None:
        of = {self._names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
        if unknown := left.keys() - of.keys() - loaded.keys() - self._elsewhere:
            raise StateError(
                f"on_load_checkpoint gave {type(optimizer).__name__} state of {sorted(map(repr, unknown))[:5]}, "
                "no parameters of it: ShardedStrategy keeps state by their names, as on_save_checkpoint sees it"
            )
        for name in of.keys() & (loaded.keys() - left.keys()):
            optimizer.state.pop(of[name][0], None)
        for name in of.keys() & left.keys():
            values, before, (parameter, group) = left[name], loaded.get(name, {}), of[name]
            changed = {key: value for key, value in values.items() if key not in before or value is not before[key]}
            if changed or values.keys() != before.keys():
                cast = {k: _cast(k, cut(v, before.get(k, parameter)), parameter, group) for k, v in changed.items()}
                optimizer.state[parameter] = {**values, **cast}


def _has_state(optimizer: Optimizer) -> bool:
    return any(isinstance(key, torch.Tensor) for key in optimizer.state)


def _reset(group: Mapping[str, Any], loaded: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings before the load, and those that ``on_fit_start`` has changed since."""
    hyper = {key: value for key, value in group.items() if key in loaded and key not in NOT_HYPER}
    return {key: new.get(key, value) if _is_same(value, loaded[key]) else value for key, value in hyper.items()}


def _own(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without a parameter, and its extra entries."""
    own = {key: value for key, value in state["state"].items() if not isinstance(value, Mapping)}
    return {key: value for key, value in state.items() if key != "param_groups"} | {"state": own}


def _change_own(optimizer: Optimizer, loaded: Mapping[str, Any], left: Mapping[str, Any]) -> None:
    if missing := sorted(loaded.keys() - left.keys()):
        raise StateError(
            f"on_load_checkpoint deleted {missing} from the state of {type(optimizer).__name__}: set other values"
        )
    if not _is_same(loaded, left):
        every: dict[Any, Any] = optimizer.state
        for key in loaded["state"].keys() - left["state"].keys():
            del every[key]
        load_extra_entries(optimizer, copy.deepcopy(left))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or bool(encode_small(one, "optimizer_states") == encode_small(other, "optimizer_states"))


def _cast(key: str, value: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Cast and move a tensor of state as ``Optimizer.load_state_dict`` does."""
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        on_device = group.get("capturable") or group.get("fused")
        return value.to(parameter.device, torch.float32) if on_device else value
    is_cast = value.is_floating_point() and parameter.is_floating_point()
    return value.to(parameter.device, parameter.dtype if is_cast else value.dtype)
