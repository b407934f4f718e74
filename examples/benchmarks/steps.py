"""Section steps: where the time of a save and of a load goes, beside what the machine needs for the same bytes.

Each case has the steps that ranks take together, in order, with the wait for the slowest rank; then all that is done
between them, as a Trainer's state dicts; then single things that no save or load of this kind can do without.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import limits
import ours
import torch
import torch.distributed as dist
from state import State, llama, view
from state import small as small_state
from turns import Facts, Row, case, clear, on_ranks

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.checksum import checksum

_MILLI = 1e3
_WINDOW = 4 << 20  # of a read that is hashed after it
_ALL, _BETWEEN = "all", "between the steps"


class _TimedRanks(Ranks):
    """Notes how long each step takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.took: Facts = {}

    def step(self, phase: str, *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        found = super().step(phase, *args, **options)
        self.took[phase.split()[0]] = time.perf_counter() - begin
        return found


class _Timed:
    """A CheckpointIO and its steps."""

    def __init__(self, state: State, **options: Any) -> None:
        self._state, self._ranks = state, _TimedRanks.of_default_group()
        assert isinstance(self._ranks, _TimedRanks)
        self.io = ours.attached(state, self._ranks, **options)

    def save(self, path: str) -> Facts:
        """Until it returns."""
        return self._measured(lambda: self.io.save_checkpoint(ours.checkpoint(self._state, self.io), path))

    def load(self, path: str) -> Facts:
        """The same for a load."""
        return self._measured(lambda: ours.load_into(self.io, self._state, path))

    def _measured(self, work: Callable[[], None]) -> Facts:
        self._ranks.took = {}
        seconds = _seconds(work)
        steps = self._ranks.took
        return {**steps, _BETWEEN: seconds - sum(steps.values()), _ALL: seconds}


def _seconds(work: Callable[[], Any]) -> float:
    """Until all ranks are done."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def steps(options: Namespace, folder: str) -> list[Row]:
    """On 2 ranks: saves and loads of --gb GB, and of --tensors small tensors. On 4: saves, beside the disk's speed."""
    rows = case("steps", "2 ranks", on_ranks, 2, _large, options, folder)
    rows += case("steps", "4 ranks", on_ranks, 4, _crowded, options, folder)
    return rows + case("steps", f"{options.tensors:,} tensors", on_ranks, 2, _small, options, folder)


def _large(options: Namespace, folder: str) -> list[Row]:
    state, path, plain = llama(options.gb), f"{folder}/steps", f"{folder}/plain"
    limits.write_buffered(state, plain, sync=True)
    candidates = {
        "save": _Timed(state),
        "asynchronous save": _Timed(state, use_async=True),
    }
    verified = _Timed(state)
    loads = {"load, verified": verified, "load, verify=False": _Timed(state, verify=False)}
    loads["load, verified, new moments"] = verified
    found: dict[str, list[Facts]] = {}
    for _ in range(1 + options.rounds):  # in the first one nothing is planned yet
        for name, candidate in candidates.items():
            clear(path)
            facts = candidate.save(path)
            candidate.io.wait()
            floors = {"limit: checksums": lambda: _hash(state)}
            if name != "save":
                floors = {"limit: memcpy": lambda: limits.copy(state, "")}
            found.setdefault(name, []).append(facts | {k: _seconds(work) for k, work in floors.items()})
        loads["load, verified"].load(path)  # from now on it is in the page cache
        for name, candidate in loads.items():
            if "new" in name:
                state.empty_moments()
            facts = candidate.load(path)
            found.setdefault(name, []).append(facts | _floors(state, plain))
    return _rows(found)


def _crowded(options: Namespace, folder: str) -> list[Row]:
    """More ranks than cores: what each does beside writing takes turns with the others'."""
    state, path, plain = llama(options.gb), f"{folder}/steps", f"{folder}/plain"
    candidate, found = _Timed(state), list[Facts]()
    for _ in range(1 + options.rounds):
        facts = {**candidate.save(path), "limit: checksums": _seconds(lambda: _hash(state))}
        clear(path)
        facts["limit: O_DIRECT + fsync"] = _seconds(lambda: limits.write_direct(state, plain))
        clear(plain)
        found.append(facts)
    return _rows({"save": found}, 4)


def _floors(state: State, plain: str) -> Facts:
    weights = state.pull()[: sum(1 for _ in state.model.parameters())]
    moments = [tensor for name, tensor in state.locals().items() if name.startswith("optimizer.")]
    new: list[torch.Tensor] = []
    return {
        "limit: preadv in place": _seconds(lambda: limits.read(state, plain)),
        "limit: preadv of the weights again": _seconds(lambda: limits.read_into(weights, plain)),
        "limit: checksums": _seconds(lambda: _hash(state)),
        "limit: to touch new memory for the moments": _seconds(lambda: new.extend(map(torch.ones_like, moments))),
    }


def _hash(state: State) -> None:
    for tensor in state.pull():
        data = view(tensor)
        for at in range(0, len(data), _WINDOW):
            checksum(data[at : at + _WINDOW])


def _small(options: Namespace, folder: str) -> list[Row]:
    state, path = small_state(options.tensors), f"{folder}/small"
    candidate, found = _Timed(state), dict[str, list[Facts]]()
    for _ in range(1 + options.rounds):
        clear(path)
        floor = {"limit: the state dict": _seconds(state.model.state_dict)}
        found.setdefault(f"save of {options.tensors:,} tensors", []).append(candidate.save(path) | floor)
        found.setdefault(f"load of {options.tensors:,} tensors", []).append(candidate.load(path) | floor)
    return _rows(found)


def _rows(found: dict[str, list[Facts]], world: int = 2) -> list[Row]:
    rows = []
    for name, rounds in found.items():
        for step in rounds[-1]:
            facts = [{"ms": facts[step] * _MILLI} for facts in rounds[1:]]
            about = {"section": "steps", "case": f"{name}, {world} ranks", "limit": None, "peer": None}
            rows.append({**about, "way": step, "checked": {}, "rounds": facts})
    return rows
