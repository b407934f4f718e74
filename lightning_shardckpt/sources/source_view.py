"""A view of a source, passed on as it is: what views that change names, dtypes or values are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.transfer.whole_tensors import StoredTensors


def origin_of(source: Source, component: str, key: str) -> tuple[Source, str]:
    """Return the source that views are of, and the key under which it has a tensor of theirs."""
    while isinstance(source, SourceView):
        if key:
            component, key = source.stored_as(component, key)
        source = source.source
    return source, key


class SourceView:
    """Another source, which stays the caller's to close; a view overrides what it changes.

    A view that has other names says in ``stored_as`` what each is stored as, and lists them in ``components``.
    """

    def __init__(self, source: Source) -> None:
        self.path, self._source = source.path, source
        self._stored_targets: dict[int, tuple[ReadTarget, ReadTarget]] = {}  # by id, with what has it

    @property
    def source(self) -> Source:
        """The source that this is a view of."""
        return self._source

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as they are stored."""
        return self._source.tensors

    def close(self) -> None:
        """Do nothing: what is stored is the caller's."""

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, under the names here."""
        return self._source.components()

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what was stored under a role."""
        return self._source.document(role, rank)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The trainer's state."""
        return self._source.trainer(stored)

    def stored_as(self, component: str, key: str) -> tuple[str, str]:
        """Component and key under which a tensor of this view is stored."""
        return component, key

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor, after making sure that its bytes can be there."""
        return self._source.backed(*self.stored_as(component, key))

    def verify(self, targets: list[ReadTarget]) -> int:
        """Verify what the targets need, as the source does; returns how many bytes were read."""
        return self._source.verify([self._stored_target(target) for target in targets])

    def fill(self, targets: list[ReadTarget]) -> None:
        """Fill the targets, as the source does; nothing is remembered of them afterwards, so that memory is bounded."""
        found = [self._stored_target(target) for target in targets]
        for target in targets:
            self._stored_targets.pop(id(target), None)
        self._source.fill(found)

    def _stored_target(self, target: ReadTarget) -> ReadTarget:
        """The target under its stored name; the same object each time, since the source knows targets by identity."""
        where = self.stored_as(target.component, target.key)
        if where == (target.component, target.key):
            return target
        if target.fresh:  # a window that is filled at once; known by nobody
            return target.renamed(*where)
        if id(target) not in self._stored_targets:
            self._stored_targets[id(target)] = target, target.renamed(*where)
        return self._stored_targets[id(target)][1]
