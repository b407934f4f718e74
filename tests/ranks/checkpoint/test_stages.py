"""Pipeline stages hold parts of one model; together they save what one process would, and load it in any partition.

The stages here are cut by hand, without the strategy: modules of other stages are weightless copies,
parameters of containers are on all stages. Oracle: the twin, the same model whole in one process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.documents import StoredOptimizer, merge_optimizers
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.load_hooks import LoadedModules
from lightning_shardckpt.state.model import WholeNames, parameter_names, tied_names
from lightning_shardckpt.state.optimizer import optimizer_leaves, optimizer_state
from lightning_shardckpt.strategy.resume import DataShare
from tests.support import tiny
from tests.support.pool import run_ranks

PARTITIONS = {
    1: [["embed", "layers.0", "layers.1", "layers.2", "head"]],
    2: [["embed", "layers.0", "layers.1"], ["layers.2", "head"]],
    3: [["embed", "layers.0"], ["layers.1"], ["layers.2", "head"]],
}


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.register_buffer("seen", torch.full((3,), float(number)))
        self.extra = {"number": (number, number + 1)}

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.linear(x).relu()

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Model(nn.Module):
    """The head is tied to the embedding, and so are their buffers; one parameter and one buffer are the container's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5, 7))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(Layer(i) for i in range(3))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.embed.register_buffer("table", torch.rand(13))
        self.head.register_buffer("table_again", self.embed.table)

    def forward(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        x = self.embed(tokens) * self.scale.sum(0)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def twin(seed: int, steps: int = 2) -> tuple[Model, list[torch.optim.Optimizer]]:
    """The whole model and its optimizers, trained; a group and an optimizer have nothing on some stage."""
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        model.embed.table.uniform_()
    body: dict[str, Any] = {"params": [model.scale, model.embed.weight, *model.layers[0].parameters()]}
    last: dict[str, Any] = {"params": [*model.layers[2].parameters()], "lr": 3e-3, "weight_decay": 0.0}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([body, last], lr=1e-2),
        torch.optim.SGD(model.layers[1].parameters(), lr=0.1, momentum=0.9),
    ]
    for _ in range(steps):
        model(torch.randint(0, 11, (4, 3))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 + 0.01 * seed
    return model, optimizers


def whole_names(model: nn.Module) -> WholeNames:
    ties = tuple(tuple(tie) for tie in tied_names(model))
    return WholeNames(frozenset(clean_fqn(name) for name in model.state_dict()), ties)


class Stage:
    """What this rank has of a trained model: ``stages`` stages, each sharded over the ranks that share it."""

    def __init__(self, seed: int, stages: int, steps: int = 2) -> None:
        self.module, self.optimizers = twin(seed, steps)
        self.names = whole_names(self.module)
        world = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("pipeline", "shard"))
        self.number = self.mesh.get_local_rank("pipeline")
        owned = PARTITIONS[stages][self.number]
        for name in PARTITIONS[1][0]:
            if name not in owned:
                self.module.set_submodule(name, nn.Module())
        self._shard()
        self.io = ShardCkptIO()
        self.io.attach(Ranks.of_default_group(30), self.module, {}, names=self.names)

    def _shard(self) -> None:
        kept: dict[Tensor, nn.Parameter] = {}
        for module in self.module.modules():
            for name, old in module._parameters.items():
                if old is not None:
                    module._parameters[name] = kept.setdefault(old, nn.Parameter(self._cut(old)))
        for optimizer in self.optimizers:
            state = {kept[p]: v for p, v in optimizer.state.items() if p in kept}
            optimizer.state.clear()
            for p, values in state.items():
                optimizer.state[p] = {k: self._cut(v) if v.shape == p.shape else v for k, v in values.items()}
            for group in optimizer.param_groups:
                group["params"][:] = [kept[p] for p in group["params"] if p in kept]

    def _cut(self, tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor.detach(), self.mesh["shard"], [Shard(0)])

    def checkpoint(self, **more: Any) -> dict[str, Any]:
        names = parameter_names(self.module, self.names)
        return {
            "state_dict": self.module.state_dict(),
            "optimizer_states": [optimizer_state(optimizer, names) for optimizer in self.optimizers],
            "global_step": 2,
            **more,
        }

    def load(self, path: str, strict: bool = True) -> dict[str, Any]:
        targets = LoadTargets.of_module(self.module, self.module.state_dict(), self.io.names, self.optimizers)
        loaded = self.io.load_into(path, targets, strict=strict)
        for name, module in self.module.named_modules():
            if f"{name}._extra_state" in loaded.extra_state:
                module.set_extra_state(loaded.extra_state[f"{name}._extra_state"])
        return loaded.trainer

    def state(self) -> dict[str, Any]:
        return held(self.module, self.optimizers, self.names)


def held(module: nn.Module, optimizers: Sequence[Any], names: WholeNames) -> dict[str, Any]:
    """Entries of the state dict, optimizer state by FQN, hyper-parameters by group and by FQN."""
    found: dict[str, Any] = {f"model/{n}": _whole(v) for n, v in module.state_dict().items()}
    by_id = parameter_names(module, names)
    for number, optimizer in enumerate(optimizers):
        for i, group in enumerate(optimizer.param_groups):
            hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            found |= {f"{number}/group {i}/{k}": v for k, v in hyper.items()}
            for p in group["params"]:
                found[f"{number}/{by_id[id(p)]}"] = i
                found |= {f"{number}/{by_id[id(p)]}/{k}": _whole(v) for k, v in optimizer.state.get(p, {}).items()}
    return found


def _whole(value: Any) -> Any:
    return tiny.whole(value) if isinstance(value, Tensor) else value


def save_stages(stages: int, path: str) -> None:
    stage = Stage(1, stages)
    stage.io.save_checkpoint(stage.checkpoint(), path)


def load_stages(stages: int, path: str) -> dict[str, Any]:
    """From other values of everything, untrained."""
    stage = Stage(8, stages, steps=0)
    stage.load(path)
    return stage.state()


def assert_equal_to_twin(found: Sequence[Mapping[str, Any]], expected: Mapping[str, Any]) -> None:
    assert set().union(*found) == expected.keys()
    for one in found:
        assert tiny.differences({k: expected[k] for k in one}, one) == []


def expected_state() -> dict[str, Any]:
    model, optimizers = twin(1)
    return held(model, optimizers, whole_names(model))


def save_twin(path: str) -> None:
    model, optimizers = twin(1)
    io = ShardCkptIO()
    io.attach(Ranks.alone(), model, {}, names=whole_names(model))
    states = [optimizer_state(optimizer, parameter_names(model)) for optimizer in optimizers]
    io.save_checkpoint({"state_dict": model.state_dict(), "optimizer_states": states, "global_step": 2}, path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "world", "targets"),
    [
        pytest.param(3, 3, [(2, 4)], id="3 stages to 2, sharded"),
        pytest.param(2, 4, [(1, 3), (3, 3)], id="2 stages, sharded, to 1 and 3"),
    ],
)
def test_stages_save_what_one_process_saves_and_any_partition_loads_it(
    stages: int, world: int, targets: list[tuple[int, int]], tmp_path: Path
) -> None:
    path, expected = str(tmp_path / "a.ckpt"), expected_state()
    save_twin(str(tmp_path / "twin.ckpt"))
    run_ranks(world, save_stages, stages, path)
    assert components(tmp_path / "a.ckpt") == components(tmp_path / "twin.ckpt")
    assert components(tmp_path / "a.ckpt")["model"][1] == {
        "head.weight": "embed.weight",
        "head.table_again": "embed.table",
    }
    stored, of_one = (load_full(str(tmp_path / f"{name}.ckpt")) for name in ("a", "twin"))
    for mine, theirs in zip(stored["optimizer_states"], of_one["optimizer_states"], strict=True):
        assert mine["param_groups"] == theirs["param_groups"]  # the params in the same order
        assert mine["state"].keys() == theirs["state"].keys()
    for target_stages, target_world in targets:
        assert_equal_to_twin(run_ranks(target_world, load_stages, target_stages, path), expected)


def components(path: Path) -> dict[str, Any]:
    """Names, dtypes, shapes and aliases from the root index."""
    root = json.loads((path / "checkpoint.index.json").read_text())
    return {
        name: ({key: row[:2] + row[3:] for key, row in found["tensors"].items()}, found["aliases"])
        for name, found in root["components"].items()
    }


def load_wrong(stages: int, path: str, strict: bool) -> tuple[str, dict[str, Any]]:
    """A layer of each of two stages has a parameter more, and one of the last stage another shape."""
    stage = Stage(8, stages, steps=0)
    first = getattr(stage.module.layers, "0")
    if isinstance(first, Layer):
        first.more = nn.Parameter(torch.ones(2))
    last = getattr(stage.module.layers, "2")
    if isinstance(last, Layer):
        last.more = nn.Parameter(torch.ones(2))
        last.linear.bias = nn.Parameter(torch.ones(8))
        stage.optimizers[0].param_groups[1]["params"].pop()
    if strict:
        before = stage.state()
        with pytest.raises(MismatchError) as raised:
            stage.load(path)
        assert tiny.differences(before, stage.state()) == []
        return str(raised.value), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stage.load(path, strict=False)
    return "\n".join(str(w.message) for w in caught if "differences" in str(w.message)), stage.state()


DIFFERENCES = (
    "layers.0.more  in model only",
    "gone.weight  in checkpoint only",
    "layers.2.more  in model only",
    "layers.2.linear.bias  shape (7,) in checkpoint, (8,) in model",
    "optimizer 0: layers.2.linear.bias  in checkpoint only",
)


def save_with_more(path: str) -> None:
    """One more entry than any stage has, in the state dict and the extra states."""
    stage = Stage(1, 1)
    checkpoint = stage.checkpoint()
    checkpoint["state_dict"]["gone.weight"] = torch.ones(3)
    checkpoint["state_dict"]["gone._extra_state"] = {"a": 1}
    stage.io.save_checkpoint(checkpoint, path)


def test_differences_of_all_stages_are_in_one_error_on_all_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(1, save_with_more, path)
    messages = {message for message, _ in run_ranks(4, load_wrong, 2, path, True)}
    assert len(messages) == 1
    (message,) = messages
    assert "6 differences" in message and "gone._extra_state  in checkpoint only" in message
    for line in DIFFERENCES:
        assert message.count(line) == 1


@pytest.mark.slow
def test_without_strict_rank_0_tells_the_differences_of_all_stages_and_the_rest_is_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(1, save_with_more, path)
    outcomes = run_ranks(2, load_wrong, 2, path, False)
    assert [bool(message) for message, _ in outcomes] == [True, False]
    assert all(outcomes[0][0].count(line) == 1 for line in DIFFERENCES)
    expected = expected_state()
    for _, state in outcomes:
        wrong = [k for k in tiny.differences(expected, state) if k in state]
        assert {k for k in wrong if not k.endswith(".more")} <= {"model/layers.2.linear.bias"}


def load_numbered(path: str) -> str:
    with pytest.raises(MismatchError) as raised:
        Stage(8, 2, steps=0).load(path)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["plain file", "directory of a stock strategy"])
def test_optimizer_state_by_number_is_refused_on_stages_with_the_remedy(sharded: bool, tmp_path: Path) -> None:
    model, optimizers = twin(1)
    path = tmp_path / "a.ckpt"
    checkpoint = {"state_dict": model.state_dict(), "optimizer_states": [o.state_dict() for o in optimizers]}
    if sharded:
        ShardCkptIO().save_checkpoint(checkpoint, path)
    else:
        torch.save(checkpoint, path)
    for message in run_ranks(2, load_numbered, str(path)):
        assert message.count("optimizer 0") == message.count("optimizer 1") == 1
        assert "resume from a directory that ShardedStrategy saved" in message


# ── what hooks and callbacks keep ─────────────────────────────────────────────────────────────────────────────────


def averages(module: nn.Module) -> dict[str, Any]:
    """As an averaging callback: by name under a prefix, buffers too, and one value that all ranks have."""
    named = {f"module.{n}": v.detach() * 2 for n, v in module.state_dict().items() if isinstance(v, Tensor)}
    return {"callbacks": {"Average": {"average": named, "decay": 0.5, "large": torch.arange(999.0)}}}


def save_averaged(stages: int, path: str) -> None:
    stage = Stage(1, stages)
    for layer in stage.module.layers:
        if isinstance(layer, Layer):
            layer.register_buffer("wide", torch.full((999,), layer.seen[0].item()))  # too large for the JSON
    stage.io.save_checkpoint(stage.checkpoint(**averages(stage.module)), path)


def load_averaged(stages: int, path: str) -> tuple[dict[str, Any], set[str], bool]:
    stage = Stage(8, stages, steps=0)
    for layer in stage.module.layers:
        if isinstance(layer, Layer):
            layer.register_buffer("wide", torch.zeros(999))
    stage.io.attach(Ranks.of_default_group(30), stage.module, {}, names=_with_wide(stage.names))
    found = stage.load(path)["callbacks"]["Average"]
    assert found["decay"] == 0.5 and torch.equal(found["large"], torch.arange(999.0))
    average = found["average"]
    own = {f"module.{n}" for n, v in stage.module.state_dict().items() if isinstance(v, Tensor)}
    kept = (average[f"module.{name}"] for name, _ in stage.module.named_parameters())
    sharded = all(isinstance(tensor, DTensor) for tensor in kept)
    return {n: _whole(t) for n, t in average.items()}, own, sharded


def _with_wide(names: WholeNames) -> WholeNames:
    return WholeNames(names.state | {f"layers.{i}.wide" for i in range(3)}, names.ties)


@pytest.mark.slow
def test_what_callbacks_keep_by_parameter_name_is_saved_by_all_stages(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(4, save_averaged, 2, path)
    model, _ = twin(1)
    expected = {n: t * 2 for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    expected |= {
        f"layers.{i}.wide": torch.full((999,), layer.seen[0].item()) * 2 for i, layer in enumerate(model.layers)
    }
    expected = {f"module.{n}": t for n, t in expected.items()}
    loaded = run_ranks(3, load_averaged, 3, path)
    assert set().union(*(found for found, _, _ in loaded)) == expected.keys()
    for found, own, sharded in loaded:
        tied = {"module.embed.weight", "module.head.weight", "module.embed.table", "module.head.table_again"}
        assert found.keys() - tied == own - tied and sharded
        assert tiny.differences({n: expected[n] for n in found}, found) == []


def save_listed(path: str) -> str:
    stage = Stage(1, 2)
    shadow = [p.detach() * 2 for p in stage.module.parameters()]
    with pytest.raises(MismatchError) as raised:
        stage.io.save_checkpoint(stage.checkpoint(callbacks={"Average": {"shadow": shadow}}), path)
    return str(raised.value)


@pytest.mark.slow
def test_sharded_tensors_in_lists_are_refused_since_stages_have_different_ones(tmp_path: Path) -> None:
    for message in run_ranks(2, save_listed, str(tmp_path / "a.ckpt")):
        assert "callbacks/Average/shadow/" in message
    assert list(tmp_path.iterdir()) == []


def edit_on_load(path: str) -> dict[str, Any]:
    """A hook that puts values in place of entries of any stage, one of them by one name of a tie."""
    stage = Stage(8, 2, steps=0)
    loaded = dict(stage.module.state_dict())
    stage.load(path)
    now = loaded | {"layers.0.linear.bias": torch.ones(7), "layers.2.linear.bias": torch.ones(7)}
    now["embed.weight"] = torch.full((11, 7), 3.0)
    modules = LoadedModules({"": stage.module}, loaded, None, stage.names)
    modules.load(now, strict=True)
    with pytest.raises(MismatchError, match=r"nobody\.has"):
        stranger = {**loaded, "nobody.has": torch.ones(1)}
        modules.load(stranger, strict=True)
    return stage.state()


@pytest.mark.slow
def test_hooks_may_edit_entries_of_other_stages_on_load(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    save_twin(path)
    expected = expected_state()
    expected |= {f"model/layers.{i}.linear.bias": torch.ones(7) for i in (0, 2)}
    expected |= {f"model/{name}": torch.full((11, 7), 3.0) for name in ("embed.weight", "head.weight")}
    assert_equal_to_twin(run_ranks(2, edit_on_load, path), expected)


def save_replaced(folder: str) -> str:
    """A hook multiplies all entries; another one those of one name of a tie."""
    stage = Stage(1, 2)
    checkpoint = stage.checkpoint()
    state = {n: v * 2 if isinstance(v, Tensor) else v for n, v in checkpoint["state_dict"].items()}
    stage.io.save_checkpoint(checkpoint | {"state_dict": state}, f"{folder}/everything")
    state = {n: v * 2 if n == "head.weight" else v for n, v in checkpoint["state_dict"].items()}
    with pytest.raises(MismatchError) as refused:
        stage.io.save_checkpoint(checkpoint | {"state_dict": state}, f"{folder}/one name")
    return str(refused.value)


@pytest.mark.slow
def test_what_hooks_replace_is_tied_like_the_model_or_refused(tmp_path: Path) -> None:
    for message in run_ranks(4, save_replaced, str(tmp_path)):
        assert "model/embed.weight  ranks " in message and "a tied weight under all its names" in message
    stored = load_full(str(tmp_path / "everything"))["state_dict"]
    assert all(torch.equal(stored[name], twin(1)[0].embed.weight * 2) for name in ("embed.weight", "head.weight"))
    save_twin(str(tmp_path / "twin"))
    assert components(tmp_path / "everything")["model"] == components(tmp_path / "twin")["model"]


# ── documents and places ──────────────────────────────────────────────────────────────────────────────────────────


def document(groups: list[list[str]], steps: Mapping[str, float], lr: float = 0.1) -> dict[str, Any]:
    state = {p: {"step": torch.tensor(value)} for p, value in steps.items()}
    found = {"state": state, "param_groups": [{"lr": lr, "params": params} for params in groups]}
    return optimizer_leaves([found])[1]


def test_documents_of_stages_merge_to_that_of_one_process() -> None:
    first = document([["scale", "embed"], []], {"scale": 2.0, "embed": 2.0})
    last = document([["scale", "embed"], ["last"]], {"scale": 2.0, "embed": 2.0, "last": 2.0})
    middle = document([["scale", "late"], []], {"scale": 2.0, "late": 1.0}, lr=9.0)
    expected = document([["scale", "embed", "late"], ["last"]], {"scale": 2.0, "embed": 2.0, "late": 1.0, "last": 2.0})
    merged = merge_optimizers([first, middle, last])
    assert merged == expected
    stored = StoredOptimizer(0, merged["0"], None, decode_small)
    assert {p: float(v["step"]) for p, v in stored.values.items()} == {"scale": 2, "embed": 2, "late": 1, "last": 2}
    assert merge_optimizers([first]) == first
    moved = document([["late"], ["embed", "last"]], {})  # a tied parameter, in another group on another stage
    assert [g["params"] for g in merge_optimizers([first, moved])["0"]["groups"].values()] == [
        ["scale", "embed", "late"],
        ["last"],
    ]


@pytest.mark.parametrize(
    ("place", "saved", "rank"),
    [
        ((1, 2, 1), {"data_rank": 0, "data_size": 4, "ranks_each": 2}, 2),  # a checkpoint without stages
        ((3, 4, 1), {"data_rank": 0, "data_size": 2, "ranks_each": 2}, 2),
        ((1, 2, 1, 1, 2), {"data_rank": 0, "data_size": 4, "ranks_each": 2}, 2),
        ((1, 4, 2, 1, 2), {"data_rank": 3, "data_size": 4, "ranks_each": 2, "stage": 0, "stages": 2}, 10),
        ((1, 4, 2, 2, 3), {"data_rank": 3, "data_size": 4, "ranks_each": 2, "stage": 1, "stages": 2}, 2),
        ((5, 8, 1, 0, 1), {"data_rank": 0, "data_size": 2, "ranks_each": 3, "stage": 1, "stages": 2}, 3),
    ],
)
def test_a_rank_continues_the_one_of_its_stage_and_data(place: Any, saved: dict[str, int], rank: int) -> None:
    mine, then = DataShare(*place), DataShare(**saved)
    assert mine.source_rank({"place": saved}) == rank
    data, each = then.data_size, then.ranks_each
    assert rank // (data * each) == mine.stage % then.stages
    assert rank // each % data == mine.data_rank % data and rank % each == 0
