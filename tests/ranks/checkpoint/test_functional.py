"""Plain functions for plain torch scripts. Oracles: the objects before the save, and torch's own state dicts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from lightning_shardckpt import load, load_keys, metadata, save, save_async, wait
from lightning_shardckpt.errors import MismatchError, StateError
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
    assert state["model"].head.weight is state["model"].embed.weight is weight  # in place
    assert state["nested"]["mean"] is mean
    for one in (saved, state):  # training goes on as if it had not been interrupted
        one["model"](torch.arange(6)).logsumexp(-1).sum().backward()
        one["optimizer"].step()
        one["scheduler"].step()
    assert differing(whole(state), whole(saved)) == []


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
    assert found["optimizers"][0]["param_groups"][0]["params"][0] == "nets.0.embed.weight"


def test_several_modules_and_optimizers_are_found_by_their_keys(tmp_path: Path) -> None:
    def gan(seed: int) -> State:
        torch.manual_seed(seed)
        nets = {"generator": Net(), "critic": nn.Linear(3, 2)}
        optimizers = {f"{n}-sgd": torch.optim.SGD(net.parameters(), lr=seed, momentum=0.9) for n, net in nets.items()}
        for net, optimizer in zip(nets.values(), optimizers.values(), strict=True):
            sum(p.sum() for p in net.parameters() if p.requires_grad).backward()
            optimizer.step()
        return {**nets, **optimizers}

    saved, state, alone = (gan(seed) for seed in (1, 2, 3))
    save(tmp_path / "gan", saved)
    load(tmp_path / "gan", dict(reversed(state.items())))  # whatever their order
    assert differing(whole(state), whole(saved)) == []
    part = {key: alone[key] for key in ("critic", "critic-sgd")}
    load(tmp_path / "gan", part)
    assert differing(whole(part), whole({key: saved[key] for key in part})) == []
    with pytest.raises(MismatchError, match="modules 'other' of the state; it has modules 'generator', 'critic'"):
        load(tmp_path / "gan", {"other": nn.Linear(3, 2)})


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lone_optimizer_is_saved_by_number_or_by_its_own_names(tmp_path: Path) -> None:
    saved, state = trained(1), trained(2, steps=0)
    save(tmp_path / "numbered", {"optimizer": saved["optimizer"]})
    load(tmp_path / "numbered", {"optimizer": state["optimizer"]})
    assert differing(whole(state["optimizer"]), whole(saved["optimizer"])) == []
    save(tmp_path / "named", {"model": saved["model"], "optimizer": saved["optimizer"]})
    with pytest.raises(MismatchError, match=r"load it together with its module, or build it from named_parameters\(\)"):
        load(tmp_path / "named", {"optimizer": trained(3, steps=0)["optimizer"]})
    linear, twin = nn.Linear(2, 3), nn.Linear(2, 3)
    own = torch.optim.SGD(linear.named_parameters(), lr=0.5, momentum=0.1)
    linear(torch.ones(2)).sum().backward()
    own.step()
    save(tmp_path / "own", {"optimizer": own}, prefix="net.")
    assert "optimizer/0/net.weight/momentum_buffer" in metadata(tmp_path / "own").tensors
    options: list[State] = [{"prefix": "net."}, {"key_mapping": {"^net\\.": ""}}]
    for option in options:
        other = torch.optim.SGD(reversed([*twin.named_parameters()]), lr=0.1)
        load(tmp_path / "own", {"optimizer": other}, **option)
        assert torch.equal(other.state[twin.weight]["momentum_buffer"], own.state[linear.weight]["momentum_buffer"])


def test_a_prefix_is_put_before_names_and_taken_off_again(tmp_path: Path) -> None:
    saved, state = trained(1), trained(2, steps=0)
    saved, state = ({key: one[key] for key in ("model", "optimizer")} for one in (saved, state))
    save(tmp_path / "a", saved, prefix="teacher.")
    names = set(metadata(tmp_path / "a").tensors)
    assert {"teacher.embed.weight", "teacher.head.weight", "optimizer/0/teacher.embed.weight/exp_avg"} <= names
    with pytest.raises(MismatchError, match=r"embed.weight  in model only; the checkpoint has 'teacher.embed.weight'"):
        load(tmp_path / "a", {"model": state["model"]})
    load(tmp_path / "a", state, prefix="teacher.")
    assert differing(whole(state), whole(saved)) == []
    save(tmp_path / "b", {"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)}, prefix="teacher.")
    assert "teacher.one.weight" in load(tmp_path / "b")["state_dict"]


# ── what must not be ──────────────────────────────────────────────────────────────────────────────────────────────


def test_differences_are_listed_at_once_and_change_nothing(tmp_path: Path) -> None:
    saved, state = trained(1), trained(2, steps=0)
    save(tmp_path / "a", saved)
    state["model"].extra = nn.Linear(1, 1)
    state["nested"]["mean"] = torch.zeros(2, 2)
    before = whole(state)
    with pytest.raises(MismatchError) as error:
        load(tmp_path / "a", state)
    for part in ("extra.weight  in model only", "extra.bias", "nested/mean  torch.float32 (2, 3)", "Pass strict=False"):
        assert part in str(error.value)
    assert differing(whole(state), before) == []
    state["absent"] = 1
    with pytest.warns(UserWarning, match="4 differences between"):
        load(tmp_path / "a", state, strict=False)
    assert state["step"] == 2 and state["absent"] == 1
    assert torch.equal(state["model"].embed.weight, saved["model"].embed.weight)


def test_what_is_there_is_not_replaced_unless_told_so(tmp_path: Path) -> None:
    save(tmp_path / "a", trained(1))
    for function in (save, save_async):
        with pytest.raises(FileExistsError, match="pass overwrite=True"):
            function(tmp_path / "a", {"step": 5})
    assert load(tmp_path / "a")["step"] == 2
    save(tmp_path / "a", {"step": 5}, overwrite=True)
    assert load(tmp_path / "a") == {"step": 5}


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
        ({"net": {"inner": nn.Linear(1, 1)}}, "'net/inner' of the state is a Linear.* Give it a key of its own"),
        ({"a": {"b": LambdaLR(torch.optim.SGD([torch.ones(1)]), abs)}}, "'a/b' of the state is a LambdaLR"),
        ({"state_dict": {"a": 1}}, "'state_dict' of the state has another meaning"),
        ({"what": object()}, "what: builtins.object"),
        ({"a": nn.ModuleDict({"b": nn.Linear(1, 1)}), "a.b": nn.Linear(1, 1)}, "both have 'a.b.weight'"),
        (optimizer_with(lambda p: {"all": {"k": 1}}), "Lone has state of its own, 'all'"),
        (optimizer_with(lambda p: {p: torch.ones(3)}), "not a dict with string keys"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_state_that_cannot_be_stored_is_named(state: State, error: str, tmp_path: Path) -> None:
    for use in (save, save_async):
        with pytest.raises(StateError, match=error):
            use(tmp_path / "a", state)
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_of_another_shape_keeps_its_values_and_gets_no_state(tmp_path: Path) -> None:
    def made(width: int) -> State:
        torch.manual_seed(width)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, width))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    saved, live, untouched = made(5), made(6), made(6)
    saved["model"](torch.ones(2, 3)).square().sum().backward()
    saved["optimizer"].step()
    save(tmp_path / "a", saved)
    with pytest.warns(UserWarning, match=r"1.weight  shape \(5, 4\) in checkpoint, \(6, 4\) in model"):
        load(tmp_path / "a", live, strict=False)
    assert differing(whole(live["model"][0]), whole(saved["model"][0])) == []
    assert differing(whole(live["model"][1]), whole(untouched["model"][1])) == []
    states = [[whole(one["optimizer"].state[p]) for p in one["model"][0].parameters()] for one in (live, saved)]
    assert differing(*states) == [] and set(live["optimizer"].state) == set(live["model"][0].parameters())
    live["model"](torch.ones(2, 3)).sum().backward()
    live["optimizer"].step()  # begins with state of its own


def test_a_tensor_whose_elements_are_one_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path / "a", {"a": torch.ones(3), "e": torch.ones(500)})
    state = {"a": torch.zeros(3), "e": torch.zeros(1).expand(500)}
    with pytest.raises(StateError, match=r"share memory: trainer/e\..*clone"):
        load(tmp_path / "a", state)
    assert state["a"].tolist() == [0, 0, 0]


# ── asynchronous ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_asynchronous_save_has_the_values_of_the_call_and_its_error_is_in_its_future_and_in_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, fsync, saved = threading.Event(), os.fsync, trained(1)
    expected = whole(saved)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: fsync(file) if go.wait(30) else None)
        done = save_async(tmp_path / "a", saved)
        with torch.no_grad():
            for parameter in saved["model"].parameters():
                parameter.zero_()
        assert not done.done() and not (tmp_path / "a").exists()
        go.set()
        assert done.result(30) is None
    load(tmp_path / "a", state := trained(2, steps=0))
    assert differing(whole(state), expected) == []

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = save_async(tmp_path / "b", {"step": 1, "w": torch.ones(3)})
        assert isinstance(done.exception(30), OSError)
    with pytest.raises(OSError, match="No space left"):
        wait()
    wait()
    save_async(tmp_path / "b", {"step": 2}).result(30)
    assert load(tmp_path / "b") == {"step": 2}


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
        fully_shard(layer, mesh=mesh["data"])


def save_on_ranks(path: str, expected: str) -> None:
    mesh, me = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",)), dist.get_rank()
    state = trained(1, cut=cut_fsdp)
    loose = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, [Shard(0)])
    few = distribute_tensor(torch.arange(2.0), mesh, [Replicate()])
    state |= {"loose": loose, "few": [few], "rank": me}
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
        assert differing(whole(again) | {"rank": me}, full) == []
    if me == 0:
        torch.save(full, expected)
    check_errors_reach_all_ranks(path, state)
    check_half_of_the_ranks_save(path)
    replicated = {"model": nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "stages": []}
    save(path + "/ddp", replicated)
    assert metadata(path + "/ddp").tensors.keys() == {"weight", "bias"}
    own, of_rank_zero, twin = (nn.BatchNorm1d(2) for _ in range(3))  # statistics of each rank's own batches
    own(torch.full((2, 2), 1.0 + me))
    of_rank_zero(torch.ones(2, 2))
    save(path + "/statistics", {"model": own.state_dict()})
    load(path + "/statistics", {"model": twin.state_dict()})
    assert differing(whole(twin), whole(of_rank_zero)) == []
    wait()


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
    me = dist.get_rank()
    group = [dist.new_group([0]), dist.new_group([1])][me]
    whole_mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(StateError, match="let all ranks of the job save it"):
        save(f"{path}/part-{me}", {"w": distribute_tensor(torch.ones(4), whole_mesh, [Shard(0)])}, process_group=group)


def load_on_ranks(path: str, expected: str, cut: Callable[[nn.Module], object] | None) -> None:
    state = trained(3, steps=0, cut=cut)
    assert cut is None or isinstance(state["model"].layers[0].weight, DTensor)
    full = torch.load(expected)
    state |= {"loose": torch.zeros(7, 3), "few": [torch.zeros(2)]}
    assert load(path + "/sync", state) == {"rank": 0}
    del full["rank"]
    assert differing(whole(state), full) == []
    save(path + "/again", state, overwrite=True)


def test_slices_are_saved_by_ranks_and_loaded_by_any_others(tmp_path: Path) -> None:
    expected = str(tmp_path / "expected.pt")
    run_ranks(2, save_on_ranks, str(tmp_path), expected)
    load_on_ranks(str(tmp_path), expected, None)
    (weight,) = (tensor for _, tensor in load_keys(tmp_path / "sync", ["layers.0.weight"]))
    assert torch.equal(weight, torch.load(expected)["model"]["layers.0.weight"])
    run_ranks(4, load_on_ranks, str(tmp_path), expected, cut_over_two)
    load(tmp_path / "again", state := trained(4, steps=0))
    full = torch.load(expected)
    assert differing(whole(state), {key: full[key] for key in state}) == []
