"""Stored weights under the names of a live model: as a source for a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.foreign_source import ForeignSource
from lightning_shardckpt.sources.foreign_tensors import ForeignTensors
from lightning_shardckpt.sources.match import Match, fit
from lightning_shardckpt.sources.source import ReadTarget, ShardedSource, Source
from lightning_shardckpt.sources.source_view import SourceView, origin_of
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_versions import renamed_versions
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.state_dicts import VERSION


def is_weights_alone(source: Source) -> bool:
    """Return whether a source is of weights that another program wrote, whose names may not be those of the model.

    What Lightning or this package wrote has the names of the model, and so has state of an optimizer.
    """
    stored = origin_of(source, "model", "")[0]
    if isinstance(stored, ShardedSource) or stored.document("optimizer") is not None:
        return False
    return "model" in stored.components() and VERSION not in stored.trainer(_no_tensor)


def fitted_to(source: Source, *, module: nn.Module, live: Leaves, whole: WholeNames) -> tuple[Source, list[str]]:
    """The source of a load as the model wants it, and what of it cannot be fitted, a line each.

    Args:
        source: what is stored; as it is unless it ``is_weights_alone``.
        module: the live model.
        live: its tensors.
        whole: its names over all pipeline stages.
    """
    if not is_weights_alone(source):
        return source, []
    ties = whole.ties or [(key, *(a for a, of in live.aliases.items() if of == key)) for key in live.tensors]
    ties = tuple(tie for tie in ties if len(tie) > 1)
    found = fit(source, module, WholeNames(whole.state or frozenset((*live.tensors, *live.aliases)), ties))
    problems = found.problems + [f"{tie}  tied in the model, stored apart in the checkpoint" for tie in found.apart]
    return MatchedSource(source, found, ties), problems


def _no_tensor(key: str) -> torch.Tensor:
    raise FormatError(f"{key!r} is no tensor of the trainer")


class MatchedSource(SourceView):
    """A source with the names of a model, and what is put together for it; the rest has the names it would have there.

    Args:
        source: what is stored; it stays the caller's to close.
        fit: which stored tensor is which.
        ties: of the whole model, as names.
    """

    def __init__(self, source: Source, fit: Match, ties: Iterable[tuple[str, ...]] = ()) -> None:
        super().__init__(source)
        self._fit, self._made = fit, None
        if fit.made:
            self._made = ForeignSource(ForeignTensors(source.path, source.tensors.reader, {"model": fit.made}))
        aliases = {name: tie[0] for tie in ties for name in tie[1:] if name in fit.names}
        others = {name: key for name, (_, key) in fit.others.items() if name not in fit.names}
        self._keys, stored = {**others, **fit.stored}, source.components()["model"].tensors
        specs = {name: stored[key] for name, key in self._keys.items()}
        specs |= self._made.components()["model"].tensors if self._made is not None else {}
        self._model = Component({name: spec for name, spec in specs.items() if name not in aliases}, aliases)

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, those of the model under its names."""
        return {**self._source.components(), "model": self._model}

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what was stored under a role."""
        found = self._source.document(role, rank)
        if role == "versions":
            return renamed_versions(found, self._fit.stored)
        return {name: found[old] for name, old in self._fit.values.items()} if found and role == "model" else found

    def stored_as(self, component: str, key: str) -> tuple[str, str]:
        """Component and key under which a tensor is stored."""
        return (component, self._keys[key]) if component == "model" else (component, key)

    def _is_made(self, component: str, key: str) -> bool:
        return component == "model" and key in self._fit.made

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        if self._made is not None and self._is_made(component, key):
            return self._made.backed(component, key)
        return super().backed(component, key)

    def verify(self, targets: list[ReadTarget]) -> int:
        """Verify what is stored as it is; what is put together is of files without checksums."""
        return super().verify([target for target in targets if not self._is_made(target.component, target.key)])

    def fill(self, targets: list[ReadTarget]) -> None:
        """Fill the targets from the tensors that are stored as they are, and from parts of others."""
        made = [target for target in targets if self._is_made(target.component, target.key)]
        super().fill([target for target in targets if not self._is_made(target.component, target.key)])
        if self._made is not None:
            self._made.fill(made)
