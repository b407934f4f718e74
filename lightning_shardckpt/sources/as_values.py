"""State dicts of modules and optimizers as plain values: a view of a source for those who ask for values.

Fabric's own strategies and plain files do not tell the state dict of a module from one that a script kept as a value,
such as the best weights so far, or that another object gave as its state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.source_view import SourceView
from lightning_shardckpt.state.json_tree import decode_equal, decode_small
from lightning_shardckpt.state.state_dicts import insert
from lightning_shardckpt.state.stored_optimizer import StoredOptimizer

_EMPTY = Component({})


class AsValues(SourceView):
    """A source whose trainer's state has some of the stored state dicts; they stay what they are, too.

    Args:
        source: what is stored, which stays the caller's to close.
        keys: where its modules and optimizers were in the state that was saved, as ``NestedObjects`` describes it.
        wanted: of these places, those where values are asked for.
    """

    def __init__(self, source: Source, keys: Mapping[str, Any], wanted: Sequence[str]) -> None:
        super().__init__(source)
        self._stored = source.components()
        modules: dict[str, str] = keys["modules"]
        self._modules = {key: prefix for key, prefix in modules.items() if key in wanted}
        self._optimizers = {key: number for number, key in enumerate(keys["optimizers"]) if key in wanted}
        self._of: dict[str, tuple[str, str]] = {}  # key in the trainer's state → component and key where it is stored
        model = self._stored.get("model", _EMPTY)
        names = {name: name for name in model.tensors} | dict(model.aliases)
        for key, prefix in self._modules.items():
            mine = {name: of for name, of in names.items() if name.startswith(prefix)}
            self._of |= {f"{key}/{name.removeprefix(prefix)}": ("model", of) for name, of in mine.items()}
        for key, number in self._optimizers.items():
            mine_too = (one for one in self._stored.get("optimizer", _EMPTY).tensors if one.startswith(f"{number}/"))
            self._of |= {f"{key}/state/{one.partition('/')[2]}": ("optimizer", one) for one in mine_too}

    @cached_property
    def _components(self) -> dict[str, Component]:
        trainer = self._stored.get("trainer", _EMPTY)
        added = {key: self._stored[component].tensors[one] for key, (component, one) in self._of.items()}
        return {**self._stored, "trainer": Component({**trainer.tensors, **added}, trainer.aliases)}

    def components(self) -> Mapping[str, Component]:
        """Tensors by component."""
        return self._components

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The trainer's state with the state dicts in their places."""
        found = self._source.trainer(stored)
        values = self.document("model") or {}
        for key, prefix in self._modules.items():
            begin = f"{key}/"
            state = OrderedDict((one.removeprefix(begin), stored(one)) for one in self._of if one.startswith(begin))
            others = [name for name in values if name.startswith(prefix)]
            insert(found, key, state | {name.removeprefix(prefix): decode_small(values[name]) for name in others})
        for key, number in self._optimizers.items():
            document = self.document("optimizer")[str(number)]
            one = StoredOptimizer(number, document, self._stored.get("optimizer"), decode_equal)
            tensors = {of: stored(here) for here, (_, of) in self._of.items() if here.startswith(f"{key}/state/")}
            insert(found, key, one.state_dict(tensors))
        return found

    def stored_as(self, component: str, key: str) -> tuple[str, str]:
        """Component and key under which a tensor is stored, of the state dicts among the trainer's, too."""
        return self._of.get(key, (component, key)) if component == "trainer" else (component, key)
