"""Find out on rank 0 which ranks save the same tensors, and whether their replicas are equal."""

from __future__ import annotations

import json

from lightning_shardckpt.checkpoint.save_values import SaveWish
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.state.replica_digests import Digests, differing
from lightning_shardckpt.system.text import count_text

_LISTED = 10


def groups_of(wishes: list[SaveWish]) -> list[list[int]]:
    """Return the ranks that hold the same tensors, as lists in rank order.

    Args:
        wishes: of every rank, in rank order.

    Raises:
        MismatchError: if the ranks disagree about the path or the step.
    """
    for what in ("path", "step"):
        found = {json.dumps(wish[what]): rank for rank, wish in reversed(list(enumerate(wishes)))}
        if len(found) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for value, rank in sorted(found.items(), key=lambda x: x[1]))
            hint = "; if the name holds a metric, log it with sync_dist=True" if what == "path" else ""
            raise MismatchError(f"the ranks disagree about the {what} of this save: {listed}{hint}")
    groups: dict[str, list[int]] = {}
    for rank, wish in enumerate(wishes):
        groups.setdefault(wish["digest"], []).append(rank)
    return list(groups.values())


def differ(marks: list[dict[str, str]]) -> bool:
    """Return whether ranks have different digests of the same replicas.

    Args:
        marks: of each rank, digests by the label of who holds the same.
    """
    known: dict[str, str] = {}
    return any(known.setdefault(label, mark) != mark for of in marks for label, mark in of.items())


def refuse_differing(path: str, reports: list[Digests]) -> None:
    """Say what differs between replicas.

    Args:
        path: of the save, for the message.
        reports: digests of everything, of every rank in rank order.

    Raises:
        MismatchError: naming tensors and ranks.
    """
    wrong = differing(dict(enumerate(reports)))
    lines = [f"{key}  ranks {' | '.join(map(str, sets))}" for key, sets in wrong.items()]
    listed = "\n  ".join(lines[:_LISTED]) + f"\n  … and {len(lines) - _LISTED} more" * (len(lines) > _LISTED)
    raise MismatchError(
        f"cannot save {path!r}: replicas differ, and a checkpoint of all ranks would mix them. "
        f"{count_text(len(lines), 'entry', 'entries')}, by the ranks that hold the same:\n  {listed}\n"
        "Make them equal (average them, let hooks replace a tied weight under all its names, …), "
        'or take those of the lowest rank with replicas="first".'
    )
