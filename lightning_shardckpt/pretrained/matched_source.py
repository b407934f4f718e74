"""Stored tensors under the names, and in the dtypes, of a live model: as a source for a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.pretrained.match import Match, fit
from lightning_shardckpt.sources.casting import CastingSource, converts
from lightning_shardckpt.sources.foreign_source import ForeignSource
from lightning_shardckpt.sources.foreign_tensors import ForeignTensors
from lightning_shardckpt.sources.source import ReadTarget, ShardedSource, Source
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_versions import renamed_versions
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import DTYPES
from lightning_shardckpt.transfer.whole_tensors import StoredTensors


def fitted_to(source: Source, *, module: nn.Module, live: Leaves, whole: WholeNames) -> tuple[Source, list[str]]:
    """The source of a load as the model wants it, and what of it cannot be fitted, a line each.

    One that Lightning or this package wrote has the names of the model already.
    """
    if isinstance(source, ShardedSource) or source.document("optimizer") is not None:
        return source, []
    if "pytorch-lightning_version" in source.trainer(_no_tensor):
        return source, []
    if not whole.state:
        ties = [(key, *(a for a, of in live.aliases.items() if of == key)) for key in set(live.aliases.values())]
        whole = WholeNames(frozenset((*live.tensors, *live.aliases)), tuple(ties))
    found = fit(source, module, whole)
    fitted = MatchedSource(source, found, live.tensors, whole.ties)
    return fitted, found.problems + [f"{tie}  tied in the model, stored apart in the checkpoint" for tie in found.apart]


def _no_tensor(key: str) -> torch.Tensor:
    raise FormatError(f"{key!r} is no tensor of the trainer")


class MatchedSource:
    """A source as a model wants it: its names, its dtypes, and what is put together for it; the rest keeps its name.

    Args:
        source: what is stored; it stays the caller's to close.
        fit: which stored tensor is which.
        live: the model's tensors by name; may be without memory. Tensors that it has not keep their stored dtype.
        ties: of the whole model, as names.
    """

    def __init__(
        self, source: Source, fit: Match, live: Mapping[str, torch.Tensor], ties: Iterable[tuple[str, ...]] = ()
    ) -> None:
        self.path, self._source, self._fit = source.path, CastingSource(source), fit
        self._made: CastingSource | None = None
        if fit.made:
            tensors = ForeignTensors(source.path, source.tensors.reader, {"model": fit.made})
            self._made = CastingSource(ForeignSource(tensors))
        aliases = {name: tie[0] for tie in ties for name in tie[1:] if name in fit.names}
        self._others = {name: key for name, (_, key) in fit.others.items() if name not in fit.names}
        names = (fit.names - aliases.keys()) | self._others.keys()
        specs = {name: self._spec(name, live.get(name)) for name in names}
        self._model = Component(specs, aliases)
        self._here: dict[int, tuple[ReadTarget, ReadTarget]] = {}  # by id, with what has it

    def _stored(self, name: str) -> tuple[Source, str]:
        if self._made is not None and name in self._fit.made:
            return self._made, name
        return self._source, self._others[name] if name in self._others else self._fit.stored[name]

    def _stored_spec(self, name: str) -> TensorSpec:
        source, key = self._stored(name)
        return source.components()["model"].tensors[key]

    def _spec(self, name: str, live: torch.Tensor | None) -> TensorSpec:
        spec = self._stored_spec(name)
        wanted = DTYPES.get(live.dtype) if live is not None else None
        return replace(spec, dtype=wanted) if wanted is not None and converts(spec.dtype, wanted) else spec

    @property
    def tensors(self) -> StoredTensors:
        """The stored tensors, not as one: a load reads them."""
        raise MismatchError(f"{self.path!r} is fitted to a model, not to be copied as it is")

    def close(self) -> None:
        """Do nothing: what is stored is the caller's."""

    def components(self) -> Mapping[str, Component]:
        """The model's tensors alone."""
        return {"model": self._model}

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what is stored of the model beside its tensors."""
        if role == "versions":
            return renamed_versions(self._source.document(role), self._fit.stored)
        known = self._source.document(role) if role == "model" else None
        return known and {name: known[old] for name, old in self._fit.values.items()}

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        source, stored = self._stored(key)
        return source.backed(component, stored)

    def verify(self, targets: list[ReadTarget]) -> int:
        """Verify all that is not fresh; the rest is verified as it is read, or has been."""
        return sum(source.verify(there) for source, there in self._by_source(targets))

    def fill(self, targets: list[ReadTarget]) -> None:
        """Read into memory what keeps its dtype, and the rest through a bounded amount of it."""
        for source, there in self._by_source(targets):
            source.fill(there)

    def _by_source(self, targets: list[ReadTarget]) -> Iterator[tuple[Source, list[ReadTarget]]]:
        """The targets by their stored names; the same object for one that was asked for before."""
        groups: dict[int, tuple[Source, list[ReadTarget]]] = {}
        for target in targets:
            source, key = self._stored(target.key)
            if id(target) not in self._here:
                self._here[id(target)] = target, target.renamed(target.component, key)
            groups.setdefault(id(source), (source, []))[1].append(self._here[id(target)][1])
        yield from groups.values()
