"""Plain functions for plain torch scripts. Oracles: the objects before the save, and torch's own state dicts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_shardckpt import load, load_keys, metadata, save, save_async, wait
from lightning_shardckpt.errors import FormatError, MismatchError, StateError
from tests.support import small
from tests.support.pool import run_ranks
from tests.support.whole_state import Net, differing, trained, whole

State = dict[str, Any]


# ── one process, without torch.distributed ────────────────────────────────────────────────────────────────────────


def test_all_kinds_of_objects_come_back_bit_for_bit(tmp_path: Path) -> None:
    saved, state = trained(1), trained(2, steps=0)
    expected, weight, mean = whole(saved), state["model"].embed.weight, state["nested"]["mean"]
    save(tmp_path / "step-2", saved)
    assert differing(whole(state), expected)
    assert load(tmp_path / "step-2", state) == {}
    assert differing(whole(state), expected) == []
    assert state["model"].embed.weight is weight and state["nested"]["mean"] is mean  # in place
    assert state["model"].head.weight is weight


def test_training_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    saved = trained(1)
    save(tmp_path / "a", saved)
    resumed = trained(2, steps=0)
    load(tmp_path / "a", resumed)
    for state in (saved, resumed):
        state["model"](torch.arange(6)).logsumexp(-1).sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()
    assert differing(whole(resumed), whole(saved)) == []


def test_what_is_not_asked_for_is_left_and_plain_state_is_returned(tmp_path: Path) -> None:
    saved, state = trained(1), trained(2, steps=0)
    save(tmp_path / "a", saved)
    optimizer = whole(state["optimizer"])
    rest = load(tmp_path / "a", {"net": state["model"]})  # a single module takes the single stored one
    assert differing(whole(state["model"]), whole(saved["model"])) == []
    assert differing(whole(state["optimizer"]), optimizer) == []
    assert set(rest) == {"scheduler", "step", "nested"} and rest["step"] == 2
    nested: State = {"nested": {"mean": torch.zeros(2, 3)}}
    assert set(load(tmp_path / "a", nested)["nested"]) == {"names", "big"}
    assert torch.equal(nested["nested"]["mean"], saved["nested"]["mean"])


def test_without_a_state_everything_is_returned(tmp_path: Path) -> None:
    saved = trained(1)
    save(tmp_path / "a", {"nets": [saved["model"], nn.Linear(2, 2)], "optimizers": [saved["optimizer"]]})
    found = load(tmp_path / "a")
    assert differing(dict(found["nets"][0]), whole(saved["model"])) == []
    assert list(found["nets"][1]) == ["weight", "bias"]
    names = found["optimizers"][0]["param_groups"][0]["params"]
    assert names[0] == "nets.0.embed.weight"


def test_several_modules_and_optimizers_are_found_by_their_keys(tmp_path: Path) -> None:
    def gan(seed: int) -> State:
        torch.manual_seed(seed)
        nets = {"generator": Net(), "critic": nn.Linear(3, 2)}
        optimizers = {f"{n}-sgd": torch.optim.SGD(net.parameters(), lr=seed, momentum=0.9) for n, net in nets.items()}
        for net, optimizer in zip(nets.values(), optimizers.values(), strict=True):
            sum(p.sum() for p in net.parameters() if p.requires_grad).backward()
            optimizer.step()
        return {**nets, **optimizers}

    saved = gan(1)
    save(tmp_path / "gan", saved)
    assert "generator.embed.weight" in metadata(tmp_path / "gan").tensors
    state = gan(2)
    load(tmp_path / "gan", dict(reversed(state.items())))  # whatever their order
    assert differing(whole(state), whole(saved)) == []
    alone = gan(3)
    load(tmp_path / "gan", {"critic": alone["critic"], "critic-sgd": alone["critic-sgd"]})
    assert differing(whole(alone["critic"]), whole(saved["critic"])) == []
    assert differing(whole(alone["critic-sgd"]), whole(saved["critic-sgd"])) == []
    with pytest.raises(MismatchError, match="does not have 'other' of the state; it has 'generator', 'critic'"):
        load(tmp_path / "gan", {"other": nn.Linear(3, 2)})


@pytest.mark.parametrize("kind", ["lambda", "one cycle"])
def test_schedulers_of_every_kind_continue(kind: str, tmp_path: Path) -> None:
    def scheduler() -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.5)
        return LambdaLR(optimizer, lambda n: 0.9**n) if kind == "lambda" else OneCycleLR(optimizer, 1.0, total_steps=9)

    one, other = scheduler(), scheduler()
    for _ in range(3):
        one.optimizer.step()
        one.step()
    save(tmp_path / "lr", {"scheduler": one})
    load(tmp_path / "lr", {"scheduler": other})
    assert differing(whole(other.state_dict()), whole(one.state_dict())) == []


def test_a_lone_optimizer_is_saved_by_number_or_by_its_own_names(tmp_path: Path) -> None:
    saved, state = trained(1), trained(2, steps=0)
    save(tmp_path / "numbered", {"optimizer": saved["optimizer"]})
    assert "optimizer/0/#0/exp_avg" in metadata(tmp_path / "numbered").tensors
    load(tmp_path / "numbered", {"optimizer": state["optimizer"]})
    assert differing(whole(state["optimizer"]), whole(saved["optimizer"])) == []
    save(tmp_path / "named", {"model": saved["model"], "optimizer": saved["optimizer"]})
    assert "optimizer/0/embed.weight/exp_avg" in metadata(tmp_path / "named").tensors
    third = trained(3, steps=0)
    with pytest.raises(MismatchError, match=r"load it together with its module, or build it from named_parameters\(\)"):
        load(tmp_path / "named", {"optimizer": third["optimizer"]})
    linear, twin = nn.Linear(2, 3), nn.Linear(2, 3)
    torch.optim.SGD(linear.named_parameters(), lr=0.5, momentum=0.1)
    own = torch.optim.SGD(linear.named_parameters(), lr=0.5, momentum=0.1)
    linear(torch.ones(2)).sum().backward()
    own.step()
    save(tmp_path / "own", {"optimizer": own})
    assert "optimizer/0/weight/momentum_buffer" in metadata(tmp_path / "own").tensors
    other = torch.optim.SGD(reversed([*twin.named_parameters()]), lr=0.1)
    load(tmp_path / "own", {"optimizer": other})
    assert torch.equal(other.state[twin.weight]["momentum_buffer"], own.state[linear.weight]["momentum_buffer"])
    save(tmp_path / "prefixed", {"optimizer": own}, prefix="net.")
    assert "optimizer/0/net.weight/momentum_buffer" in metadata(tmp_path / "prefixed").tensors
    options: list[State] = [{"prefix": "net."}, {"key_mapping": {"^net\\.": ""}}]
    for option in options:
        other = torch.optim.SGD(reversed([*twin.named_parameters()]), lr=0.1)
        load(tmp_path / "prefixed", {"optimizer": other}, **option)
        assert torch.equal(other.state[twin.bias]["momentum_buffer"], own.state[linear.bias]["momentum_buffer"])


DEEP: dict[str, tuple[Any, str]] = {
    "a dict": ({"net": {"inner": nn.Linear(1, 1)}}, r"'net/inner' of the state is a Linear"),
    "a scheduler": ({"a": {"b": LambdaLR(torch.optim.SGD([torch.ones(1)]), abs)}}, r"'a/b' of the state is a LambdaLR"),
}


@pytest.mark.parametrize("kind", DEEP)
def test_objects_deeper_in_a_state_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    state, message = DEEP[kind]
    for use in (save, save_async, load):
        with pytest.raises(StateError, match=message + ".* Give it a key of its own"):
            use(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prefix_is_put_before_names_and_taken_off_again(tmp_path: Path) -> None:
    saved, state = trained(1), trained(2, steps=0)
    save(tmp_path / "a", {"model": saved["model"], "optimizer": saved["optimizer"]}, prefix="teacher.")
    names = set(metadata(tmp_path / "a").tensors)
    assert {"teacher.embed.weight", "teacher.head.weight", "optimizer/0/teacher.embed.weight/exp_avg"} <= names
    with pytest.raises(MismatchError, match=r"embed.weight  in model only; the checkpoint has 'teacher.embed.weight'"):
        load(tmp_path / "a", {"model": state["model"]})
    load(tmp_path / "a", {"model": state["model"], "optimizer": state["optimizer"]}, prefix="teacher.")
    assert differing(whole(state["model"]), whole(saved["model"])) == []
    assert differing(whole(state["optimizer"]), whole(saved["optimizer"])) == []


def test_names_are_mapped_all_at_once_for_model_and_optimizer(tmp_path: Path) -> None:
    mapping = {r"^layers\.0\.": "layers.1.", r"^layers\.1\.": "layers.0."}
    saved, state = trained(1), trained(2, steps=0)
    save(tmp_path / "a", saved)
    load(tmp_path / "a", {"model": state["model"], "optimizer": state["optimizer"]}, key_mapping=mapping)
    for here, there in ((0, 1), (1, 0)):
        mine, stored = state["model"].layers[here], saved["model"].layers[there]
        assert torch.equal(mine.weight, stored.weight) and torch.equal(mine.bias, stored.bias)
        moments = [s["optimizer"].state[p.weight]["exp_avg"] for s, p in ((state, mine), (saved, stored))]
        assert torch.equal(*moments)
    assert torch.equal(state["model"].embed.weight, saved["model"].embed.weight)


def test_a_mapping_the_other_way_round_is_refused(tmp_path: Path) -> None:
    saved, state = nn.Linear(2, 2), nn.ModuleDict({"net": nn.Linear(2, 2)})
    before = state["net"].weight.clone()
    save(tmp_path / "a", {"model": saved})
    mapping = {"net.weight": "weight", "net.bias": "bias"}
    words = r"'net.weight'  matches no name in the checkpoint, but 'weight' does: entries go from stored names to new"
    with pytest.raises(MismatchError, match=words):
        load(tmp_path / "a", {"model": state}, key_mapping=mapping)
    assert torch.equal(state["net"].weight, before)
    load(tmp_path / "a", {"model": state}, key_mapping={new: old for old, new in mapping.items()})
    assert torch.equal(state["net"].weight, saved.weight)


# ── what must not be ──────────────────────────────────────────────────────────────────────────────────────────────


def test_differences_are_listed_at_once_and_change_nothing(tmp_path: Path) -> None:
    saved = trained(1)
    save(tmp_path / "a", saved)
    state = trained(2, steps=0)
    state["model"].extra = nn.Linear(1, 1)
    state["nested"]["mean"] = torch.zeros(2, 2)
    before = whole(state)
    with pytest.raises(MismatchError) as error:
        load(tmp_path / "a", state)
    for part in ("extra.weight  in model only", "extra.bias", "nested/mean  torch.float32 (2, 3)", "Pass strict=False"):
        assert part in str(error.value)
    state["absent"] = 1
    with pytest.raises(MismatchError, match="does not have 'absent' of the state; it has 'model', 'optimizer', 'sch"):
        load(tmp_path / "a", state)
    del state["absent"]
    assert differing(whole(state), before) == []
    state["absent"] = 1
    with pytest.warns(UserWarning, match="4 differences between"):
        load(tmp_path / "a", state, strict=False)
    assert state["step"] == 2 and state["absent"] == 1
    assert torch.equal(state["model"].embed.weight, saved["model"].embed.weight)


def test_what_is_there_is_not_replaced_unless_told_so(tmp_path: Path) -> None:
    saved = trained(1)
    save(tmp_path / "a", saved)
    for function in (save, save_async):
        with pytest.raises(FileExistsError, match="pass overwrite=True"):
            function(tmp_path / "a", {"step": 5})
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        save(tmp_path / "file", {"step": 5}, overwrite=True)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", {"step": 4})
    assert load(tmp_path / "a")["step"] == 2
    save(tmp_path / "a", {"step": 5}, overwrite=True)
    assert load(tmp_path / "a") == {"step": 5}


def sparse_buffer() -> nn.Module:
    module = nn.Module()
    module.register_buffer("b", torch.ones(2).to_sparse())
    return module


class Lone(torch.optim.Optimizer):
    """With what state a test gives it."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})


def optimizer_with(state: Callable[[Tensor], State]) -> State:
    model = nn.Linear(1, 1, bias=False)
    optimizer = Lone(model.parameters())
    optimizer.state.update(state(model.weight))
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"state_dict": {"a": 1}}, "'state_dict' of the state has another meaning"),
        ({"pair": (nn.Linear(1, 1), 1)}, "'pair/0' of the state is a Linear"),
        ({"what": object()}, "what: builtins.object"),
        ({"a": nn.ModuleDict({"b": nn.Linear(1, 1)}), "a.b": nn.Linear(1, 1)}, "both have 'a.b.weight'"),
        ({"a/0": nn.Linear(1, 1), "a": [nn.Linear(1, 1)]}, "'a/0', 'a/0'] have the same key"),
        ({"lazy": nn.LazyLinear(1)}, "model/weight: the lazy module has not seen a batch yet, so its Unin"),
        ({"sparse": sparse_buffer()}, "model/b: a torch.sparse_coo tensor cannot be stored"),
        (optimizer_with(lambda p: {"all": {"k": 1}}), "Lone has state under 'all', which is not a parameter"),
        (optimizer_with(lambda p: {p: torch.ones(3)}), "not a dict with string keys"),
        (optimizer_with(lambda p: {p: {1: torch.ones(3)}}), "not a dict with string keys"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_state_that_cannot_be_stored_is_named(state: State, error: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=error):
        save(tmp_path / "a", state)
    assert list(tmp_path.iterdir()) == []


class Values(nn.Module):
    """Extra state that is a tensor, and entries of the state dict that are none."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.extra, self.listed, self.number = torch.full((4,), value), [torch.full((3,), value)], int(value)

    def get_extra_state(self) -> Tensor:
        return self.extra

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = state

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {f"{prefix}listed": self.listed, f"{prefix}number": self.number}

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        self.listed, self.number = state_dict.pop(f"{prefix}listed"), state_dict.pop(f"{prefix}number")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_values_of_a_module_come_back_be_they_tensors_or_not(tmp_path: Path) -> None:
    saved, model, twin = (nn.Sequential(Values(value)) for value in (3.0, 0.0, 0.0))
    save(tmp_path / "a", {"model": saved})
    load(tmp_path / "a", {"model": model})
    twin.load_state_dict(saved.state_dict())
    assert differing(dict(model.state_dict()), dict(twin.state_dict())) == []
    assert differing(dict(model.state_dict()), dict(saved.state_dict())) == []


def test_memory_that_several_things_share_is_not_filled_twice(tmp_path: Path) -> None:
    saved, live = ({"model": nn.Linear(4, 1, bias=False), "a": torch.zeros(1, 4)} for _ in range(2))
    saved["model"].frozen, live["model"].frozen = (nn.Parameter(torch.rand(1, 4), False) for _ in range(2))
    for state in (saved, live):
        state["optimizer"], state["other"] = (Lone([state["model"].weight]) for _ in range(2))
    names, large = ("frozen", "shared", "twin", "first", "second", "own"), torch.zeros(6)
    for optimizer in (saved["optimizer"], saved["other"]):
        optimizer.state[saved["model"].weight] = {name: torch.rand(1, 4) for name in names}
    twin, own = torch.zeros(1, 4), torch.zeros(1, 4)
    state = {"frozen": live["model"].frozen.detach(), "shared": live["a"], "twin": twin}
    state |= {"first": large[:4].view(1, 4), "second": large[2:].view(1, 4), "own": own}
    live["optimizer"].state[live["model"].weight] = state
    live["other"].state[live["model"].weight] = {"twin": twin}
    save(tmp_path / "a", saved)
    load(tmp_path / "a", live)
    assert differing(whole(live), whole(saved)) == []
    assert live["optimizer"].state[live["model"].weight]["own"] is own


def test_state_of_parameters_that_are_not_stored_is_left_as_it_is(tmp_path: Path) -> None:
    saved, live = nn.Linear(3, 2, bias=False), nn.Linear(3, 2)
    first, second = Lone(saved.parameters()), Lone(live.parameters())
    first.state[saved.weight] = {"a": torch.ones(2, 3)}
    second.state.update({live.weight: {"b": torch.ones(2, 3)}, live.bias: {"a": torch.full((2,), 7.0), "n": 1}})
    save(tmp_path / "a", {"model": saved, "optimizer": first})
    with pytest.warns(UserWarning, match="optimizer 0: bias  in model only"):
        load(tmp_path / "a", {"model": live, "optimizer": second}, strict=False)
    assert differing(second.state[live.weight], {"a": torch.ones(2, 3)}) == []
    assert differing(second.state[live.bias], {"a": torch.full((2,), 7.0), "n": 1}) == []


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_a_parameter_of_another_shape_gets_no_state_and_trains_on_as_a_new_one(
    tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    """The twin takes what fits by hand: the first layer's weights and state."""
    momentum = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}

    def made(width: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(width)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, width))
        return model, optimizer(model.parameters(), lr=0.1, **momentum)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    (saved, old), (live, new), (twin, by_hand) = made(5), made(6), made(6)
    step(saved, old)
    save(tmp_path / "a", {"model": saved, "optimizer": old})
    with pytest.warns(UserWarning, match=r"1.weight  shape \(5, 4\) in checkpoint, \(6, 4\) in model"):
        load(tmp_path / "a", {"model": live, "optimizer": new}, strict=False)
    with torch.no_grad():
        for mine, theirs in zip(twin[0].parameters(), saved[0].parameters(), strict=True):
            mine.copy_(theirs)
            by_hand.state[mine] = deepcopy(old.state[theirs])
    assert set(new.state) == set(live[0].parameters())
    for model, which in ((live, new), (twin, by_hand)):
        step(model, which)
    assert differing(live.state_dict(), twin.state_dict()) == []


def test_a_tensor_whose_elements_are_one_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path / "a", {"a": torch.ones(3), "e": torch.ones(500)})
    state = {"a": torch.zeros(3), "e": torch.zeros(1).expand(500)}
    with pytest.raises(StateError, match=r"trainer/e cannot be filled.*\(500,\).*load into a clone"):
        load(tmp_path / "a", state)
    assert state["a"].tolist() == [0, 0, 0]


def test_bad_arguments_are_told() -> None:
    with pytest.raises(TypeError, match="a state is a dict with strings as keys"):
        save("a", nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got keys \[0\]"):
        save("a", {0: 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="size_per_shard"):
        save("a", {}, size_per_shard=0)
    with pytest.raises(ValueError, match=r"size_per_shard is a size in MB .*got '1GB': write size_per_shard=1024"):
        save("a", {}, size_per_shard="1GB")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keys", [5, {"modules": []}, {"modules": {"a": 1}, "optimizers": []}, {"modules": {}, "optimizers": [2]}], ids=str
)
def test_a_checkpoint_that_lies_about_its_objects_is_refused(keys: Any, tmp_path: Path) -> None:
    save(tmp_path / "a", {"model": nn.Linear(1, 1)})

    def lie(document: Any) -> None:
        document["shardckpt_keys"] = keys

    small.edit(tmp_path / "a", small.DOCUMENT, lie)
    for state in ({"model": nn.Linear(1, 1)}, None):
        with pytest.raises(FormatError, match="does not name modules and optimizers"):
            load(tmp_path / "a", state)


# ── asynchronous ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_asynchronous_save_has_the_values_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: fsync(file) if go.wait(30) else None)
    saved = trained(1)
    expected = whole(saved)
    done = save_async(tmp_path / "a", saved)
    with torch.no_grad():
        for parameter in saved["model"].parameters():
            parameter.zero_()
    assert not done.done() and not (tmp_path / "a").exists()
    go.set()
    assert done.result(30) is None
    state = trained(2, steps=0)
    load(tmp_path / "a", state)
    assert differing(whole(state), expected) == []


def test_an_error_of_an_asynchronous_save_is_in_its_future_and_in_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = save_async(tmp_path / "a", {"step": 1, "w": torch.ones(3)})
        assert isinstance(done.exception(30), OSError)
    with pytest.raises(OSError, match="No space left"):
        wait()
    wait()
    save_async(tmp_path / "a", {"step": 2}).result(30)
    assert load(tmp_path / "a") == {"step": 2}


# ── several ranks ─────────────────────────────────────────────────────────────────────────────────────────────────


def cut_fsdp(model: nn.Module) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def cut_over_two(model: nn.Module) -> None:
    """Tensor parallel by hand, then FSDP2 over it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for layer in model.layers:
        for name, parameter in [*layer.named_parameters()]:
            cut = distribute_tensor(parameter.detach(), mesh["tensor"], [Shard(0)])
            layer.register_parameter(name, nn.Parameter(cut))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])


def save_on_ranks(path: str, expected: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    state = trained(1, cut=cut_fsdp)
    loose = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [Shard(0)])
    few = distribute_tensor(torch.arange(2.0), mesh, [Replicate()])
    state |= {"loose": loose, "few": [few], "rank": dist.get_rank()}
    save(path + "/sync", state)
    done = save_async(path + "/async", state)
    full = whole(state)
    with torch.no_grad():
        loose.zero_()
    done.result(60)
    again = trained(2, steps=0, cut=cut_fsdp) | {"loose": loose, "few": [few], "rank": None}
    for name in ("sync", "async"):
        assert load(f"{path}/{name}", again) == {}
        assert again["rank"] == 0  # plain values are those of rank 0
        assert differing(whole(again) | {"rank": dist.get_rank()}, full) == []
    if dist.get_rank() == 0:
        torch.save(full, expected)
    check_errors_reach_all_ranks(path, state)
    check_half_of_the_ranks_save(path)
    replicated = {"model": nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "stages": []}
    save(path + "/ddp", replicated)
    assert metadata(path + "/ddp").tensors.keys() == {"weight", "bias"}
    check_stages_of_a_pipeline_by_hand(path)
    check_odd_local_tensors(path, mesh)
    wait()


def check_stages_of_a_pipeline_by_hand(path: str) -> None:
    """Each rank has layers of its own, under their names in the whole model."""
    layers = [nn.Linear(3, 3) for _ in range(2)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5) for layer in layers]
    me = dist.get_rank()
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    mine = {"model": nn.ModuleDict({f"layer{me}": layers[me]}), "optimizer": optimizers[me]}
    expected = whole(mine)
    save(path + "/stages", mine)
    with torch.no_grad():
        layers[me].weight.zero_()
    load(path + "/stages", mine)
    assert differing(whole(mine), expected) == []
    assert {"layer0.weight", "layer1.weight"} <= metadata(path + "/stages").tensors.keys()


def check_odd_local_tensors(path: str, mesh: DeviceMesh) -> None:
    """Slices of nothing; one element with a stride."""
    cut = [((40, 0), 0), ((40, 0), 1), ((0, 4), 0), ((0, 40), 1), ((0,), 0)]
    empty = {str(i): distribute_tensor(torch.empty(shape), mesh, [Shard(dim)]) for i, (shape, dim) in enumerate(cut)}
    save(path + "/odd", {"model": nn.ParameterDict(empty), "one": torch.full((1,), 3.0)})
    one = torch.zeros(4)[::2][:1]
    assert load(path + "/odd", {"model": nn.ParameterDict(empty), "one": one}) == {}
    assert one.item() == 3
    assert [metadata(path + "/odd").tensors[str(i)].shape for i in range(len(cut))] == [shape for shape, _ in cut]


def check_errors_reach_all_ranks(path: str, state: State) -> None:
    with pytest.raises(FileExistsError, match="exists already"):
        save(path + "/sync", state)
    bad = {**state, "bad": object()} if dist.get_rank() == 1 else {**state, "bad": 1}
    with pytest.raises(StateError, match="rank 1 failed"):
        save(path + "/bad", bad)
    with pytest.raises(MismatchError, match="'coconut'"):
        load(path + "/sync", {"coconut": 1})
    if dist.get_rank() == 1:
        state["model"].wrong = nn.Linear(1, 1)
    with pytest.raises(MismatchError, match=r"wrong\.weight"):
        load(path + "/sync", {"model": state["model"]})


def check_half_of_the_ranks_save(path: str) -> None:
    mine = [group for group in (dist.new_group([0]), dist.new_group([1])) if isinstance(group, dist.ProcessGroup)]
    group = next(g for g in mine if dist.get_rank() in dist.get_process_group_ranks(g))
    me = dist.get_rank()
    save(f"{path}/own-{me}", {"w": torch.full((600,), me)}, process_group=group)
    other = {"w": torch.zeros(600, dtype=torch.int64)}
    dist.barrier()
    load(f"{path}/own-{1 - me}", other, process_group=group)
    assert torch.equal(other["w"], torch.full((600,), 1 - me))
    whole_mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(StateError, match="let all ranks of the job save it"):
        save(f"{path}/part-{me}", {"w": distribute_tensor(torch.ones(4), whole_mesh, [Shard(0)])}, process_group=group)
    reverse = dist.new_group([1, 0])
    save(f"{path}/reverse", {"w": torch.ones(5)}, process_group=reverse)


def load_on_ranks(path: str, expected: str, cut: Callable[[nn.Module], object] | None) -> None:
    state = trained(3, steps=0, cut=cut)
    full = torch.load(expected)
    state |= {"loose": torch.zeros(7, 3), "few": [torch.zeros(2)]}
    assert load(path + "/sync", state) == {"rank": 0}
    found = whole(state)
    del full["rank"]
    assert differing(found, full) == []
    save(path + "/again", state, overwrite=True)


def test_slices_are_saved_by_ranks_and_loaded_by_any_others(tmp_path: Path) -> None:
    expected = str(tmp_path / "expected.pt")
    run_ranks(2, save_on_ranks, str(tmp_path), expected)
    load_on_ranks(str(tmp_path), expected, None)
    assert metadata(tmp_path / "sync").world_size == 2
    (weight,) = (tensor for _, tensor in load_keys(tmp_path / "sync", ["layers.0.weight"]))
    assert torch.equal(weight, torch.load(expected)["model"]["layers.0.weight"])
    assert load(tmp_path / "own-0")["w"].tolist() == [0] * 600


def on_four_ranks(path: str, expected: str) -> None:
    load_on_ranks(path, expected, cut_over_two)
    assert isinstance(trained(1, steps=0, cut=cut_over_two)["model"].layers[0].weight, DTensor)


@pytest.mark.slow
def test_four_ranks_with_fsdp_over_tensor_parallel_load_them_and_one_process_what_these_save(tmp_path: Path) -> None:
    expected = str(tmp_path / "expected.pt")
    run_ranks(2, save_on_ranks, str(tmp_path), expected)
    run_ranks(4, on_four_ranks, str(tmp_path), expected)
    (tmp_path / "again").rename(tmp_path / "sync.4")
    state = trained(4, steps=0)
    load(tmp_path / "sync.4", state)
    full = torch.load(expected)
    assert differing(whole(state), {key: full[key] for key in state}) == []


SHAPES = [((0, 3), Replicate()), ((2, 0), Replicate()), ((0, 3), Shard(0)), ((2, 0), Shard(1)), ((0,), None)]
SHAPES += [((1, 3), Shard(0)), ((2,), Replicate())]


def save_state_dict_of_own_statistics(path: str) -> list[float]:
    """Batch norm keeps statistics of a rank's own batches: those of rank 0 are saved, as of a module."""
    module, twin = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    module(torch.full((2, 2), float(1 + torch.distributed.get_rank())))
    save(path, {"model": module.state_dict()})
    load(path, {"model": twin.state_dict()})
    return twin.running_mean.tolist()


def test_a_state_dict_has_the_statistics_of_rank_zero(tmp_path: Path) -> None:
    rank_zero = nn.BatchNorm1d(2)
    rank_zero(torch.ones(2, 2))
    assert run_ranks(2, save_state_dict_of_own_statistics, str(tmp_path / "a")) == [rank_zero.running_mean.tolist()] * 2
