"""Random state for saves: ``python -m tests.sweeps.state_trees --trees 2000 --seed 0``.

Modules and optimizers, also in lists, and nested dicts and lists of tensors of all kinds and values. A tree comes back
equal, bit by bit, or the save refuses it by name; nothing else may happen.
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import MismatchError, StateError
from tests.support.pool import run_ranks

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn),
)
OPTIMIZERS = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)


class Trees:
    """Random trees; the same of a seed, but for tensors that a rank makes different."""

    def __init__(self, seed: int, rank: int) -> None:
        self._random, self._rank = random.Random(seed), rank
        self._generator = torch.Generator().manual_seed(seed)
        self.odd = False
        """Whether there is something that must be refused."""
        self.differs = False
        """Whether ranks have different replicas."""

    def state(self) -> dict[str, Any]:
        """What to save."""
        found: dict[str, Any] = {}
        for n in range(self._random.randint(1, 4)):
            kind = self._random.choices(["node", "module", "modules", "trained"], [8, 2, 1, 2])[0]
            if kind == "trained":
                found |= {f"k{n} {key}": value for key, value in self._trained().items()}
            else:
                found[f"k{n}"] = self._node(0) if kind == "node" else getattr(self, f"_{kind}")()
        return found

    def _node(self, depth: int) -> Any:
        kinds = ["tensor", "tensor", "value", "odd"] + ["dict", "list"] * (depth < 3)
        weights = [6, 6, 8, 0.4, *([4, 3] if depth < 3 else [])]
        return getattr(self, f"_{self._random.choices(kinds, weights)[0]}")(depth)

    def _list(self, depth: int) -> list[Any]:
        return [self._node(depth + 1) for _ in range(self._random.randint(0, 3))]

    def _dict(self, depth: int) -> dict[Any, Any]:
        return {f"n{n}": node for n, node in enumerate(self._list(depth))}

    def _value(self, _: int) -> Any:
        choose = self._random.choice
        plain = [None, True, -1, 2**70, 1.5, float("inf"), "text", b"bytes", (1, (2, "3")), {1, 2}, {"a": [1, {}]}]
        return choose([*plain, {3: "x"}, range(3), np.float32(2.5), torch.float16, slice(1, 2)])

    def _shape(self) -> list[int]:
        return [self._random.choice([0, 1, 2, 3, 5]) for _ in range(self._random.randint(0, 3))]

    def _plain(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._random.choice(DTYPES)
        raw = torch.randn(self._shape(), generator=self._generator) * 3
        return (raw > 0) if dtype is torch.bool else raw.abs().to(dtype) if not dtype.is_signed else raw.to(dtype)

    def _tensor(self, _: int) -> Tensor:
        found = self._plain()
        how = self._random.choice(["plain", "plain", "transposed", "view", "expanded", "grad"])
        if how == "transposed" and found.ndim > 1:
            return found.transpose(0, 1)
        if how == "view" and found.ndim and found.shape[0] > 1:
            return found[1:]
        if how == "grad" and found.is_floating_point():
            return found.requires_grad_(found.dtype in (torch.float32, torch.float64))
        return found

    def _modules(self) -> list[nn.Module]:
        return [self._module() for _ in range(self._random.randint(1, 3))]

    def _module(self) -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
        with torch.no_grad():
            for value in module.state_dict().values():
                if value.is_floating_point():
                    value.normal_(generator=self._generator)
        kind = self._random.choice(["plain", "tied", "buffer", "view", "half"])
        if kind == "tied":
            module.append(nn.Linear(4, 3, bias=False))
            module[3].weight = module[2].weight
        elif kind == "buffer":
            module.register_buffer("more", self._plain())
        elif kind == "view":
            whole = torch.randn(6, 3, generator=self._generator)
            module.register_buffer("part", whole[2:5])
        elif kind == "half":
            module.bfloat16()
        return module

    def _trained(self) -> dict[str, Any]:
        module = self._module()
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = self._random.choice(OPTIMIZERS)(trained, lr=self._random.random())
        for parameter in trained:
            parameter.grad = torch.randn(parameter.shape, generator=self._generator).to(parameter.dtype)
        for _ in range(self._random.randint(0, 2)):
            optimizer.step()
        if self._random.random() < 0.05:
            self.differs = True
            with torch.no_grad():
                next(iter(trained)).add_(self._rank)
        return {"module": module, "optimizer": optimizer}

    def _odd(self, _: int) -> Any:
        self.odd = True
        two: Any = TwoTensor
        makes: list[Any] = [lambda: torch.eye(3).to_sparse(), lambda: torch.ones(3, device="meta"), object]
        makes += [lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), lambda: [lambda: 1]]
        makes += [lambda: two(torch.ones(2), torch.ones(2)), lambda: (nn.Linear(2, 2),)]
        return self._random.choice([*makes, lambda: {"deep": {"net": nn.Linear(2, 2)}}])()


def same(a: Any, b: Any) -> bool:
    """Bit by bit, for what a tree may have."""
    if isinstance(a, nn.Module):
        one, other = a.state_dict(), b.state_dict()
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(a, torch.optim.Optimizer):
        return same(a.state_dict(), b.state_dict())
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        one, other = (bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) for t in (a, b))
        return one == other
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def blank(state: Any) -> Any:
    """The same tree with other values, to be filled; optimizers go on with the parameters of the new modules."""
    if isinstance(state, dict):
        found = {key: blank(value) for key, value in state.items() if not isinstance(value, torch.optim.Optimizer)}
        for key, value in state.items():
            if isinstance(value, torch.optim.Optimizer):
                module = found[key.replace("optimizer", "module")]
                found[key] = type(value)([p for p in module.parameters() if p.requires_grad], lr=0.5)
        return {key: found[key] for key in state}
    if isinstance(state, list):
        return [blank(value) for value in state]
    if isinstance(state, nn.Module):
        twin = copy.deepcopy(state)
        with torch.no_grad():
            for value in twin.state_dict().values():
                value.zero_()
        return twin
    if isinstance(state, Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    return "to be replaced"


def run(seeds: list[int], folder: str) -> Counter[str]:
    """On every rank: what became of each tree."""
    found: Counter[str] = Counter()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trees = Trees(seed, rank)
            state = trees.state()
            path = Path(folder) / str(seed)
            refused = trees.odd or (trees.differs and world > 1)
            try:
                ckpt.save(path, state, sync_files=False)
            except (StateError, MismatchError) as error:
                assert refused, f"seed {seed} was refused: {error}"
                found["refused"] += 1
                continue
            assert not refused, f"seed {seed} was saved, though it has what cannot be"
            other = blank(state)
            rest = ckpt.load(path, other)
            assert rest == {}, f"seed {seed} has a remainder: {rest}"
            assert same(state, other), f"seed {seed} came back otherwise"
            found["equal"] += 1
            if rank == 0:
                shutil.rmtree(path, ignore_errors=world > 1)
    return found


def main() -> int:
    from tests.sweeps.state_trees import run  # as a name that other processes can import

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seeds = list(range(options.seed, options.seed + options.trees))
    with tempfile.TemporaryDirectory() as folder:
        (alone,) = run_ranks(1, run, seeds, folder, init_process_group=False, timeout_s=3000)
        three = run_ranks(3, run, seeds[: max(1, len(seeds) // 10)], folder + "/three", timeout_s=3000)
    print(f"one process: {dict(alone)}; three: {dict(three[0])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
