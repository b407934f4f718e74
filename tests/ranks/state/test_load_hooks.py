"""Code that modules run when they are loaded runs through every door, as in torch's ``load_state_dict``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import torch.distributed as dist
import transformers as tf
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import load, load_from_checkpoint, save
from lightning_shardckpt.compat.dtensor import live_state_dict
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import MismatchError, RankError, StateError
from lightning_shardckpt.fabric import ShardedStrategy as FabricStrategy
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.load_hooks import NO_HOOKS, LoadHooks
from tests.support import tiny
from tests.support.load_hooks import (
    CASES,
    Doubled,
    Linear,
    RebuiltTable,
    contents,
    same,
    weight_norm,
    whole,
)
from tests.support.pool import run_each, run_ranks

SAME_NAMES = [
    "a hook after rebuilds a table",
    "a hook before changes values",
    "an override makes a buffer longer",
    "the same version is not",
    "extra state comes before hooks after",
    "quantization that has seen data",
]
"""Cases in which an optimizer finds the parameters that were stored."""


def all_cases(stored: bool, names: Iterable[str] = CASES) -> nn.Module:
    """Modules of the table as one, between two without hooks."""
    modules = {name: (CASES[name].stored if stored else CASES[name].fresh)() for name in names}
    torch.manual_seed(5 if stored else 6)
    return nn.ModuleDict({"begin": nn.Linear(4, 4), **modules, "end": nn.Linear(4, 4)})


def by_torch(names: Iterable[str] = CASES) -> dict[str, Any]:
    """The oracle: torch's own load on a fresh module."""
    module = all_cases(False, names)
    module.load_state_dict(all_cases(True, names).state_dict())
    return contents(module)


def by_torch_of_tensors() -> dict[str, Any]:
    """The same of a file that has no more than tensors."""
    module, stored = all_cases(False), all_cases(True).state_dict()
    module.load_state_dict({n: v for n, v in stored.items() if isinstance(v, torch.Tensor)}, strict=False)
    return contents(module)


def by_functions(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Each case alone, then all as one module."""
    found = dict[str, Any]()
    for name, case in CASES.items():
        save(f"{path}-{name}", {"model": case.stored()})
        module = case.fresh()
        load(f"{path}-{name}", {"model": module})
        found |= {f"{name}.{key}": value for key, value in contents(module).items()}
    save(path, {"model": all_cases(True)})
    wrapped: Any = all_cases(False)
    eager = partial(torch.compile, backend="eager")
    for name, wrap in (("a hook before renames what a child has", checkpoint_wrapper), ("extra state", eager)):
        name = next(one for one in CASES if one.startswith(name))
        wrapped[name] = wrap(wrapped[name])
    load(path, {"model": wrapped})
    one, other = all_cases(False), {"a": all_cases(False), "b": nn.Linear(2, 2)}
    load(path, {"model": one})
    save(path, {"a": all_cases(True), "b": nn.Linear(2, 2)}, overwrite=True)
    load(path, other)
    return found, [contents(one), contents(other["a"]), {clean_fqn(n): v for n, v in contents(wrapped).items()}]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_functions_load_as_torch_does(tmp_path: Path, world: int) -> None:
    expected = by_torch()
    alone = {name: value for name, value in expected.items() if not name.startswith(("begin", "end"))}
    for found, together in run_ranks(world, by_functions, str(tmp_path / "a")):
        assert same(found, alone) == []
        assert [same(one, expected) for one in together] == [[], [], []]


def sharded_by_torch(path: str, names: list[str]) -> dict[str, Any]:
    save(path, {"model": Holder(True, names)})
    module = Holder(False, names)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    load(path, {"model": module})
    return contents(module.cases)


def test_hooks_run_on_what_torch_itself_has_sharded(tmp_path: Path) -> None:
    names = [name for name in CASES if name != "a hook after rebuilds a table"]  # which mixes DTensors with plain ones
    for found in run_ranks(2, sharded_by_torch, str(tmp_path / "a"), names):
        assert same(found, by_torch(names)) == []


class Holder(pl.LightningModule):
    """The cases in a Trainer's module."""

    def __init__(self, stored: bool = False, names: Iterable[str] = CASES) -> None:
        super().__init__()
        self.cases = all_cases(stored, names)
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("begin", "end"):
            x = self.cases.get_submodule(name)(x)
        return x

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch[0]).sum()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self(batch[0])

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        result: torch.Tensor = self(batch[0])
        return result

    def on_fit_start(self) -> None:
        self.seen = contents(self.cases)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.5)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=1)


def by_trainer(path: str, world: int) -> list[dict[str, Any]]:
    """Entry points of a Trainer that take a checkpoint, and the ways to begin with weights."""
    strategy, found = {"data_parallel_shard_size": world}, list[dict[str, Any]]()
    save(f"{path}.ckpt", {"model": Holder(True)})
    if dist.get_rank() == 0:
        state = Holder(True).state_dict()
        torch.save(state, f"{path}.pt")
        save_file({n: v.contiguous() for n, v in state.items() if isinstance(v, torch.Tensor)}, f"{path}.safetensors")
    dist.barrier()
    for entry in ("validate", "predict"):
        module = Holder()
        getattr(tiny.trainer(strategy), entry)(module, data(), ckpt_path=f"{path}.ckpt")
        found.append(module.seen)
    for weights, strict in (("ckpt", True), ("pt", True), ("safetensors", False)):
        module, start = Holder(), {"pretrained": f"{path}.{weights}", "pretrained_strict": strict}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore" if not strict else "error", "pretrained weights")  # of what it lacks
            tiny.trainer({**strategy, **start}, max_steps=1).fit(module, data())
        found.append(module.seen)
    return found


def test_a_trainer_loads_as_torch_does(tmp_path: Path) -> None:
    expected, tensors_alone = by_torch(), by_torch_of_tensors()
    for *every, of_tensors in run_ranks(2, by_trainer, str(tmp_path / "a"), 2):
        assert [same(one, expected) for one in every] == [[]] * 4
        assert same(of_tensors, tensors_alone) == []


def resumed(path: str, world: int) -> tuple[dict[str, Any], list[Any]]:
    """Train, save, and resume with fresh modules."""
    strategy = {"data_parallel_shard_size": world}
    first = tiny.trainer(strategy, max_steps=1)
    first.fit(Holder(True, SAME_NAMES), data())
    first.save_checkpoint(path)
    module, run = Holder(False, SAME_NAMES), tiny.trainer(strategy, max_steps=2)
    run.fit(module, data(), ckpt_path=path)
    return module.seen, [run.global_step, len(run.optimizers[0].state)]


def test_a_resume_runs_the_code_once(tmp_path: Path) -> None:
    expected = by_torch(SAME_NAMES)
    for found, (step, states) in run_ranks(2, resumed, str(tmp_path / "a.ckpt"), 2):
        assert same(found, expected) == []
        assert step == 2 and states > 0


def by_fabric(path: str, world: int) -> list[dict[str, Any]]:
    save(path, {"model": all_cases(True)})
    fabric = Fabric(accelerator="cpu", devices=world, strategy=FabricStrategy(data_parallel_shard_size=world))
    fabric.launch()
    found = []
    for raw in (False, True):
        model = fabric.setup_module(all_cases(False))
        fabric.load_raw(path, model) if raw else fabric.load(path, {"model": model})
        found.append(contents(model.module))
    return found


def test_fabric_loads_as_torch_does(tmp_path: Path) -> None:
    expected = by_torch()
    for every in run_ranks(2, by_fabric, str(tmp_path / "a"), 2):
        assert [same(one, expected) for one in every] == [[], []]


def by_one_device(path: str) -> list[dict[str, Any]]:
    """Doors that load whole checkpoints: they give torch the versions of modules, too."""
    saving = tiny.trainer("auto")
    saving.validate(Holder(True), data())
    saving.save_checkpoint(path)
    module = Holder()
    tiny.trainer("auto").validate(module, data(), ckpt_path=path)
    consolidate(path, f"{path}.pt")
    again = Holder()
    again.load_state_dict(torch.load(f"{path}.pt", weights_only=True)["state_dict"])
    return [module.seen, contents(load_from_checkpoint(Holder, path).cases), contents(again.cases)]


def test_doors_that_load_whole_checkpoints_know_the_versions_of_modules(tmp_path: Path) -> None:
    ((*every,),) = run_ranks(1, by_one_device, str(tmp_path / "a"))
    expected = by_torch()
    assert [same(one, expected) for one in every] == [[], [], []]


class HookedBlock(tiny.Block):
    """A layer with hooks of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(16), persistent=False)
        self.register_load_state_dict_pre_hook(self.change)  # type: ignore[no-untyped-call]  # torch's
        self.register_load_state_dict_post_hook(self.rebuild)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def change(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "up.weight"] = state[prefix + "up.weight"].cumsum(0) + state[prefix + "norm.bias"]

    @staticmethod
    def rebuild(module: Any, keys: Any) -> None:
        with torch.no_grad():
            module.table.copy_(module.down.weight.cumsum(1)[:, -1])


class Hooked(tiny.TinyLM):
    """A model whose layers have hooks, and one itself, which loads nothing of its own but what has an old name."""

    def _build(self) -> None:
        super()._build()
        self.blocks = nn.ModuleList([HookedBlock() for _ in range(2)])
        self.register_load_state_dict_pre_hook(self.rename)  # type: ignore[no-untyped-call]  # torch's
        self.register_load_state_dict_post_hook(self.note)  # type: ignore[no-untyped-call]  # torch's
        self.noted: list[Any] = []

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
    down = module.blocks.get_submodule("1.down")
    down.register_parameter("old", down.bias)  # type: ignore[arg-type]
    down.bias = None  # type: ignore[assignment]
    return module


def by_topology(path: str, strategy: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    save(path, {"model": stored_hooked()})
    pl.seed_everything(7)
    module = Hooked()
    tiny.trainer(strategy).validate(module, tiny.loader(shuffle=False), ckpt_path=path)
    return contents(module), module.noted


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"data_parallel_shard_size": 2},
    "tp2": {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN},
    "pp2": {"pipeline_parallel_size": 2},
    "replicas": {"data_parallel_replicate_size": 2},
}


def test_hooks_of_layers_and_of_the_whole_see_whole_tensors(tmp_path: Path) -> None:
    module = Hooked()
    module.load_state_dict(stored_hooked().state_dict())
    expected = contents(module)
    ranks = run_each({name: (2, by_topology, str(tmp_path / name), way) for name, way in TOPOLOGIES.items()})
    for topology, both in ranks.items():
        for one, noted in both:
            assert noted == [[]], topology
            assert same(one, {name: expected[name] for name in one}) == [], topology
        assert same({**both[0][0], **both[1][0]}, expected) == [], topology


class Plain(tiny.TinyLM):
    """A model without load hooks, which tells what it looks like to a load once it is sharded."""

    def on_validation_start(self) -> None:
        state_dicts = (self.state_dict(), live_state_dict(self))
        self.hooks = [LoadHooks.of({"": self}, state_dict) for state_dict in state_dicts]


def hooks_by_topology(strategy: dict[str, Any]) -> list[Any]:
    module = Plain()
    tiny.trainer(strategy).validate(module, tiny.loader(shuffle=False))
    return module.hooks


def test_sharding_a_model_without_hooks_leaves_it_to_be_filled_in_place() -> None:
    ranks = run_each({name: (2, hooks_by_topology, way) for name, way in TOPOLOGIES.items()})
    assert [found for every in ranks.values() for found in every] == [[NO_HOOKS, NO_HOOKS]] * 8


class Dropping(Linear):
    """Loses what is stored of its weight."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        del state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, *rest)


class Failing(Linear):
    """Its hook fails on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.fail)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def fail(module: Any, keys: Any) -> None:
        if dist.get_rank() == 1:
            raise LookupError("no table")


class Unwrapping(nn.Module):
    """Takes what a wrapper has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({n.removeprefix("wrapped."): v for n, v in state_dict.items()}, strict, assign)


def fail(path: str) -> list[Any]:
    found: list[Any] = []
    save(f"{path}-1", {"model": Linear(3.0)})
    for module in (Dropping(), Failing()):
        with pytest.raises((MismatchError, RankError, LookupError)) as caught:
            load(f"{path}-1", {"model": module})
        found.append(str(caught.value))
    module = Dropping()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says which
        load(f"{path}-1", {"model": module}, strict=False)
    found.append(contents(module))
    save(f"{path}-2", {"model": nn.ModuleDict({"wrapped": nn.ModuleDict({"inner": Linear(3.0)})})})
    unwrapping = Unwrapping()
    load(f"{path}-2", {"model": unwrapping})
    return [*found, contents(unwrapping)]


def test_what_hooks_leave_missing_and_what_fails_in_them_is_told_on_all_ranks(tmp_path: Path) -> None:
    dropping, unwrapping = Dropping(), Unwrapping()
    dropping.load_state_dict(Linear(3.0).state_dict(), strict=False)
    unwrapping.inner.load_state_dict(Linear(3.0).state_dict())
    for missing, failed, kept, unwrapped in run_ranks(2, fail, str(tmp_path / "a")):
        assert "weight  in model only" in missing
        assert "no table" in failed and ("rank 1" in failed or failed == "'no table'")
        assert same(kept, contents(dropping)) == []
        assert same(unwrapped, contents(unwrapping)) == []


def heads(stored: bool) -> nn.Module:
    """A module with a hook beside others, of which one has another shape and one another name than the stored."""
    torch.manual_seed(stored)
    common = {"plain": nn.Linear(4, 4), "hooked": Doubled(3.0 * stored), "head": nn.Linear(4, 5 if stored else 3)}
    return nn.ModuleDict({**common, "old" if stored else "new": nn.Linear(2, 2)})


def load_heads(path: str) -> list[Any]:
    save(path, {"model": heads(True)})
    strict, rest = heads(False), heads(False)
    with pytest.raises(MismatchError) as refused:
        load(path, {"model": strict})
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        load(path, {"model": rest}, strict=False)
    with pytest.raises(StateError, match="failed after some tensors"):
        strict.get_submodule("plain")(torch.ones(4))
    return [str(refused.value), "\n".join(str(note.message) for note in noted), contents(rest)]


def test_differences_beside_a_hook_are_told_at_once_and_left_out_if_not_strict(tmp_path: Path) -> None:
    expected = heads(False)
    for name in ("plain", "hooked"):
        expected.get_submodule(name).load_state_dict(heads(True).get_submodule(name).state_dict())
    lines = ["head.weight  shape (5, 4)", "new.bias  in model only", "old.bias  in checkpoint only"]
    for rank, (refused, notes, rest) in enumerate(run_ranks(2, load_heads, str(tmp_path / "a"))):
        assert all(line in refused for line in lines)
        assert rank > 0 or all(line in notes for line in lines)
        assert same(rest, contents(expected)) == []


class Lacking(Linear):
    """Its hook puts in place one of two entries that are not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.register_load_state_dict_pre_hook(self.add)  # type: ignore[no-untyped-call]  # torch's

    @staticmethod
    def add(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "one"] = torch.full((2,), 7.0)


def test_an_entry_that_neither_the_checkpoint_nor_a_hook_has_is_told_if_not_strict(tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": Linear(3.0)})
    module, expected = Lacking(), Lacking()
    with pytest.warns(UserWarning, match="other  in model only") as noted:
        load(tmp_path / "a", {"model": module}, strict=False)
    assert not any("one  in model only" in str(note.message) for note in noted)
    expected.load_state_dict(Linear(3.0).state_dict(), strict=False)
    assert same(contents(module), contents(expected)) == []


class Growing(Linear):
    """Puts a parameter of the stored shape in the place of its own."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.weight = nn.Parameter(torch.empty_like(state[prefix + "weight"]))
        super()._load_from_state_dict(state, prefix, *rest)


class Grown(Holder):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(names=())
        self.cases["grown"] = module


def grow(path: str, world: int) -> list[str]:
    """What is said of parameters that are replaced, by doors that have sharded them."""
    strategy, found = {"data_parallel_shard_size": world}, list[str]()
    save(path, {"model": Grown(Linear(1.0, 8))})
    fabric = Fabric(accelerator="cpu", devices=world, strategy=FabricStrategy(**strategy))
    fabric.launch()
    model = fabric.setup_module(Grown(Growing()))
    doors: list[Callable[[], Any]] = [
        lambda: tiny.trainer({**strategy, "pretrained": path}, max_steps=1).fit(Grown(Growing()), data()),
        lambda: fabric.load(path, {"model": model}),
        lambda: tiny.trainer(strategy, max_steps=2).fit(Grown(Growing()), data(), ckpt_path=f"{path}.ckpt"),
    ]
    saving = tiny.trainer(strategy, max_steps=1)
    saving.fit(Grown(Linear(1.0, 8)), data())
    saving.save_checkpoint(f"{path}.ckpt")
    for door in doors:
        with pytest.raises((StateError, RankError), match="new parameters in place of") as caught:
            door()
        assert "cases.grown.weight" in str(caught.value)
        found.append(str(caught.value))
    evaluated = Grown(Growing())
    tiny.trainer(strategy).validate(evaluated, data(), ckpt_path=path)
    assert torch.equal(whole(evaluated.cases.get_parameter("grown.weight")), Linear(1.0, 8).weight)
    return found


def test_a_hook_that_replaces_a_parameter_is_refused_before_training(tmp_path: Path) -> None:
    for found in run_ranks(2, grow, str(tmp_path / "a"), 2):
        assert len(found) == 3


def load_on_meta(path: str) -> list[str]:
    """What is said of tensors without memory, of each kind."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), momentum=0.5)
    save(path, {"model": RebuiltTable(1.0), "tensor": torch.ones(3), "optimizer": optimizer})
    with torch.device("meta"):
        model, doubled, tensor = RebuiltTable(), Doubled(), torch.ones(3)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=FabricStrategy())
    fabric.launch()
    found = []
    for door, state in ((load, {"model": model}), (load, {"tensor": tensor}), (fabric.load, {"model": doubled})):
        with pytest.raises((StateError, RankError), match="meta device") as caught:
            door(path, state)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_tensors_on_the_meta_device_are_refused_by_name(tmp_path: Path, world: int) -> None:
    for model, tensor, doubled in run_ranks(world, load_on_meta, str(tmp_path / "a")):
        assert "model/weight" in model and "to_empty" in model
        assert "trainer/tensor" in tensor
        assert "model/weight" in doubled


def llama(**options: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **options, vocab_size=32))


PLAIN: dict[str, Callable[[], Any]] = {
    "torch": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.TransformerEncoderLayer(4, 2), weight_norm(False)),
    "Lightning": pl.LightningModule,
    "transformers": llama,
    "a hook for old files": lambda: tf.MambaModel(tf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32)),
    "PEFT": lambda: peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"])),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_what_does_nothing_to_a_checkpoint_of_the_same_model_stays_on_the_direct_path(kind: str) -> None:
    module = PLAIN[kind]()
    state_dict = module.state_dict()
    hooks = LoadHooks.of({"": module}, state_dict)
    assert not hooks.of_all and not hooks.act_on(())
