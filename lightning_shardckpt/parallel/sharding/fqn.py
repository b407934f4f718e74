"""What is a parameter called, which names share one parameter, and which modules does a pattern mean?

A clean FQN has no trace of wrappers (torch.compile, checkpoint wrappers, DDP-like ones). Adapters of PEFT stay in it.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator

from torch import nn

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.unknown import Unknown

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_PEFT_MODEL = re.compile(r"(^|\.)base_model\.model(?=\.|$)")
_PEFT_LAYERS = re.compile(r"(^|\.)(token_adapter|base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def clean_fqn(name: str) -> str:
    """``name`` without the components that wrappers add.

    >>> clean_fqn("net._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'net.layers.0.weight'
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def base_fqn(name: str) -> str:
    """``name`` as the module was called before PEFT wrapped the model and some of its modules.

    >>> base_fqn("net.base_model.model.layers.0.q_proj.base_layer"), base_fqn("net.head.modules_to_save.default")
    ('net.layers.0.q_proj', 'net.head')
    """
    return _PEFT_LAYERS.sub("", _PEFT_MODEL.sub("", name, count=1)).removeprefix(".")


def named_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Every module of ``root`` except itself, by clean FQN; a wrapper gives way to what it wraps."""
    return {clean: module for name, module in root.named_modules() if (clean := clean_fqn(name))}


def inside(name: str, units: Container[str]) -> bool:
    """Whether the module is one of the units or a part of one."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in units for n in range(1, len(parts) + 1))


def own_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that this rank has, by name as registered; those of other pipeline stages are left out."""
    return ((name, parameter) for name, parameter in root.named_parameters() if not isinstance(parameter, Unknown))


def parameter_names(root: nn.Module) -> list[list[str]]:
    """The names of each parameter, as registered, in registration order: more than one means it is tied."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(name)
    return list(found.values())


def tied_state(root: nn.Module) -> list[tuple[str, ...]]:
    """The clean FQNs of each parameter or buffer that has several."""
    found: dict[int, list[str]] = defaultdict(list)
    for named in (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            found[id(tensor)].append(clean_fqn(name))
    return [tuple(names) for names in found.values() if len(names) > 1]


def matching_modules(modules: dict[str, nn.Module], pattern: str) -> list[str]:
    """The FQNs that ``pattern`` matches: ``*`` is any part of one component, ``**`` any number of components."""
    regex = re.compile(_translate(pattern))
    return [name for name in modules if regex.fullmatch(name)]


def matching_base_modules(modules: Iterable[str], pattern: str) -> list[str]:
    """The FQNs that ``pattern`` matches as they were before PEFT: wrappers and what they wrap. None if it names those.

    So a plan that was written for a model fits the model with adapters.
    """
    if _PEFT_LAYERS.search(pattern):
        return []
    regex = re.compile(_translate(base_fqn(pattern)))
    return [name for name in modules if regex.fullmatch(base_fqn(name))]


def nearest(modules: Iterable[str], pattern: str) -> str:
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
        found = matching_modules(modules, pattern)
        found += [name for name, module in modules.items() if type(module).__name__ == pattern]
        chosen.update(found)
        if not found:
            lost.append(f"  {pattern!r}{nearest(modules, pattern)}")
    if lost:
        raise TopologyError(
            f"{what}: {len(lost)} patterns match no module of {type(root).__name__}\n"
            + "\n".join(lost)
            + "\nGive module names such as 'net.layers.*' or class names such as 'LlamaDecoderLayer'."
        )
    return [name for name in modules if name in chosen]


def _translate(pattern: str) -> str:
    pieces = {"**": ".*", "*": "[^.]*"}
    return "".join(pieces.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern))
