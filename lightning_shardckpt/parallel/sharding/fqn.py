"""Modules and parameters of a module tree by FQN, and by patterns of the user."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain

from torch import nn

from lightning_shardckpt.compat.torch_modules import child_slots, parameter_slots
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.clean_fqn import (
    base_fqn,
    clean_fqn,
    fqn_regex,
    matching_fqns,
    names_peft_layers,
    shared_names,
)

ABSENT = set[type]()  # classes of parameters that stand for those of other ranks; a pipeline adds its placeholders


def named_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Return every module of ``root`` except itself, by clean FQN; the wrapped module for a wrapper."""
    return {clean: module for name, module in root.named_modules() if (clean := clean_fqn(name))}


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """Return the first clean FQN of every module."""
    return {module: clean_fqn(name) for name, module in root.named_modules()}


def is_inside(name: str, units: Container[str]) -> bool:
    """Return whether a module is one of the units or inside one."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in units for n in range(1, len(parts) + 1))


def are_layers(modules: Sequence[nn.Module]) -> bool:
    """Return whether modules may be the layers of a model: at least two of each class on average."""
    return len(modules) > 1 and 2 * len({type(module) for module in modules}) <= len(modules)


def walk_modules(root: nn.Module, skip: Iterable[int] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules like ``named_modules``, except modules with ids in ``skip`` and modules only inside of these."""
    seen, pending = set(skip), [("", root)]  # a loop, since steps call it: recursive generators are slow
    while pending:
        name, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        if children := child_slots(module):
            prefix = f"{name}." if name else ""
            pending += [(prefix + slot, child) for slot, child in reversed(children.items()) if child is not None]


def own_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of this rank's pipeline stages, with their names as registered."""
    seen = set[int]()
    for prefix, module in walk_modules(root):
        for name, parameter in parameter_slots(module).items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                if type(parameter) not in ABSENT:
                    yield f"{prefix}.{name}" if prefix else name, parameter


def parameter_names(root: nn.Module) -> list[list[str]]:
    """Return the names of each parameter, as registered, in registration order; a tied one has several."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return list(names.values())


def tied_state(root: nn.Module) -> list[tuple[str, ...]]:
    """Return the clean FQNs of each tied parameter or buffer."""
    parameters, buffers = root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)
    return shared_names(chain(parameters, buffers))


def matching_base_modules(modules: Iterable[str], pattern: str) -> list[str]:
    """Return the FQNs, of wrappers and wrapped modules, that ``pattern`` matches without the names that PEFT inserts.

    Empty if the pattern itself has such names.
    """
    if names_peft_layers(pattern):
        return []
    regex = fqn_regex(base_fqn(pattern))
    return [name for name in modules if regex.fullmatch(base_fqn(name))]


def suggest_names(modules: Iterable[str], pattern: str) -> str:
    """Return the FQNs closest to ``pattern`` as text, with ``*`` for layer numbers; empty if none is close."""
    folded = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in modules))
    close = difflib.get_close_matches(re.sub(r"\b\d+\b", "*", pattern), folded, n=3, cutoff=0.4)
    return f" (nearest: {', '.join(close)})" if close else ""


def select_modules(root: nn.Module, patterns: Iterable[str], what: str) -> list[str]:
    """Return the FQNs of the modules that any pattern matches, as a glob or a class name, outermost first.

    Raises:
        TopologyError: listing every pattern that matches nothing; ``what`` names the user's argument.
    """
    modules = named_modules(root)
    selected, unmatched = set[str](), list[str]()
    for pattern in patterns:
        names = matching_fqns(modules, pattern)
        names += [name for name, module in modules.items() if type(module).__name__ == pattern]
        selected.update(names)
        if not names:
            unmatched.append(f"  {pattern!r}{suggest_names(modules, pattern)}")
    if unmatched:
        raise TopologyError(
            f"{what}: {len(unmatched)} patterns match no module of {type(root).__name__}\n"
            + "\n".join(unmatched)
            + "\nGive module names such as 'net.layers.*' or class names such as 'LlamaDecoderLayer'."
        )
    return [name for name in modules if name in selected]
