"""The state of loaded optimizers for ``on_load_checkpoint`` hooks, and the changes that the hooks make.

The optimizers are loaded before the hooks run. Lightning's own strategies load them after ``on_fit_start``, from the
dict that the hooks changed, which overwrites settings of ``on_fit_start``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.module_io import cut
from lightning_shardckpt.state.optimizer import NOT_HYPER


class LoadedOptimizers:
    """Optimizers that are about to be loaded.

    Args:
        optimizers: all of the run.
        names: FQN by ``id`` of their parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self._optimizers, self._names = optimizers, names
        self._new = [None if optimizer.state else self._state_of(optimizer) for optimizer in optimizers]
        self._loaded: list[dict[str, Any]] = []

    def show(self) -> list[dict[str, Any]]:
        """Return the loaded state for hooks, in the form of ``on_save_checkpoint``; only tensors are live."""
        self._loaded = [self._state_of(optimizer) for optimizer in self._optimizers]
        return [self._state_of(optimizer) for optimizer in self._optimizers]

    def take(self, left: Sequence[Mapping[str, Any]]) -> None:
        """Apply the changes that hooks made to the result of ``show``; reset optimizers that they removed.

        Raises:
            StateError: for state without a parameter, and for a removed optimizer that had state before the load.
        """
        for number, (optimizer, loaded, new) in enumerate(zip(self._optimizers, self._loaded, self._new, strict=True)):
            if number < len(left):
                self._change(optimizer, loaded["state"], left[number])
                continue
            if new is None:
                raise StateError(
                    f"on_load_checkpoint took optimizer {number} out of optimizer_states, but it is loaded, and "
                    f"{type(optimizer).__name__} had state before. To begin with a new one, leave "
                    '"optimizer" and "param_groups" out of ShardCkptIO(resume=[…]).'
                )
            self._change(optimizer, loaded["state"], new)

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key not in NOT_HYPER}
            | {"params": [self._names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        state = {self._names[id(p)]: dict(values) for p, values in optimizer.state.items() if id(p) in self._names}
        return {"state": state, "param_groups": groups}

    def _change(self, optimizer: Optimizer, loaded: Mapping[str, Any], left: Mapping[str, Any]) -> None:
        for group, settings in zip(optimizer.param_groups, left["param_groups"], strict=False):
            group.update({key: value for key, value in settings.items() if key not in NOT_HYPER})
        parameters = {self._names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        if unknown := left["state"].keys() - parameters.keys() - loaded.keys():
            raise StateError(
                f"on_load_checkpoint gave {type(optimizer).__name__} state of {sorted(map(repr, unknown))[:5]}, "
                "no parameters of it: ShardedStrategy keeps state by their names, as on_save_checkpoint sees it"
            )
        for name in loaded.keys() - left["state"].keys():
            optimizer.state.pop(parameters[name], None)
        for name, values in left["state"].items():
            before = loaded.get(name, {})
            if values.keys() != before.keys() or any(value is not before[key] for key, value in values.items()):
                parameter = parameters[name]
                optimizer.state[parameter] = {k: cut(v, before.get(k, parameter)) for k, v in values.items()}
