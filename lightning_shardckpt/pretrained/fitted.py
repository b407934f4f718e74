"""Stored tensors under the names, and in the dtypes, of a live model: as a source for a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.foreign import ForeignTensors
from lightning_shardckpt.formats.source import ForeignSource
from lightning_shardckpt.index import Component, TensorSpec
from lightning_shardckpt.pretrained.fitting import Fit, fit
from lightning_shardckpt.sources import ShardedSource, Source, Target
from lightning_shardckpt.staging import DTYPES, TORCH_DTYPES
from lightning_shardckpt.state.geometry import local_tensor, view_at
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.whole import Tensors, windows

_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8: what those mean, other tensors say
_COMPLEX = ("C64", "C128")
_WINDOW_BYTES, _BATCH_BYTES = 8 << 20, 32 << 20  # of stored elements on their way to another dtype


def converts(stored: str, live: str | None) -> bool:
    """Whether a tensor of one dtype may be loaded into one of another.

    >>> converts("BF16", "F32"), converts("I64", "I32"), converts("F8_E4M3", "BF16")
    (True, False, False)
    """
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


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
    fitted = FittedSource(source, found, live.tensors, whole.ties)
    problems = found.problems + [f"{tie}  tied in the model, stored apart in the checkpoint" for tie in found.apart]
    return fitted, problems + [f"{name}  in checkpoint only" for name in found.unexpected]


def _no_tensor(key: str) -> torch.Tensor:
    raise FormatError(f"{key!r} is no tensor of the trainer")


class FittedSource:
    """A source as a model wants it: its names, its dtypes, and what is put together for it.

    Args:
        source: what is stored; it stays the caller's to close.
        fit: which stored tensor is which.
        live: the model's tensors by name; may be without memory. Tensors that it has not keep their stored dtype.
        ties: of the whole model, as names.
    """

    def __init__(
        self, source: Source, fit: Fit, live: Mapping[str, torch.Tensor], ties: Iterable[tuple[str, ...]] = ()
    ) -> None:
        self.path, self._source, self._fit = source.path, source, fit
        self._made: ForeignSource | None = None
        if fit.made:
            tensors = ForeignTensors(source.path, source.tensors.reader, {"model": fit.made})
            self._made = ForeignSource(tensors)
        aliases = {name: tie[0] for tie in ties for name in tie[1:] if name in fit.names}
        specs = {name: self._spec(name, live.get(name)) for name in fit.names - aliases.keys()}
        self._model = Component(specs, aliases)
        self._here: dict[int, Target] = {}
        self._converted: list[Target] = []

    def _stored(self, name: str) -> tuple[Source, str]:
        if self._made is not None and name in self._fit.made:
            return self._made, name
        return self._source, self._fit.stored[name]

    def _stored_spec(self, name: str) -> TensorSpec:
        source, key = self._stored(name)
        return source.components()["model"].tensors[key]

    def _spec(self, name: str, live: torch.Tensor | None) -> TensorSpec:
        spec = self._stored_spec(name)
        wanted = DTYPES.get(live.dtype) if live is not None else None
        return replace(spec, dtype=wanted) if wanted is not None and converts(spec.dtype, wanted) else spec

    @property
    def tensors(self) -> Tensors:
        """Not as one: a load reads them."""
        raise MismatchError(f"{self.path!r} is fitted to a model, not to be copied as it is")

    def close(self) -> None:
        """Nothing: what is stored is the caller's."""

    def components(self) -> Mapping[str, Component]:
        """The model's tensors alone."""
        return {"model": self._model}

    def document(self, role: str, rank: int = 0) -> Any:
        """What is stored of the model beside its tensors."""
        return self._source.document(role, rank) if role == "model" else None

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Nothing."""
        return {}

    def alike(self, names: Sequence[str]) -> bool:
        """Never: what is tied has been found."""
        return False

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        source, stored = self._stored(key)
        return source.backed(component, stored)

    def verify(self, targets: list[Target]) -> int:
        """Verify what can be, of tensors that keep their dtype; the others are verified as they are read."""
        groups: dict[int, tuple[Source, list[Target]]] = {}
        for target in targets:
            source, key = self._stored(target.key)
            if self._stored_spec(target.key).dtype != DTYPES[target.local.dtype]:
                self._converted.append(target)
                continue
            self._here[id(target)] = there = Target("model", key, target.tensor, target.fresh, target.region)
            groups.setdefault(id(source), (source, []))[1].append(there)
        return sum(source.verify(group) for source, group in groups.values())

    def fill(self, targets: list[Target]) -> None:
        """Read into memory what keeps its dtype, and the rest through a bounded amount of it."""
        for source in (self._source, self._made):
            if source is not None:
                source.fill([self._here[id(t)] for t in targets if id(t) in self._here and self._is_of(t, source)])
        wanted = {id(target) for target in targets}
        batch: list[Target] = []
        for target in (t for t in self._converted if id(t) in wanted):
            for window in self._windows(target):
                if batch and sum(t.local.nbytes for t in batch) + window.local.nbytes > _BATCH_BYTES:
                    self._convert(batch)
                batch.append(window)
        self._convert(batch)

    def _is_of(self, target: Target, source: Source) -> bool:
        return self._stored(target.key)[0] is source

    def _windows(self, target: Target) -> Iterator[Target]:
        dtype = TORCH_DTYPES[self._stored_spec(target.key).dtype]
        corner = target.region.start if target.region is not None else (0,) * target.local.ndim
        for window in windows(tuple(target.local.shape), _WINDOW_BYTES // dtype.itemsize):
            yield Target("model", target.key, target.tensor, True, window.shift(corner), dtype=dtype)

    def _convert(self, batch: list[Target]) -> None:
        """Read what is to be converted, and empty the list."""
        for source in (self._source, self._made):
            part = [t for t in batch if source is not None and self._is_of(t, source)]
            if source is None or not part:
                continue
            there = [replace(t, key=self._stored(t.key)[1]) for t in part]
            source.verify(there)
            source.fill(there)
            for target in there:
                assert target.region is not None
                view_at(local_tensor(target.tensor), target.region).copy_(target.local)
        batch.clear()
