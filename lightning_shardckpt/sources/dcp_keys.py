"""Tell the model from the optimizers in a distributed checkpoint by its keys, and find the names of parameters.

Entries lie at paths of a nested state dict whose keys whoever saved it chose. What is known:

- Lightning's Trainer: ``model`` (FSDPStrategy) or ``state_dict`` (ModelParallelStrategy), ``optimizer_0`` and so on;
- Lightning's Fabric: what the user called the model and the optimizers;
- OLMo-core: ``model`` and ``optim``; torchtitan: the model's entries at the top, ``optimizer`` beside them.

An optimizer is what has ``param_groups``, as ``get_optimizer_state_dict`` returns it, nested or flattened. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import shown

Path = tuple[str | int, ...]

_MODELS = ("model", "state_dict")
_STATE, _GROUPS = "state", "param_groups"


@dataclass(slots=True)
class OptimizerKeys:
    """The keys of an optimizer.

    ``state``: by parameter and name of the state. ``groups``: by number of the param group and setting, where they are
    nested; ``settings``: by parameter and setting, where they are flattened. ``listed``: of all groups in one.
    """

    state: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    listed: str | None = None


@dataclass(frozen=True, slots=True)
class DCPKeys:
    """By name of the model's entries their keys; the optimizers in order; keys and paths of what is neither."""

    model: dict[str, str]
    optimizers: list[OptimizerKeys]
    rest: dict[str, Path]


def layout_of(paths: Mapping[str, Path], tensors: Collection[str], *, extended: bool) -> DCPKeys:
    """Return what the entries are.

    Args:
        paths: by key.
        tensors: keys of those that are tensors; others are values.
        extended: whether Lightning's ``meta.pt`` lies beside them, so that a single dict of tensors is a model.

    Raises:
        FormatError: naming a key, if an optimizer is not as torch lays it out.
    """
    by_top: dict[str, dict[str, Path]] = {}
    for key, path in paths.items():
        by_top.setdefault(str(path[0]), {})[key] = path[1:]
    optimizers = {top: found for top, found in by_top.items() if _is_optimizer(found.values())}
    others = {top: found for top, found in by_top.items() if top not in optimizers and found.keys() & set(tensors)}
    model = _model(others, known=extended or bool(optimizers))
    ordered = sorted(optimizers, key=_number)
    taken = {*model.values(), *(key for found in optimizers.values() for key in found)}
    rest = {key: path for key, path in paths.items() if key not in taken}
    return DCPKeys(model, [_optimizer(optimizers[top], model) for top in ordered], rest)


def _is_optimizer(paths: Iterable[Path]) -> bool:
    return any(path and str(path[0]).partition(".")[0] == _GROUPS for path in paths)


def _number(top: str) -> tuple[str, int]:
    """Sort ``optimizer_10`` after ``optimizer_9``, and others by their names."""
    name, _, number = top.rpartition("_")
    return (name, int(number)) if number.isdecimal() and number.isascii() and len(number) < 10 else (top, -1)


def _model(others: Mapping[str, Mapping[str, Path]], *, known: bool) -> dict[str, str]:
    """The model's entries by name: those below one key, without that, or all tensors by their own keys."""
    nested = [top for top, found in others.items() if all(found.values())]
    named = [top for top in nested if top in _MODELS]
    chosen = named if len(named) == 1 else nested if known and len(nested) == len(others) == 1 else []
    names: dict[str, str] = {}
    for top, found in others.items():
        for key, path in found.items():
            name = ".".join(map(str, path)) if top in chosen else key
            if name in names:
                raise FormatError(f"{shown(names[name])} and {shown(key)} are both an entry {shown(name)} of the model")
            names[name] = key
    return names


def _optimizer(found: Mapping[str, Path], model: Collection[str]) -> OptimizerKeys:
    keys = OptimizerKeys()
    for key, path in found.items():
        kind, _, flat = str(path[0]).partition(".") if path else ("", "", "")
        if kind == _STATE and (flat or len(path) == 3):
            name, state = _split(key, flat, model) if flat else (str(path[1]), str(path[2]))
            keys.state.setdefault(name, {})[state] = key
        elif kind == _GROUPS and flat:
            name, setting = _split(key, flat, model)
            keys.settings.setdefault(name, {})[setting] = key
        elif kind == _GROUPS and len(path) == 3 and type(path[1]) is int:
            keys.groups.setdefault(path[1], {})[str(path[2])] = key
        elif kind == _GROUPS and len(path) == 1:
            keys.listed = key
        else:
            raise FormatError(f"{shown(key)} is nothing that torch stores of an optimizer")
    if sorted(keys.groups) != list(range(len(keys.groups))):
        raise FormatError(f"param groups {sorted(keys.groups)} are stored, expected 0 to {len(keys.groups) - 1}")
    return keys


def _split(key: str, flat: str, model: Collection[str]) -> tuple[str, str]:
    """Parameter and name of what is stored for it, from ``layers.0.weight.exp_avg``."""
    name, dot, _ = flat.rpartition(".")
    while dot:
        if name in model:
            return name, flat[len(name) + 1 :]
        name, dot, _ = name.rpartition(".")
    raise FormatError(f"{shown(key)} is of no parameter that is stored")
