"""Code that modules run when they are loaded runs through every door. Oracle: torch's own ``load_state_dict``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import Pretrained, load, load_from_checkpoint, save
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import MismatchError, RankError, StateError
from lightning_shardckpt.fabric import ShardedStrategy as FabricStrategy
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.local_tensors import is_elsewhere
from tests.support import tiny
from tests.support.pool import run_each, run_ranks

# ── modules with hooks ────────────────────────────────────────────────────────────────────────────────────────────


def hooked(module: nn.Module, *, before: Any = None, after: Any = None, saving: Any = None) -> Any:
    if before is not None:
        module.register_load_state_dict_pre_hook(before)
    if after is not None:
        module.register_load_state_dict_post_hook(after)
    if saving is not None:
        module.register_state_dict_post_hook(saving)
    return module


class Linear(nn.Module):
    """Some rows for every rank."""

    def __init__(self, first: float = 0.0, rows: int = 6, **buffers: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0 * rows).reshape(rows, 4) / 8 + first)
        self.register_buffer("count", torch.tensor(first))
        self.register_buffer("table", torch.zeros(4), persistent=False)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T @ torch.ones(len(self.weight), 4)


@torch.no_grad()
def rebuild(module: Any, keys: Any) -> None:
    module.table.copy_(module.weight.cumsum(0)[-1] + module.count)


def double(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].cumsum(0) * 2 + module.weight.detach()
    state[prefix + "count"].add_(1)


def rename(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + "old.")]:
        state[prefix + "inner." + name.removeprefix(prefix + "old.")] = state.pop(name)


def pack(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    state[prefix + "packed"] = state.pop(prefix + "weight")
    state[prefix + "sum"] = state[prefix + "count"] + 5


def unpack(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    state[prefix + "weight"] = state.pop(prefix + "packed")
    state[prefix + "count"] = state.pop(prefix + "sum") * 2


class Queue(Linear):
    """A buffer that is as long as what is stored."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.queue = torch.empty_like(state[prefix + "queue"])
        super()._load_from_state_dict(state, prefix, *rest)


class Second(Linear):
    """Version 2 has half the values."""

    _version = 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 0) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Extra(Linear):
    """Its extra state says how its hook changes the weight, which runs after it."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__(float(factor))
        self.factor = factor
        hooked(self, after=self.scale)

    def get_extra_state(self) -> Any:
        return {"factor": self.factor}

    def set_extra_state(self, state: Any) -> None:
        self.factor = state["factor"]

    @staticmethod
    @torch.no_grad()
    def scale(module: Any, keys: Any) -> None:
        module.weight.mul_(module.factor)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "rebuilt": (lambda: Linear(3.0), lambda: hooked(Linear(), after=rebuild)),
    "doubled": (lambda: Linear(3.0), lambda: hooked(Linear(), before=double)),
    "renamed": (
        lambda: nn.ModuleDict({"old": Linear(2.0), "last": Linear(3.0)}),
        lambda: hooked(nn.ModuleDict({"inner": Linear(), "last": Linear()}), before=rename),
    ),
    "packed": (lambda: hooked(Linear(3.0), saving=pack), lambda: hooked(Linear(), before=unpack, saving=pack)),
    "longer": (lambda: Queue(5.0, queue=torch.arange(1.0, 6.0)), lambda: Queue(queue=torch.ones(0))),
    "converted": (lambda: Linear(3.0), Second),
    "of the same version": (lambda: Second(3.0), Second),
    "extra state before the hook": (lambda: Extra(3), Extra),
}
"""What is stored, and what is loaded."""
SAME_NAMES = ["rebuilt", "doubled", "longer", "of the same version", "extra state before the hook"]
"""Cases in which an optimizer finds the parameters that were stored."""


class Holder(pl.LightningModule):
    """The cases, between two modules without hooks."""

    def __init__(self, stored: bool = False, names: Iterable[str] = CASES) -> None:
        super().__init__()
        torch.manual_seed(5 if stored else 6)
        modules = {name: CASES[name][0 if stored else 1]() for name in names}
        self.cases = nn.ModuleDict({"begin": nn.Linear(4, 4), **modules, "end": nn.Linear(4, 4)})
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.cases["end"](self.cases["begin"](x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0]).sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self(batch[0])

    def on_fit_start(self) -> None:
        self.seen = contents(self)

    on_validation_start = on_fit_start

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.5)


def contents(module: nn.Module) -> dict[str, Any]:
    """Everything that loading may have changed, whole; every rank must call it."""
    named = chain(module.named_parameters(), module.named_buffers())
    found: dict[str, Any] = {clean_fqn(name): tiny.whole(value) for name, value in named if not is_elsewhere(value)}
    return found | {f"{n}.factor": part.factor for n, part in module.named_modules() if hasattr(part, "factor")}


def by_torch(names: Iterable[str] = CASES, *, tensors_alone: bool = False) -> dict[str, Any]:
    """The oracle: torch's own load on a fresh module, also of a file that has no more than tensors."""
    module, stored = Holder(False, names), Holder(True, names).state_dict()
    if tensors_alone:
        stored = {name: value for name, value in stored.items() if isinstance(value, Tensor)}
    module.load_state_dict(stored, strict=not tensors_alone)
    return contents(module)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=1)


def fabric_of(world: int) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=world, strategy=FabricStrategy(data_parallel_shard_size=world))
    fabric.launch()
    return fabric


# ── doors ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Found = dict[str, list[str]]
"""The names that differ from the oracle."""


def by_functions(path: str) -> Found:
    wrapped: Any = Holder()
    wrapped.cases["renamed"] = checkpoint_wrapper(wrapped.cases["renamed"])
    wrapped.cases["extra state before the hook"].compile(backend="eager")
    one, two = Holder(), {"a": Holder(), "b": nn.Linear(2, 2)}
    save(path, {"model": Holder(True)})
    load(path, {"model": one})
    load(path, {"model": wrapped})
    save(path, {"a": Holder(True), "b": nn.Linear(2, 2)}, overwrite=True)
    load(path, two)
    names = [name for name in CASES if name != "rebuilt"]  # which mixes DTensors with plain ones
    save(path, {"model": Holder(True, names)}, overwrite=True)
    fully_shard(sharded := Holder(False, names), mesh=init_device_mesh("cpu", (2,)))
    load(path, {"model": sharded})
    every = {"one": one, "one of two": two["a"], "wrapped": wrapped}
    found = {name: differences(contents(module)) for name, module in every.items()}
    return found | {"sharded by torch": differences(contents(sharded), by_torch(names))}


def differences(found: dict[str, Any], expected: dict[str, Any] | None = None) -> list[str]:
    return tiny.differences(found, expected or by_torch())


def by_trainer(path: str) -> Found:
    save(f"{path}.ckpt", {"model": Holder(True)})
    if dist.get_rank() == 0:
        state = {n: v.contiguous() for n, v in Holder(True).state_dict().items() if isinstance(v, Tensor)}
        save_file(state, f"{path}.safetensors")
    dist.barrier()
    validated, begun, of_tensors = Holder(), Holder(), Holder()
    tiny.trainer({}).validate(validated, data(), ckpt_path=f"{path}.ckpt", verbose=False)
    tiny.train(begun, {"pretrained": Pretrained(f"{path}.ckpt", strict=True)}, 1, data=data())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pretrained weights")  # of what it lacks
        tiny.train(of_tensors, {"pretrained": f"{path}.safetensors"}, 1, data=data())
    found = {"validate": differences(validated.seen), "pretrained": differences(begun.seen)}
    return found | {"tensors": differences(of_tensors.seen, by_torch(tensors_alone=True))}


def by_resume(path: str) -> Found:
    tiny.train(Holder(True, SAME_NAMES), {}, 1, save=path, data=data())
    run = tiny.train(module := Holder(False, SAME_NAMES), {}, 2, resume=path, data=data())
    assert run.global_step == 2 and run.optimizers[0].state
    return {"resume": differences(module.seen, by_torch(SAME_NAMES))}


def by_fabric(path: str) -> Found:
    save(path, {"model": Holder(True)})
    fabric, found = fabric_of(2), Found()
    for raw in (False, True):
        model = fabric.setup_module(Holder())
        fabric.load_raw(path, model) if raw else fabric.load(path, {"model": model})
        found["load_raw" if raw else "load"] = differences(contents(model.module))
    return found


def by_one_device(path: str) -> Found:
    """Doors that load whole checkpoints: they give torch the versions of modules, too."""
    saving = tiny.trainer("auto")
    saving.validate(Holder(True), data(), verbose=False)
    saving.save_checkpoint(path)
    tiny.trainer("auto").validate(module := Holder(), data(), ckpt_path=path, verbose=False)
    consolidate(path, f"{path}.pt")
    (again := Holder()).load_state_dict(torch.load(f"{path}.pt", weights_only=True)["state_dict"])
    seen = {"validate": module.seen, "load_from_checkpoint": contents(load_from_checkpoint(Holder, path))}
    return {door: differences(found) for door, found in {**seen, "consolidate": contents(again)}.items()}


def test_every_door_loads_as_torch_does(tmp_path: Path) -> None:
    doors = {by_functions: 2, by_trainer: 2, by_resume: 2, by_fabric: 2, by_one_device: 1}
    calls = {door: (world, door, str(tmp_path / door.__name__)) for door, world in doors.items()}
    for door, ranks in run_each(calls).items():
        for found in ranks:
            assert {name for name, wrong in found.items() if wrong} == set(), (door, found)


# ── topologies ────────────────────────────────────────────────────────────────────────────────────────────────────


class Hooked(tiny.TinyLM):
    """A model whose layers have hooks, and one itself, which loads nothing of its own but what has an old name."""

    def _build(self) -> None:
        super()._build()
        for block in self.blocks:
            block.register_buffer("table", torch.zeros(16), persistent=False)
            hooked(block, before=self.change, after=self.rebuild)
        self.noted: list[Any] = []
        hooked(self, before=self.rename, after=self.note)

    @staticmethod
    def change(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "up.weight"] = state[prefix + "up.weight"].cumsum(0) + state[prefix + "norm.bias"]

    @staticmethod
    @torch.no_grad()
    def rebuild(module: Any, keys: Any) -> None:
        module.table.copy_(module.down.weight.cumsum(1)[:, -1])

    @staticmethod
    def rename(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "blocks.1.down.old" in state:
            state[prefix + "blocks.1.down.bias"] = state.pop(prefix + "blocks.1.down.old")

    @staticmethod
    def note(module: Any, keys: Any) -> None:
        module.noted.append(keys.missing_keys)


def stored_hooked() -> Hooked:
    torch.manual_seed(4)
    module = Hooked()
    down: Any = module.blocks.get_submodule("1.down")
    down.register_parameter("old", down.bias)
    down.bias = None
    return module


def by_topology(path: str, strategy: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    save(path, {"model": stored_hooked()})
    tiny.trainer(strategy).validate(module := Hooked(), tiny.loader(shuffle=False), ckpt_path=path, verbose=False)
    return contents(module), module.noted


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"data_parallel_shard_size": 2},
    "tp2": {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN},
    "pp2": {"pipeline_parallel_size": 2},
    "replicas": {"data_parallel_replicate_size": 2},
}


def test_hooks_of_layers_and_of_the_whole_see_whole_tensors(tmp_path: Path) -> None:
    (module := Hooked()).load_state_dict(stored_hooked().state_dict())
    expected = contents(module)
    ranks = run_each({name: (2, by_topology, str(tmp_path / name), way) for name, way in TOPOLOGIES.items()})
    for topology, ((first, noted), (second, also)) in ranks.items():
        assert noted == also == [[]], topology
        assert differences(first | second, expected) == [], topology
        assert differences(second | first, expected) == [], topology


# ── what is told ──────────────────────────────────────────────────────────────────────────────────────────────────


class Dropping(Linear):
    """Loses what is stored of its weight."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        del state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, *rest)


def fail(module: Any, keys: Any) -> None:
    if dist.get_rank() == 1:
        raise LookupError("no table")


class Unwrapping(nn.ModuleDict):
    """Takes what a wrapper has saved."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({n.removeprefix("wrapped."): v for n, v in state_dict.items()}, strict, assign)


def heads(stored: bool) -> nn.Module:
    """A module with a hook beside others, of which one has another shape and one another name than the stored."""
    torch.manual_seed(stored)
    linear = Linear(3.0) if stored else hooked(Linear(), before=double)
    common = {"plain": nn.Linear(4, 4), "hooked": linear, "head": nn.Linear(4, 5 if stored else 3)}
    return nn.ModuleDict({**common, "old" if stored else "new": nn.Linear(2, 2)})


def load_what_differs(path: str) -> list[Any]:
    save(f"{path}-1", {"model": Linear(3.0)})
    for module, told in ((Dropping(), "weight  in model only"), (hooked(Linear(), after=fail), "no table")):
        with pytest.raises((MismatchError, RankError, LookupError), match=told) as caught:
            load(f"{path}-1", {"model": module})
        assert told != "no table" or dist.get_rank() == 1 or "rank 1" in str(caught.value)
    save(f"{path}-2", {"model": nn.ModuleDict({"wrapped": nn.ModuleDict({"inner": Linear(3.0)})})})
    load(f"{path}-2", {"model": (unwrapping := Unwrapping({"inner": Linear()}))})
    assert differences(contents(unwrapping["inner"]), contents(Linear(3.0))) == []
    save(f"{path}-3", {"model": heads(True)})
    strict, rest = heads(False), heads(False)
    with pytest.raises(MismatchError) as refused:
        load(f"{path}-3", {"model": strict})
    with pytest.raises(StateError, match="failed after some tensors"):
        strict.get_submodule("plain")(torch.ones(4))
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        load(f"{path}-3", {"model": rest}, strict=False)
    return [str(refused.value), "\n".join(str(note.message) for note in noted), contents(rest)]


def test_what_hooks_leave_missing_and_what_fails_in_them_is_told_on_all_ranks(tmp_path: Path) -> None:
    expected = heads(False)
    for name in ("plain", "hooked"):
        expected.get_submodule(name).load_state_dict(heads(True).get_submodule(name).state_dict())
    lines = ["head.weight  shape (5, 4)", "new.bias  in model only", "old.bias  in checkpoint only"]
    for rank, (refused, notes, rest) in enumerate(run_ranks(2, load_what_differs, str(tmp_path / "a"))):
        assert all(line in refused for line in lines)
        assert rank > 0 or all(line in notes for line in lines)
        assert differences(rest, contents(expected)) == []


class Growing(Linear):
    """Puts a parameter of the stored shape in the place of its own."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.weight = nn.Parameter(torch.empty_like(state[prefix + "weight"]))
        super()._load_from_state_dict(state, prefix, *rest)


def grown(module: nn.Module) -> Holder:
    holder = Holder(names=())
    holder.cases["grown"] = module
    return holder


def refuse(path: str) -> None:
    """Parameters that a hook replaces when they are sharded, and tensors without memory."""
    tiny.train(grown(Linear(1.0, 8)), {}, 1, save=path, data=data())
    fabric = fabric_of(2)
    model = fabric.setup_module(grown(Growing()))
    with torch.device("meta"):
        on_meta = grown(Linear(1.0, 8))
    doors: list[tuple[str, Callable[[], Any]]] = [
        ("new parameters", lambda: tiny.train(grown(Growing()), {"pretrained": path}, 1, data=data())),
        ("new parameters", lambda: fabric.load(path, {"state_dict": model})),
        ("meta device.*to_empty", lambda: load(path, {"state_dict": on_meta})),
    ]
    for said, door in doors:
        with pytest.raises((StateError, RankError), match=f"(?s){said}") as caught:
            door()
        assert "weight" in str(caught.value)
    tiny.trainer({}).validate(evaluated := grown(Growing()), data(), ckpt_path=path, verbose=False)
    assert torch.equal(tiny.whole(evaluated.cases.get_parameter("grown.weight")), Linear(1.0, 8).weight)


def test_hooks_that_replace_parameters_before_training_and_tensors_without_memory_are_refused(tmp_path: Path) -> None:
    run_ranks(2, refuse, str(tmp_path / "a.ckpt"))
