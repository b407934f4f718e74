"""Merge the optimizer documents of groups of ranks into one, as FORMAT.md says. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


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
