"""The state of loaded optimizers for ``on_load_checkpoint`` hooks, which must leave it as it is.

The optimizers are loaded before the hooks run. Lightning's own strategies load them after ``on_fit_start``, from the
dict that the hooks changed, which overwrites settings of ``on_fit_start``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.optimizer import optimizer_state


class LoadedOptimizers:
    """Optimizers whose state hooks see.

    Args:
        optimizers: all of the run.
        names: FQN by ``id`` of their parameters.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self._optimizers, self._names = optimizers, names
        self._loaded: list[dict[str, Any]] = []
        self._settings: set[tuple[int, int, str]] = set()
        self._with_state: list[list[Any]] = []  # the parameters of each optimizer that have state

    def show(self, settings: set[tuple[int, int, str]]) -> list[dict[str, Any]]:
        """Return the loaded state for hooks, in the form of ``on_save_checkpoint``; only tensors are live.

        Args:
            settings: the hyper-parameters that were loaded: optimizer, param group and key.
        """
        self._settings = settings
        self._loaded = [self._state_of(optimizer) for optimizer in self._optimizers]
        self._with_state = [[p for p in optimizer.state if id(p) in self._names] for optimizer in self._optimizers]
        return [self._state_of(optimizer) for optimizer in self._optimizers]

    def take(self, left: Sequence[Mapping[str, Any]]) -> None:
        """Set the hyper-parameters that were loaded again, since ``on_fit_start`` may have changed them.

        Raises:
            StateError: if hooks have changed the result of ``show``, except tensors in place, or replaced parameters.
        """
        for optimizer, parameters in zip(self._optimizers, self._with_state, strict=True):
            present = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if lost := [self._names[id(p)] for p in parameters if id(p) not in present]:
                raise StateError(
                    f"{', '.join(lost[:5])} of {type(optimizer).__name__} had state in the checkpoint, but was taken "
                    "out of the optimizer or replaced after the load, as on_fit_start may do. Replace parameters "
                    "before: in __init__, setup or configure_model"
                )
        changed = [i for i, one in enumerate(self._loaded) if i >= len(left) or not _is_same(left[i], one)]
        if changed or len(left) > len(self._loaded):
            names = ", ".join(f"{i} ({type(self._optimizers[i]).__name__})" for i in changed)
            raise StateError(
                f"on_load_checkpoint changed optimizer_states of optimizer {names or len(self._loaded)}, which "
                "ShardedStrategy has loaded already. Change the optimizer itself in on_train_start"
            )
        for number, i, key in self._settings:
            self._optimizers[number].param_groups[i][key] = self._loaded[number]["param_groups"][i][key]

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict, in which only the tensors of parameters' state are live."""
        state = optimizer_state(optimizer, self._names)
        live = {name: values for name, values in state["state"].items() if isinstance(values, Mapping)}
        own = {name: values for name, values in state["state"].items() if name not in live}
        return {**copy.deepcopy({**state, "state": own}), "state": live | copy.deepcopy(own)}


def _is_same(left: Any, loaded: Any) -> bool:
    if isinstance(left, Mapping) and isinstance(loaded, Mapping):
        return left.keys() == loaded.keys() and all(_is_same(left[key], loaded[key]) for key in left)
    if isinstance(left, DTensor) or isinstance(loaded, DTensor):
        return left is loaded
    if isinstance(left, list) and isinstance(loaded, list):
        return len(left) == len(loaded) and all(map(_is_same, left, loaded))
    return left is loaded or bool(encode_small(left, "optimizer_states") == encode_small(loaded, "optimizer_states"))
