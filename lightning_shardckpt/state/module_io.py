"""Bring loaded values into modules by their own ``load_state_dict``, where filling tensors in place is not enough.

That is for entries that are no tensors, or copies, for those that hooks have changed, and for modules that run code of
their own when they are loaded: hooks and overridden methods may change, rename, drop or add entries before they are in
the module, or make something of them afterwards. Stored tensors that such code sees are not read into the module but
beside it; then torch's own ``load_state_dict`` of the module is called. All others are filled in place, and are entries
of that call that copy nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_modules import code_before, has_code_after, has_own_load
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.clean_fqn import clean_fqn, state_name
from lightning_shardckpt.state.compound_tensors import is_compound, memory_of
from lightning_shardckpt.state.dtensor_layout import acts_as_whole, copy_slice
from lightning_shardckpt.state.model import WholeNames, is_value
from lightning_shardckpt.state.module_versions import versions_in, with_versions
from lightning_shardckpt.system.text import count_text

_LISTED = 20


# ── code that runs when a state dict is loaded ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LoadCode:
    """The modules that have such code, each as what stands before the canonical names of its entries.

    Attributes:
        before: with code that sees entries before they are loaded.
        of_libraries: with such code of torch, transformers or PEFT, which does something only where what is stored has
            other names or shapes than the module: ``BatchNorm`` without a count of batches, quantization that has seen
            no data.
        after: with hooks that run afterwards.
    """

    before: tuple[str, ...] = ()
    of_libraries: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> LoadCode:
        """Return that of modules, given by what stands before the names of each."""
        before, of_libraries, after = list[str](), list[str](), list[str]()
        for start, root in modules.items():
            if has_own_load(root):
                before.append(start)
            for name, module in root.named_modules(remove_duplicate=False):
                prefix = start + clean_fqn(f"{name}." if name else "")
                origins = code_before(module)
                if origins:
                    (before if "user" in origins else of_libraries).append(prefix)
                if has_code_after(module):
                    after.append(prefix)
        return cls(tuple(before), tuple(of_libraries), tuple(after))

    def scopes(self, stored: Mapping[str, Shape], live: Mapping[str, Shape], elsewhere: Collection[str]) -> Scopes:
        """Return whose entries code sees, of those of which something is stored.

        Args:
            stored: shapes of all entries by name.
            live: the same of the modules.
            elsewhere: names of entries that only other pipeline stages have.
        """
        differing = {name for name in {*stored, *live} if stored.get(name) != live.get(name)} - {*elsewhere}
        seen = [prefix for prefix in self.of_libraries if any(name.startswith(prefix) for name in differing)]
        return Scopes({prefix for prefix in (*self.before, *seen) if any(name.startswith(prefix) for name in stored)})


NO_CODE = LoadCode()


class Scopes:
    """A test of names: whether they are of one of some modules.

    >>> [Scopes({"a.b."})(name) for name in ("a.b.c", "a.bc")], Scopes({""})("a"), Scopes(())("a")
    ([True, False], True, False)
    """

    def __init__(self, prefixes: Iterable[str]) -> None:
        self._prefixes = tuple(prefixes)

    def __call__(self, name: str) -> bool:
        return name.startswith(self._prefixes)

    def __bool__(self) -> bool:
        return bool(self._prefixes)


@dataclass(slots=True)
class ForCode:
    """The part of a load that is left to ``load_state_dict`` of the modules; names are canonical.

    Attributes:
        is_needed: whether some code would do something.
        entries: by stored name, what is not in the module yet; on the meta device what only other stages have, and what
            no module has.
        absent: names of the model's entries that nothing is stored for.
        kept: names of entries that are to stay as they are, which code is not shown.
        versions: of modules, see ``module_versions``.
    """

    is_needed: bool = False
    entries: dict[str, Any] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    versions: Mapping[str, Any] | None = None


# ── into the modules ──────────────────────────────────────────────────────────────────────────────────────────────────


def parameter_names(module: nn.Module, whole: WholeNames | None = None) -> dict[int, str]:
    """Canonical FQN by ``id`` of the parameter; the first one of a tied parameter, of the ``whole`` model if given."""
    first = {name: tie[0] for tie in whole.ties for name in tie} if whole is not None else {}
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), first.get(clean_fqn(name), clean_fqn(name)))
    return names


def not_live(module: nn.Module, state_dict: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of entries that are copies: filling them does not fill the module."""
    live = {
        part.untyped_storage().data_ptr()
        for named in (module.named_parameters(), module.named_buffers())
        for _, tensor in named
        for part in memory_of(tensor)
    }
    return frozenset(
        name
        for name, value in state_dict.items()
        if not is_value(name, value)
        and any(part.numel() and part.untyped_storage().data_ptr() not in live for part in memory_of(value))
    )


def entries_loaded(
    modules: Mapping[str, nn.Module], live: Mapping[str, Any], values: Mapping[str, Any], for_code: ForCode
) -> dict[str, Any]:
    """Return the state dict that was loaded, under the names that the modules have: live tensors, and what is not in
    the modules yet.

    Args:
        modules: by what stands before the names of each.
        live: their state dict, of which tensors are filled.
        values: loaded entries that are no tensors, by canonical name.
        for_code: what else is not in the modules yet, and what was not stored.
    """
    registered = {clean_fqn(name): name for name in live}
    left_out = for_code.absent | for_code.kept
    found = {name: value for name, value in live.items() if clean_fqn(name) not in left_out}
    found |= {registered[name]: value for name, value in values.items() if name in registered}
    if not for_code.entries:
        return found
    starts = {
        clean_fqn(f"{start}{name}." if name else start): state_name(f"{start}{name}." if name else start)
        for start, root in modules.items()
        for name, _ in root.named_modules(remove_duplicate=False)
    }
    for name, value in for_code.entries.items():
        start, last = name, ""
        while start and start not in starts:
            start, _, part = start.removesuffix(".").rpartition(".")
            start, last = f"{start}." if start else "", f"{part}.{last}"
        found[registered.get(name) or starts.get(start, "") + last.removesuffix(".")] = value
    return found


def load_rest(
    modules: Mapping[str, nn.Module],
    live: Mapping[str, Any],
    now: Mapping[str, Any],
    copies: frozenset[str],
    for_code: ForCode,
    whole: WholeNames | None = None,
    *,
    strict: bool,
    keep_parameters: bool = False,
) -> list[str]:
    """Bring entries into the modules that filling tensors in place did not, through ``load_state_dict`` of each.

    Code of the modules may use parameters as wholes, so every rank must call it that has a part of them.

    Args:
        modules: by what stands before the names of each.
        live: their state dict, of which tensors are filled.
        now: what ``entries_loaded`` returned, as on_load_checkpoint hooks left it; whole tensors may stand for sharded
            ones.
        copies: names of entries of ``live`` that are not the modules' own memory.
        for_code: what is left to code of the modules.
        whole: names of the model over all pipeline stages; a hook may name what another stage has.
        strict: whether differences are errors.
        keep_parameters: whether code of the modules must leave each parameter the object that it is.

    Returns:
        Differences that only code of the modules could tell.

    Raises:
        MismatchError: for entries that the modules do not have, or lack, if ``strict``; for those that do not fit.
        StateError: if a hook took out what had been loaded, or replaced a parameter that is to stay.
    """
    whole = whole or WholeNames()
    edited = _edited(live, now, copies, whole)
    left_out = for_code.absent | for_code.kept
    removed = [name for name in live if name not in now and name not in copies and clean_fqn(name) not in left_out]
    if removed and not strict:
        raise StateError(
            f"on_load_checkpoint took {removed[:_LISTED]} out of the state dict, but they are loaded already. To keep "
            "the values that the model has, name them in ShardCkptIO(resume_skip=[…])."
        )
    if not (edited or removed or for_code.is_needed):
        return []
    of_modules = {start: _named(module) for start, module in modules.items()}
    own = {start + name: tensor for start, named in of_modules.items() for name, tensor in named.items()}
    compound = {name for name, tensor in own.items() if name not in edited and is_compound(tensor)}
    quiet = compound | {name for name in live if clean_fqn(name) in for_code.kept}
    entries = {name: edited[name] if name in edited else own.get(name, value) for name, value in now.items()}
    given = {name: value for name, value in entries.items() if name not in compound}
    missing, unexpected = _load_each(modules, given, for_code.versions)
    if keep_parameters:
        _check_same(modules, own)
    there = {name for name in live if name not in copies}
    lines = [f"{name}  in model only" for name in missing if name in live and name not in quiet]
    strangers = (name for name in unexpected if name not in there and clean_fqn(name) not in whole.state)
    lines += [f"{name}  in checkpoint only" for name in strangers]
    if not strict:  # what is not stored has been told, and what a hook took out is meant
        known = for_code.absent | {name for name, value in for_code.entries.items() if _is_meta(value)}
        known |= {clean_fqn(name) for name in copies if name not in now}
        return [line for line in lines if clean_fqn(line.partition("  ")[0]) not in known]
    if lines:
        count = count_text(len(lines), "difference")
        raise MismatchError(f"{count} after hooks have run:\n  " + "\n  ".join(lines[:_LISTED]))
    return []


def _check_same(modules: Mapping[str, nn.Module], before: Mapping[str, torch.Tensor]) -> None:
    """Raise a StateError for parameters that were replaced: sharding and optimizers know those that were there."""
    now = {start + name: p for start, module in modules.items() for name, p in module.named_parameters()}
    if replaced := [name for name, parameter in now.items() if parameter is not before.get(name)]:
        raise StateError(
            f"code that ran when the state dict was loaded put new parameters in place of {replaced[:_LISTED]}, which "
            "are sharded and in optimizers already. Copy values into the parameters that are there, and build them in "
            "the shape that is stored."
        )


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _load_each(
    modules: Mapping[str, nn.Module], entries: Mapping[str, Any], versions: Mapping[str, Any] | None
) -> tuple[list[str], list[str]]:
    """Have each module load its entries; returns the names that are missing and unexpected."""
    missing, unexpected = list[str](), list[str]()
    for start, module in modules.items():
        mine = {name.removeprefix(start): value for name, value in entries.items() if name.startswith(start)}
        known = None if versions is None else versions_in(versions, start)
        found = _load_module(module, with_versions(mine, known, (name for name, _ in module.named_modules())))
        missing += [start + name for name in found[0]]
        unexpected += [start + name for name in found[1]]
    return missing, unexpected


def _load_module(module: nn.Module, state_dict: dict[str, Any]) -> tuple[Iterable[str], Iterable[str]]:
    """Have a module load a state dict; returns the names that are missing and unexpected."""
    try:
        with _cutting_wholes(module):
            found = module.load_state_dict(state_dict, strict=False)
    except RuntimeError as error:
        if str(error).startswith("Error(s) in loading state_dict"):
            raise MismatchError(f"entries do not fit after hooks have run: {error}") from error
        raise
    return found or ((), ())  # a method of the user's may return nothing


@contextmanager
def _cutting_wholes(module: nn.Module) -> Iterator[None]:
    """Inside, whole tensors that hooks have made are loaded into torch's own DTensors, which take no plain ones."""

    def cut_each(part: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        parameters = dict(part.named_parameters(prefix.removesuffix("."), recurse=False))
        state.update({name: cut(state[name], parameters[name]) for name in parameters if name in state})

    parts = [m for m in module.modules() if any(not acts_as_whole(p) for p in m.parameters(recurse=False))]
    hooks = [part.register_load_state_dict_pre_hook(cut_each) for part in parts]  # type: ignore[no-untyped-call]  # last
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return dict(chain(*named))


def _edited(
    live: Mapping[str, Any], now: Mapping[str, Any], copies: frozenset[str], whole: WholeNames
) -> dict[str, Any]:
    """Return the entries that are not in the modules, whole tensors cut to the shards that they are for."""
    edited = {name: value for name, value in now.items() if name in copies or value is not live.get(name)}
    for tie in whole.ties:  # the hook may have used a name that another stage has for the tensor
        names = [name for name in edited if clean_fqn(name) in tie]
        if names:
            value = edited[max(names, key=lambda name: tie.index(clean_fqn(name)))]
            edited |= {name: value for name in live if clean_fqn(name) in tie}
    return {name: cut(value, live.get(name)) for name, value in edited.items()}


def cut(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor for a sharded one of its shape; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if like.shape != value.shape or value.is_meta:
        return value
    found = torch.empty_like(like, dtype=value.dtype)
    copy_slice(found, value)
    return found
