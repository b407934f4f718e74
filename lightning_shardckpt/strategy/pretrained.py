"""Pretrained weights: the names that they fill, before the module is sharded, and their load, after."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.checkpoint.checkpoint import LoadOptions, load
from lightning_shardckpt.checkpoint.load_job import LoadTargets, match_targets
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.key_mapping import KeyMapping, map_names
from lightning_shardckpt.sources.model_names import fit_names
from lightning_shardckpt.sources.open_source import open_on_ranks
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.libraries import added_names, made_from_base
from lightning_shardckpt.state.model import LoadedModules, WholeNames, tied_names
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.system.text import list_some


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Initial weights with options, for ``ShardedStrategy(pretrained=Pretrained(…))``.

    Args:
        path: A Hugging Face directory, a file of safetensors or of ``torch.save``, or a checkpoint.
        key_mapping: From stored names to names in the model, if they differ: a dict of whole names or regular
            expressions to new names (None leaves a tensor out), all applied at once; or a function. See "Rename
            tensors" in the documentation.
        strict: Make differences an error; otherwise a warning lists them, and the tensors keep their first values.
    """

    path: str
    key_mapping: dict[str, str | None] | Callable[[str], Any] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        KeyMapping.of(self.key_mapping)  # raises for a malformed one

    def fit(self, source: Source, module: nn.Module, whole: WholeNames) -> tuple[Source, list[str]]:
        """Return the stored weights under the names of the model, and a line for each problem."""
        source, unused = map_names(source, KeyMapping.of(self.key_mapping), optimizers=())
        source, problems = fit_names(source, module, whole.state)
        return source, unused + problems


def find_pretrained(
    pretrained: Pretrained, module: nn.Module, *, ranks: Ranks, storage: Storage, is_last: bool
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the parameters and buffers that only the weights fill, and of adapters that they lack.

    Collective: every rank of ``ranks`` must call it. The whole ``module`` is not sharded yet. ``is_last`` is False if a
    checkpoint will be loaded after the weights.
    """
    names = list[tuple[frozenset[str], frozenset[str]]]()  # not sent to other ranks

    def find() -> None:
        live = module.state_dict()
        state = frozenset(clean_fqn(name) for name, value in live.items() if isinstance(value, torch.Tensor))
        whole = WholeNames(state, tied_names(module))
        match = match_targets(pretrained.fit(source, module, whole)[0], LoadTargets.of_module(module, live, whole))
        loaded = frozenset(name for row in match.rows if row.stored is not None for name in row.names)
        if is_last and (computed := made_from_base(module, state - loaded)):
            raise MismatchError(
                f"PEFT has computed {list_some(computed)} from the weights that those at {pretrained.path!r} replace: "
                "begin with from_pretrained, not pretrained="
            )
        names.append((frozenset() if match.is_hooked else loaded, added_names(state) - loaded))

    try:
        with open_on_ranks(pretrained.path, ranks=ranks, storage=storage) as (source, _):
            ranks.step(f"comparing pretrained weights at {pretrained.path!r} with the model", find, lambda _: None)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"no pretrained weights: {error}. For a model on the Hugging Face hub, pass the path of a local copy, "
            "as made by `hf download NAME --local-dir PATH`."
        ) from None
    return names[0]


def load_pretrained(
    pretrained: Pretrained,
    module: nn.Module,
    whole: WholeNames,
    adapters: frozenset[str],
    *,
    ranks: Ranks,
    storage: Storage,
) -> None:
    """Read this rank's slices of the weights into a module that is sharded; ``adapters`` keep their first values.

    Collective: every rank of ``ranks`` must call it.
    """
    path = pretrained.path
    live = {name: value for name, value in module.state_dict().items() if clean_fqn(name) not in adapters}

    def fit_source(source: Source) -> tuple[Source, list[str]]:
        source, problems = pretrained.fit(source, module, whole)
        return replace(source, table={"model": source.table["model"]}, trainer=lambda stored: {}), problems

    targets = LoadTargets.of_module(module, live, whole)
    targets = replace(targets, fit_source=fit_source, remedy="Set strict=False in Pretrained(…)")
    result = load(path, targets, ranks=ranks, options=LoadOptions(strict=pretrained.strict), storage=storage)
    loaded = LoadedModules({"": module}, live, result.hooked, whole)

    def finish() -> list[str]:
        state = loaded.state_dict(result.extra_state)
        return loaded.load(state, strict=pretrained.strict, keep_parameters=True)

    phase = f"loading pretrained weights from {path!r} into {type(module).__name__}"
    notes: list[str] = ranks.step(phase, finish, lambda every: list(dict.fromkeys(chain(*every))))
    if notes:
        listed = list_some(notes, between="\n  ")
        result.notes.append(f"pretrained weights at {path!r} and this model differ:\n  {listed}")
    for note in result.notes if ranks.rank == 0 else ():
        warnings.warn(note, stacklevel=4)
