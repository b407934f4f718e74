"""A model's state dict: its leaves by canonical FQN, and its load where filling these in place is not enough.

The canonical FQN of a tensor omits wrappers (torch.compile, activation checkpointing, FSDP1). A tensor with several
names is stored once, under the first name, and the other names are its aliases.

Modules with load hooks are loaded through ``Module.load_state_dict``: registered hooks and overridden methods may
change, rename, drop or add entries before they are loaded, or act after the load. So may ``on_load_checkpoint``, and
the tensors of a state dict may be copies. All stored entries of such modules are read beside them, which takes their
memory twice, and given to one call. All other modules are filled in place, and the call gets their extra state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import has_own_state_dict
from lightning_shardckpt.compat.torch_modules import has_own_load, has_post_load_hooks, pre_load_origins
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn, shared_names, state_name
from lightning_shardckpt.state.local_tensors import copy_slice, local_tensor, refuse_compound
from lightning_shardckpt.state.state_dicts import add_versions, versions_in
from lightning_shardckpt.system.text import count_text

_LISTED = 20


@dataclass(frozen=True, slots=True)
class Leaves:
    """The tensors of one component of a save or load."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # live, sharded or replicated, by stored key
    aliases: dict[str, str] = field(default_factory=dict)  # stored key by further name
    pinned: frozenset[str] = frozenset()  # buffers: replicas may differ, and the lowest rank's is stored

    def renamed(self, name: Callable[[str], str]) -> Leaves:
        """Return the tensors under other names."""
        aliases = {name(alias): name(key) for alias, key in self.aliases.items()}
        return Leaves({name(key): one for key, one in self.tensors.items()}, aliases, frozenset(map(name, self.pinned)))


@dataclass(frozen=True, slots=True)
class WholeNames:
    """Canonical FQNs of the whole model, of which a pipeline stage has a part."""

    state: frozenset[str] = frozenset()  # all entries of the state dict, including extra state
    ties: tuple[tuple[str, ...], ...] = ()  # the names of each tied tensor, the stored name first
    parameters: tuple[str, ...] = ()  # the stored names of all parameters, in order of registration

    def elsewhere(self, here: Collection[str]) -> frozenset[str]:
        """Return the entries that only other ranks have under any of their names, given this rank's names."""
        own = set(here)
        return self.state - own.union(*(tie for tie in self.ties if own.intersection(tie)))


def is_extra_state(name: str) -> bool:
    """Return whether a state dict entry comes from ``get_extra_state`` of a module."""
    return name.rpartition(".")[2] == "_extra_state"


def named_tensors(module: nn.Module) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    """Return a module's parameters and its buffers under all their names, in order of registration."""
    return [*module.named_parameters(remove_duplicate=False)], [*module.named_buffers(remove_duplicate=False)]


def parameter_names(module: nn.Module, whole: WholeNames | None = None) -> dict[int, str]:
    """Return the canonical FQN by ``id`` of each parameter; the first name of a tie, in the whole model if given."""
    first = {name: tie[0] for tie in whole.ties for name in tie} if whole is not None else {}
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), first.get(clean_fqn(name), clean_fqn(name)))
    return names


def tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the canonical FQNs of each tied parameter or buffer, in order of registration."""
    return tuple(shared_names(chain(*named_tensors(module))))


def model_leaves(
    state_dict: Mapping[str, Any], module: nn.Module | None = None, whole: WholeNames | None = None
) -> tuple[Leaves, dict[str, Any]]:
    """Return the tensors of a state dict, and its other entries by canonical name.

    Args:
        state_dict: of the module, possibly changed by hooks.
        module: tells buffers and ties. Without it, plain tensors that share their memory count as tied.
        whole: names of the model over all pipeline stages; a stage stores its part of a tie under the common name.

    Raises:
        StateError: for an entry that cannot be stored, or two names with the same canonical FQN.
    """
    tensors, other = dict[str, torch.Tensor](), dict[str, Any]()
    for name, value in state_dict.items():
        key = clean_fqn(name)
        if key in tensors or key in other:
            raise StateError(f"two entries of the state dict have the canonical name {key!r}")
        if is_extra_state(key) or not isinstance(value, torch.Tensor):  # stored as JSON
            other[key] = value
        else:
            refuse_compound(value, f"model/{key}")
            tensors[key] = value
    parameters, buffers = named_tensors(nn.Module() if module is None else module)
    aliases = _aliases(tensors, shared_names(chain(parameters, buffers)))
    for alias in aliases:
        del tensors[alias]
    leaves = Leaves(tensors, aliases, frozenset(tensors.keys() & {clean_fqn(name) for name, _ in buffers}))
    ties = whole.ties if module is not None and whole is not None else ()
    stored = ([name for name in tie if name in tensors] for tie in ties)
    # each is stored under the first name of its tie; stages that have different values fail the save
    first = {names[0]: tie[0] for tie, names in zip(ties, stored, strict=True) if len(names) == 1}
    leaves = leaves.renamed(lambda name: first.get(name, name)) if first else leaves
    aliases = {name: key for name, key in (leaves.aliases | first).items() if name not in leaves.tensors}
    return replace(leaves, aliases=aliases), other


def _aliases(tensors: dict[str, torch.Tensor], ties: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Return the stored name of each alias."""
    tie_of = {name: tie for tie in ties for name in tie}
    first, aliases = dict[Any, str](), dict[str, str]()
    for name, tensor in tensors.items():
        mark: Any = name
        if isinstance(tensor, DTensor):
            # a rank may hold no element of it, so that memory does not show the tie, but the module does
            if name in tie_of:
                mark = (tie_of[name], local_tensor(tensor).numel() and local_tensor(tensor).data_ptr())
        elif tensor.numel() and not tensor.is_meta:
            mark = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(mark, name) != name:
            aliases[name] = first[mark]
    return aliases


def names_of(live: Leaves, ties: Collection[tuple[str, ...]]) -> dict[str, list[str]]:
    """Return all names of each live tensor, including names in other pipeline stages, by key."""
    names: dict[str, list[str]] = {key: [key] for key in live.tensors}
    for alias, key in live.aliases.items():
        names[key].append(alias)
    known = live.tensors.keys() | live.aliases.keys()
    for tie in ties:  # other stages may have the tensor under other names
        for key in names.keys() & set(tie):
            names[key] += [name for name in tie if name not in known]
    return names


# ── load hooks ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LoadHooks:
    """The load hooks of a model.

    Those of torch, transformers and PEFT before the load act only if stored names or shapes differ from the module's:
    ``BatchNorm`` without a count of batches.
    """

    of_user: bool = False  # before or after the load; differences are those that they leave
    of_libraries: tuple[str, ...] = ()  # the prefixes of the modules
    of_all: bool = False  # True if the state dict needs ``load_state_dict`` as a whole

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module], state_dict: Mapping[str, Any], *, of_all: bool = False) -> LoadHooks:
        """Return the load hooks of modules, by the prefix of their names.

        ``state_dict`` is theirs; if entries are copies, filling them would not load the modules. ``of_all`` is True if
        other code will change the entries before they are loaded.
        """
        of_user, of_libraries = any(map(has_own_load, modules.values())), list[str]()
        for name, module in _parts_of(modules):
            origins = pre_load_origins(module)
            of_user = of_user or "user" in origins or has_post_load_hooks(module)
            of_libraries += [clean_fqn(name)] if origins else []
        return cls(of_user, tuple(of_libraries), of_all or _has_copies(modules, state_dict))

    def act_on(self, differing: Iterable[str]) -> bool:
        """Return whether hooks may remove differences of these names."""
        return self.of_user or any(name.startswith(self.of_libraries) for name in differing)


NO_HOOKS = LoadHooks()


@dataclass(frozen=True, slots=True)
class HookedState:
    """State that the modules' own code loads; names are canonical."""

    # not in the modules yet, or left out by the save, so that they keep their values; on meta if of other stages
    entries: dict[str, Any]
    reported: frozenset[str] = frozenset()  # names of the modules' entries that are left out, as was reported
    versions: Mapping[str, Any] | None = None  # of modules, see ``state_dicts.versions_of``


def _parts_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules inside ``modules`` with the prefix of the names of their entries."""
    for start, root in modules.items():
        for name, module in root.named_modules(remove_duplicate=False):
            yield f"{start}{name}." if name else start, module


def _own_tensors(modules: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    named = ((start, item) for start, root in modules.items() for item in chain(*named_tensors(root)))
    return {start + name: tensor for start, (name, tensor) in named}


def _has_copies(modules: Mapping[str, nn.Module], state_dict: Mapping[str, Any]) -> bool:
    """Return True if entries other than extra state do not share the modules' memory."""
    if not any(map(has_own_state_dict, modules.values())):
        return False
    live = {local_tensor(tensor).data_ptr() for tensor in _own_tensors(modules).values()}
    values = (value for name, value in state_dict.items() if not is_extra_state(name))
    parts = (local_tensor(value) if isinstance(value, torch.Tensor) else None for value in values)
    return any(part is None or (part.numel() and part.data_ptr() not in live) for part in parts)


@dataclass(frozen=True, slots=True)
class LoadedModules:
    """Modules by the prefix of their names, whose tensors a load has filled, or whose own code is yet to load them."""

    modules: Mapping[str, nn.Module]
    live: Mapping[str, Any]  # the state dict of the modules
    hooked: HookedState | None  # entries that were read beside the modules; None if all were filled in place
    whole: WholeNames  # over all pipeline stages, since a hook may add entries of other stages

    def state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loaded state dict under the modules' own names; ``values`` are those that are not tensors."""
        registered = {clean_fqn(name): name for name in self.live}
        if self.hooked is None:
            return {**self.live, **{registered[name]: value for name, value in values.items() if name in registered}}
        entries = self.hooked.entries
        state_dict = {own: entries[name] for name, own in registered.items() if name in entries}
        starts = {clean_fqn(name): state_name(name) for name, _ in _parts_of(self.modules)}
        for name in (name for name in entries if name not in registered):
            around = max((start for start in starts if name.startswith(start)), key=len, default="")
            state_dict[starts.get(around, "") + name.removeprefix(around)] = entries[name]
        return state_dict

    def load(self, state_dict: Mapping[str, Any], *, strict: bool, keep_parameters: bool = False) -> list[str]:
        """Load the entries that were not filled in place, through ``load_state_dict`` of each module.

        Load hooks may use whole parameters. Collective: every rank that has a part of them must call it.

        Args:
            state_dict: as on_load_checkpoint hooks left the one of this class; full tensors may replace sharded ones.
            strict: whether differences, which are returned, are errors.
            keep_parameters: whether to refuse load hooks that replace parameters.

        Raises:
            MismatchError: for entries that do not fit, and if ``strict``, for missing and unexpected entries.
            StateError: if a hook replaced a parameter.
        """
        edited, hooked = self._edited_entries(state_dict), self.hooked or HookedState({})
        if not edited and self.hooked is None:
            return []
        own = _own_tensors(self.modules)
        entries = {name: edited[name] if name in edited else own.get(name, value) for name, value in state_dict.items()}
        missing, unexpected, lines = list[str](), list[str](), list[str]()
        for start, module in self.modules.items():
            inside = {name.removeprefix(start): value for name, value in entries.items() if name.startswith(start)}
            versions = None if hooked.versions is None else versions_in(hooked.versions, start)
            inside = add_versions(inside, versions, (name for name, _ in module.named_modules()))
            for found, keys in zip((missing, unexpected, lines), _load_module(module, inside), strict=True):
                found += [start + name for name in keys]
        now = {start + name: p for start, module in self.modules.items() for name, p in module.named_parameters()}
        replaced = [name for name, parameter in now.items() if parameter is not own.get(name)]
        if keep_parameters and replaced:
            raise StateError(
                f"a load hook put new parameters in place of {replaced[:_LISTED]}, which are sharded and in optimizers "
                "already. Copy values into the existing parameters, and build them in the shape that is stored."
            )
        lines += [f"{n}  in model only" for n in missing if n in self.live and clean_fqn(n) not in hooked.reported]
        filled = self.live if self.hooked is None else {}
        unmatched = (n for n in unexpected if n not in filled and clean_fqn(n) not in self.whole.state)
        lines += [f"{name}  in checkpoint only" for name in unmatched]
        if strict and lines:
            count = count_text(len(lines), "difference")
            raise MismatchError(f"{count} after hooks have run:\n  " + "\n  ".join(lines[:_LISTED]))
        return lines

    def _edited_entries(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that are not in the modules; full tensors are cut to this rank's part of a sharded one."""
        edited = {name: value for name, value in state_dict.items() if value is not self.live.get(name)}
        for tie in self.whole.ties:  # the hook may have used the tensor's name in another stage
            if names := [name for name in edited if clean_fqn(name) in tie]:
                value = edited[max(names, key=lambda name: tie.index(clean_fqn(name)))]
                edited |= {name: value for name in self.live if clean_fqn(name) in tie}
        return {name: cut(value, self.live.get(name)) for name, value in edited.items()}


def _load_module(module: nn.Module, state_dict: dict[str, Any]) -> tuple[Iterable[str], Iterable[str], list[str]]:
    """Load a module's state dict; return the missing and the unexpected names, and a line for each other shape.

    Tensors that hooks made whole are cut for torch's DTensors, which can't load plain tensors. Tensors of another shape
    keep their values, unless the module loads them by code of its own.
    """
    reshaped = dict[str, str]()

    def fit(part: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, own in chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False)):
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and type(own) is DTensor:
                state[prefix + name] = value = cut(value, own)
            if isinstance(value, torch.Tensor) and value.shape != own.shape and not pre_load_origins(part):
                shapes = f"shape {tuple(value.shape)} in checkpoint, {tuple(own.shape)} in model"
                reshaped[prefix + name] = f"{prefix}{name}  {shapes}"
                del state[prefix + name]

    hooks = [part.register_load_state_dict_pre_hook(fit) for part in module.modules()]  # type: ignore[no-untyped-call]
    try:
        keys = module.load_state_dict(state_dict, strict=False)
    except RuntimeError as error:
        if str(error).startswith("Error(s) in loading state_dict"):
            raise MismatchError(f"entries do not fit after hooks have run: {error}") from error
        raise
    finally:
        for hook in hooks:
            hook.remove()
    missing, unexpected = keys or ((), ())  # an overridden method may return None
    return [name for name in missing if name not in reshaped], unexpected, [*reshaped.values()]


def cut(value: Any, like: Any) -> Any:
    """Return this rank's part of a full tensor if ``like`` is a sharded tensor of its shape; else the value."""
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if like.shape != value.shape or value.is_meta:
        return value
    sharded = torch.empty_like(like, dtype=value.dtype)
    copy_slice(sharded, value)
    return sharded
