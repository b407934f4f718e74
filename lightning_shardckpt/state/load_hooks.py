"""Loading entries through ``Module.load_state_dict``, where filling tensors in place is not enough.

Modules with load hooks need it: registered hooks and overridden methods that may change, rename, drop or add entries
before they are loaded, or act after the load. So do ``on_load_checkpoint``, and state dicts whose tensors are copies.
All stored entries of such modules are read beside them, which takes their memory twice, and given to one
``load_state_dict``. All other modules are filled in place, and the call gets their extra state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import has_own_state_dict, local_tensor
from lightning_shardckpt.compat.torch_modules import has_own_load, has_post_load_hooks, pre_load_origins
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn, state_name
from lightning_shardckpt.state.dtensor_layout import acts_as_whole, copy_slice
from lightning_shardckpt.state.model import WholeNames, is_extra_state, named_tensors
from lightning_shardckpt.state.state_dicts import add_versions, versions_in
from lightning_shardckpt.system.text import count_text

_LISTED = 20


@dataclass(frozen=True, slots=True)
class LoadHooks:
    """The part that code of a model has in its load.

    Attributes:
        of_user: True if modules have hooks before or after the load; then differences are those that the hooks leave.
        of_libraries: the prefixes of modules with hooks of torch, transformers or PEFT before the load, which act only
            if stored names or shapes differ from the module's: ``BatchNorm`` without a count of batches.
        of_all: True if the state dict needs ``load_state_dict`` as a whole.
    """

    of_user: bool = False
    of_libraries: tuple[str, ...] = ()
    of_all: bool = False

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module], state_dict: Mapping[str, Any], *, of_all: bool = False) -> LoadHooks:
        """Return the load hooks of modules.

        Args:
            modules: by the prefix of their names.
            state_dict: of the modules; if entries are copies, filling them would not load the modules.
            of_all: True if other code will change the entries before they are loaded.
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
    """State that the modules' own code loads; names are canonical.

    Attributes:
        entries: entries that are not in the modules yet, and those that keep their values, since the save has left them
            out; entries of other stages are on the meta device.
        reported: names of the modules' entries that are left out, as was reported.
        versions: of modules, see ``state_dicts.versions_of``.
    """

    entries: dict[str, Any]
    reported: frozenset[str] = frozenset()
    versions: Mapping[str, Any] | None = None


def _parts_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules inside ``modules`` with the prefix of the names of their entries."""
    for start, root in modules.items():
        for name, module in root.named_modules(remove_duplicate=False):
            yield f"{start}{name}." if name else start, module


def _own_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for start, root in modules.items():
        yield from ((start + name, tensor) for name, tensor in chain(*named_tensors(root)))


def _has_copies(modules: Mapping[str, nn.Module], state_dict: Mapping[str, Any]) -> bool:
    """Return True if entries other than extra state do not share the modules' memory."""
    if not any(map(has_own_state_dict, modules.values())):
        return False
    live = {local_tensor(tensor).data_ptr() for _, tensor in _own_tensors(modules)}
    for name, value in state_dict.items():
        part = local_tensor(value) if isinstance(value, torch.Tensor) else None
        is_live = part is not None and (part.data_ptr() in live or not part.numel())
        if not is_live and not is_extra_state(name):
            return True
    return False


# ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LoadedModules:
    """Modules whose tensors a load has filled, or whose own code is yet to load them.

    Attributes:
        modules: by the prefix of their names.
        live: the state dict of the modules.
        hooked: the entries that were read beside the modules; None if all tensors were filled in place.
        whole: names of the model over all pipeline stages, since a hook may add entries of other stages.
    """

    modules: Mapping[str, nn.Module]
    live: Mapping[str, Any]
    hooked: HookedState | None
    whole: WholeNames

    def state_dict(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loaded state dict under the modules' own names: filled tensors, and entries not in the modules.

        ``values`` has loaded entries that are not tensors, by canonical name.
        """
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
            state_dict: the result of ``state_dict``, as on_load_checkpoint hooks left it; a full tensor may replace a
                sharded one.
            strict: whether differences are errors.
            keep_parameters: whether to refuse load hooks that replace parameters.

        Returns:
            Differences that the modules' ``load_state_dict`` reported.

        Raises:
            MismatchError: for entries that do not fit, and if ``strict``, for missing and unexpected entries.
            StateError: if a hook replaced a parameter.
        """
        edited, hooked = self._edited_entries(state_dict), self.hooked or HookedState({})
        if not edited and self.hooked is None:
            return []
        own = dict(_own_tensors(self.modules))
        entries = {name: edited[name] if name in edited else own.get(name, value) for name, value in state_dict.items()}
        missing, unexpected, lines = list[str](), list[str](), list[str]()
        for start, module in self.modules.items():
            inside = {name.removeprefix(start): value for name, value in entries.items() if name.startswith(start)}
            versions = None if hooked.versions is None else versions_in(hooked.versions, start)
            inside = add_versions(inside, versions, (name for name, _ in module.named_modules()))
            for found, keys in zip((missing, unexpected, lines), _load_module(module, inside), strict=True):
                found += [start + name for name in keys]
        if keep_parameters:
            self._check_same(own)
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

    def _check_same(self, before: Mapping[str, torch.Tensor]) -> None:
        """Refuse replaced parameters: sharding and optimizers refer to the old ones."""
        now = {start + name: p for start, module in self.modules.items() for name, p in module.named_parameters()}
        if replaced := [name for name, parameter in now.items() if parameter is not before.get(name)]:
            raise StateError(
                f"a load hook put new parameters in place of {replaced[:_LISTED]}, which are sharded and in optimizers "
                "already. Copy values into the existing parameters, and build them in the shape that is stored."
            )


def _load_module(module: nn.Module, state_dict: dict[str, Any]) -> tuple[Iterable[str], Iterable[str], list[str]]:
    """Load a module's state dict; return the missing and the unexpected names, and a line for each other shape.

    Tensors that hooks made whole are cut for torch's DTensors, which can't load plain tensors. Tensors of another shape
    keep their values, unless the module loads them by code of its own.
    """
    reshaped = dict[str, str]()

    def fit(part: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, own in chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False)):
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and isinstance(own, DTensor) and not acts_as_whole(own):
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
