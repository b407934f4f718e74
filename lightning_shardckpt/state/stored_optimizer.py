"""The state of an optimizer as a checkpoint has it, and as a state dict again. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_shardckpt.format.index import Component

# ── merging documents ─────────────────────────────────────────────────────────────────────────────────────────────────
# Merge the optimizer documents of groups of ranks into one, as FORMAT.md says. No torch.


def add_value(values: dict[str, Any], name: str, param: str, value: Any) -> list[str]:
    """Group parameters by equal value: all step counters of an optimizer usually agree.

    Returns:
        The parameters that have the value, to which more may be added.
    """
    text = json.dumps(value, sort_keys=True)
    params: list[str] = values.setdefault(name, {}).setdefault(text, {"value": value, "params": []})["params"]
    params.append(param)
    return params


def merge_optimizers(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what one process would have stored, from the documents of groups of ranks: pipeline stages.

    Hyper-parameters, and what is of no parameter, are those of the first document that has them. Parameters are in the
    order of the documents, each once: several stages have those of containers, and tied ones.
    """
    merged: dict[str, Any] = {}
    for number in dict.fromkeys(n for document in documents for n in document):
        parts = [document[number] for document in documents if number in document]
        groups: dict[str, Any] = {}
        grouped: set[str] = set()
        for i in dict.fromkeys(i for part in parts for i in part["groups"]):
            found = [part["groups"][i] for part in parts if i in part["groups"]]
            params = [p for p in dict.fromkeys(p for group in found for p in group["params"]) if p not in grouped]
            grouped.update(params)
            groups[i] = {"hyper": found[0]["hyper"], "params": params}
        values: dict[str, Any] = {}
        seen: set[tuple[str, str]] = set()
        entries = [(name, entry) for part in parts for name, shared in part["values"].items() for entry in shared]
        for name, param, value in ((name, p, entry["value"]) for name, entry in entries for p in entry["params"]):
            if (name, param) not in seen:
                add_value(values, name, param, value)
            seen.add((name, param))
        shared = {name: list(by_value.values()) for name, by_value in values.items()}
        merged[number] = {"groups": groups, "values": shared, "numbered": any(part["numbered"] for part in parts)}
        if own := next((part["own"] for part in parts if "own" in part), None):
            merged[number]["own"] = own
    return merged


class StoredOptimizer:
    """One optimizer of a checkpoint: its groups, its values, and the names of its tensors.

    Args:
        number: of the optimizer.
        document: its part of the document "optimizer".
        component: the tensors of all optimizers; None if there are none.
        decoded: makes so many equal values of what ``encode_small`` returned; no two share memory that may change.
    """

    def __init__(
        self,
        number: int,
        document: dict[str, Any],
        component: Component | None,
        decoded: Callable[[Any, int], Sequence[Any]],
    ) -> None:
        groups = [document["groups"][str(i)] for i in range(len(document["groups"]))]
        self.groups: list[list[str]] = [group["params"] for group in groups]
        self.hyper: list[dict[str, Any]] = [decoded(group["hyper"], 1)[0] for group in groups]
        self.numbered: bool = document["numbered"]
        self.own: dict[str, Any] = decoded(document.get("own", {}), 1)[0]
        """Like a state dict, without parameters: state under a text, and entries that only this optimizer has."""
        self.values: dict[str, dict[str, Any]] = {}
        for name, shared in document["values"].items():
            for item in shared:
                params = item["params"]
                for param, value in zip(params, decoded(item["value"], len(params)), strict=True):
                    self.values.setdefault(param, {})[name] = value
        self.specs = component.tensors if component is not None else {}
        self.tensors: dict[str, dict[str, str]] = {}
        prefix = f"{number}/"
        for key in self.specs:
            if key.startswith(prefix):
                param, _, name = key[len(prefix) :].rpartition("/")
                self.tensors.setdefault(param, {})[name] = key

    def entries(self, param: str) -> list[str]:
        """Return the names of all state of a parameter."""
        return [*self.values.get(param, {}), *self.tensors.get(param, {})]

    @property
    def numbers(self) -> dict[str, int]:
        """The number that torch gives to each parameter."""
        return {param: number for number, param in enumerate(param for group in self.groups for param in group)}

    def state_dict(self, tensors: Mapping[str, Any], *, by_number: bool = False) -> dict[str, Any]:
        """Return state like torch's ``Optimizer.state_dict``.

        Args:
            tensors: by stored key, or what stands for them.
            by_number: use numbers of parameters, as torch does; else what was saved.
        """
        numbers = self.numbers if by_number else {}

        def as_saved(param: str) -> str | int:
            return numbers.get(param, param) if not self.numbered else int(param[1:])

        state = {
            as_saved(p): {
                **self.values.get(p, {}),
                **{name: tensors[key] for name, key in self.tensors.get(p, {}).items()},
            }
            for group in self.groups
            for p in group
            if p in self.values or p in self.tensors
        }
        groups = [{**h, "params": [as_saved(p) for p in g]} for h, g in zip(self.hyper, self.groups, strict=True)]
        if not groups and not state:
            return {}  # as Lightning has it where a LightningModule has no optimizers
        return {**self.own, "state": {**state, **self.own.get("state", {})}, "param_groups": groups}
