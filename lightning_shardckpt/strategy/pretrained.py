"""Pretrained weights, in call order: open, compare with the model, shard the model, read. Each is a ``Ranks.step``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_shardckpt.compat.dtensor import shape_of
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.hooked_entries import allocate_entries
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.match import Match, apply_match, match_model, report_match
from lightning_shardckpt.sources.open_source import open_on_ranks
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.sources.source_view import converts, read_converted
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.model import WholeNames, is_value, model_leaves, names_of, tied_names
from lightning_shardckpt.state.module_io import (
    HookedState,
    LoadHooks,
    Prefixes,
    load_remaining,
    loaded_state_dict,
)
from lightning_shardckpt.state.peft_modules import made_from_base
from lightning_shardckpt.state.tensor_bytes import DTYPES
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.system.text import count_text, list_some


@dataclass(frozen=True, slots=True)
class Pretrained:
    """The arguments of ``ShardedStrategy`` that start with ``pretrained``, and whether a checkpoint is loaded after."""

    path: str
    key_mapping: KeyMapping = field(default_factory=KeyMapping)
    strict: bool = False
    before_checkpoint: bool = False


class PretrainedWeights:
    """Stored weights that were compared with a model; only they fill the parameters and buffers in ``names``."""

    def __init__(self, source: Source | None, match: Match | None, by_code: Prefixes, *, strict: bool) -> None:
        self._source, self._match, self._by_code, self._strict = source, match, by_code, strict
        self.names = frozenset(n for n in match.names if not by_code(n)) if match is not None else frozenset()

    def fill(self, module: nn.Module, whole: WholeNames, ranks: Ranks) -> None:
        """Read this rank's slices of the model, which has been sharded.

        Collective: every rank of ``ranks`` must call it.
        """
        if self._source is None or self._match is None:
            return
        hooked: HookedState | None = None
        source, match, state_dict = self._source, self._match, module.state_dict()
        modules, values = {"": module}, dict[str, Any]()

        def read() -> None:
            nonlocal hooked, values
            tensors = {k: v for k, v in state_dict.items() if not is_value(k, v)}
            leaves, _ = model_leaves(tensors, module, whole)
            fitted, names = apply_match(source, match), names_of(leaves, whole.ties)
            stored, specs = fitted.document("model") or {}, fitted.components()["model"].tensors
            own_values = {clean_fqn(name) for name in state_dict.keys() - tensors.keys()}
            values = {name: decode_small(stored[name]) for name in own_values if name in stored}
            matched = [key for key in leaves.tensors if key in match.names]
            targets = [ReadTarget("model", key, leaves.tensors[key]) for key in matched]
            hooks = LoadHooks.of(modules, state_dict)
            if self._by_code or hooks.after or hooks.of_all:
                fitting = [key for key in matched if specs[key].shape == shape_of(leaves.tensors[key])]
                absent = own_values - stored.keys()
                absent.update(*(names[key] for key in leaves.tensors.keys() - match.names))
                hooked, targets = allocate_entries(
                    fitted,
                    leaves,
                    names,
                    dict(zip(fitting, fitting, strict=True)),
                    self._by_code,
                    absent=absent,
                    unexpected=match.others,
                    reported=[name for name in (*absent, *match.others) if not self._by_code(name)],
                    whole=whole,
                )
            read_converted(fitted, targets)

        def load() -> list[str]:
            now, strict = loaded_state_dict(modules, state_dict, values, hooked), self._strict
            return load_remaining(modules, state_dict, now, hooked, whole, strict=strict, keep_parameters=True)

        ranks.step(f"reading pretrained weights from {source.path!r}", read, lambda _: None)
        phase = f"loading pretrained weights from {source.path!r} into {type(module).__name__}"
        notes: list[str] = ranks.step(phase, load, lambda every: list(dict.fromkeys(chain(*every))))
        if notes and ranks.rank == 0:
            warnings.warn(f"pretrained weights at {source.path!r}: " + list_some(notes, between="\n  "), stacklevel=4)


@contextmanager
def compare_pretrained(
    pretrained: Pretrained | None, module: nn.Module, *, ranks: Ranks, storage: Storage
) -> Iterator[PretrainedWeights]:
    """Open pretrained weights, and compare them with a module, which is to be sharded and filled inside the context.

    Collective: every rank of ``ranks`` must enter it. Without ``pretrained`` it does nothing.

    Raises:
        MismatchError: listing the tensors that cannot be loaded; with ``strict`` also missing and unexpected ones.
        Exception: the error of opening the source, on all ranks.
    """
    if pretrained is None:
        yield PretrainedWeights(None, None, Prefixes(()), strict=False)
        return
    with _open(pretrained.path, ranks, storage) as source:
        matches: list[tuple[Match, Prefixes]] = []

        def compare() -> dict[str, list[str]]:
            matches.append(_compare(source, module, pretrained))
            return {"problems": matches[0][0].problems, "report": report_match(matches[0][0], source.path)}

        phase = f"comparing pretrained weights at {source.path!r} with the model"
        notes = ranks.step(phase, compare, partial(_check_reports, source.path, pretrained.strict))
        for note in notes if ranks.rank == 0 else ():
            warnings.warn(note, stacklevel=3)
        yield PretrainedWeights(source, *matches[0], strict=pretrained.strict)


@contextmanager
def _open(path: str, ranks: Ranks, storage: Storage) -> Iterator[Source]:
    with ExitStack() as closing:
        try:
            source = closing.enter_context(open_on_ranks(path, ranks=ranks, storage=storage))
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"no pretrained weights: {error}. For a model on the Hugging Face hub, pass the path of a local copy, "
                "as made by `hf download NAME --local-dir PATH`."
            ) from None
        yield source


def _compare(source: Source, module: nn.Module, pretrained: Pretrained) -> tuple[Match, Prefixes]:
    """Return the matching names with all problems, and the scopes that the model's own code loads."""
    state = {clean_fqn(k): v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)}
    whole = WholeNames(frozenset(state), tuple(map(tuple, tied_names(module))))
    match, hooks = match_model(source, module, whole, pretrained.key_mapping), LoadHooks.of({"": module}, {})
    fitted = apply_match(source, match)
    stored, values = fitted.components()["model"].tensors, fitted.document("model") or {}
    shapes = {name: spec.shape for name, spec in stored.items()} | dict.fromkeys(values, ())
    entries = module.state_dict().items()
    live_shapes = {clean_fqn(name): () if is_value(name, value) else tuple(value.shape) for name, value in entries}
    by_code = hooks.prefixes_seen(shapes, live_shapes, ())
    by_hooks = Prefixes(hooks.after if pretrained.strict else ())  # hooks may accept differences
    match.missing = [name for name in match.missing if not by_code(name) and not by_hooks(name)]
    accepted = {stored_name for name, (stored_name, _) in match.others.items() if by_code(name) or by_hooks(name)}
    match.unexpected = [name for name in match.unexpected if name not in accepted]
    fix = "was computed by PEFT from the weights that these replace: begin with from_pretrained, not pretrained="
    computed = () if pretrained.before_checkpoint else made_from_base(module, state.keys() - match.names)
    match.problems += [f"{name}  {fix}" for name in computed]
    for name in sorted(name for name in match.names if not by_code(name)):
        spec, live = stored[name], state[name]
        dtype = DTYPES.get(live.dtype)
        if spec.shape != tuple(live.shape):
            match.problems.append(f"{name}  shape {spec.shape} in it, {tuple(live.shape)} in the model")
        elif not converts(spec.dtype, dtype):
            match.problems.append(f"{name}  dtype {spec.dtype} in it, {dtype or live.dtype} in the model")
    return match, by_code


def _check_reports(path: str, strict: bool, reports: list[dict[str, list[str]]]) -> list[str]:
    """Return the notes of rank 0, or raise a MismatchError with the problems of all ranks."""
    problems = list(dict.fromkeys(line for one in reports for line in one["problems"]))
    if problems:
        listed = list_some(problems, 20, "\n  ")
        raise MismatchError(
            f"cannot begin with the weights at {path!r}: {count_text(len(problems), 'difference')}\n  {listed}\n"
            "Leave them out with a pretrained_key_mapping of their names to None, or change the model."
        )
    notes = reports[0]["report"]
    if notes and strict:
        raise MismatchError(f"{notes[0]}\nSet pretrained_strict=False to begin with the others.")
    return notes
