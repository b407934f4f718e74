"""The modules and parameters of a module tree by FQN, and those that a pattern of the user's means."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain

from torch import nn

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.clean_fqn import (
    base_fqn,
    clean_fqn,
    fqn_regex,
    matching_fqns,
    names_peft_layers,
    shared_names,
)
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder


def named_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Return every module of ``root`` except itself, by clean FQN; a wrapper gives way to what it wraps."""
    return {clean: module for name, module in root.named_modules() if (clean := clean_fqn(name))}


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """Return the clean FQN of every module, of one that is registered under several names the first."""
    return {module: clean_fqn(name) for name, module in root.named_modules()}


def is_inside(name: str, units: Container[str]) -> bool:
    """Return whether the module is one of the units or a part of one."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in units for n in range(1, len(parts) + 1))


def are_layers(modules: Sequence[nn.Module]) -> bool:
    """Return whether modules may be the layers of one trunk: each class twice on average, as hybrids have them."""
    return len(modules) > 1 and 2 * len({type(module) for module in modules}) <= len(modules)


def own_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that this rank has, by name as registered; those of other pipeline stages are left out."""
    return ((name, parameter) for name, parameter in root.named_parameters() if not isinstance(parameter, Placeholder))


def parameter_names(root: nn.Module) -> list[list[str]]:
    """The names of each parameter, as registered, in registration order: more than one means it is tied."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(name)
    return list(found.values())


def tied_state(root: nn.Module) -> list[tuple[str, ...]]:
    """The clean FQNs of each parameter or buffer that has several."""
    parameters, buffers = root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)
    return shared_names(chain(parameters, buffers))


def matching_base_modules(modules: Iterable[str], pattern: str) -> list[str]:
    """The FQNs that ``pattern`` matches as they were before PEFT: wrappers and what they wrap. None if it names those.

    So a plan that was written for a model fits the model with adapters.
    """
    if names_peft_layers(pattern):
        return []
    regex = fqn_regex(base_fqn(pattern))
    return [name for name in modules if regex.fullmatch(base_fqn(name))]


def suggest_names(modules: Iterable[str], pattern: str) -> str:
    """A sentence with the FQNs closest to ``pattern``, layer numbers folded into ``*``; empty if none is close."""
    folded = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in modules))
    close = difflib.get_close_matches(re.sub(r"\b\d+\b", "*", pattern), folded, n=3, cutoff=0.4)
    return f" (nearest: {', '.join(close)})" if close else ""


def select_modules(root: nn.Module, patterns: Iterable[str], what: str) -> list[str]:
    """The FQNs of the modules that any pattern names, by glob or by class name, outermost first.

    Raises:
        TopologyError: listing every pattern that matches nothing.
    """
    modules = named_modules(root)
    chosen: set[str] = set()
    lost = []
    for pattern in patterns:
        found = matching_fqns(modules, pattern)
        found += [name for name, module in modules.items() if type(module).__name__ == pattern]
        chosen.update(found)
        if not found:
            lost.append(f"  {pattern!r}{suggest_names(modules, pattern)}")
    if lost:
        raise TopologyError(
            f"{what}: {len(lost)} patterns match no module of {type(root).__name__}\n"
            + "\n".join(lost)
            + "\nGive module names such as 'net.layers.*' or class names such as 'LlamaDecoderLayer'."
        )
    return [name for name in modules if name in chosen]
