"""What a load leaves as it is. Oracles: the state at the save and that of a run that loads nothing, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_shardckpt import ShardCkptIO, load, save
from lightning_shardckpt.checkpoint.load_targets import PARTS
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.fabric import ShardedStrategy as FabricStrategy
from tests.support import tiny
from tests.support.pool import run_ranks

State = dict[str, Any]
TP2: State = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def trained(seed: int, *, outputs: int = 3, steps: int = 2, lr: float = 0.1, tied: bool = False) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.body, model.head = nn.Linear(4, 4, bias=False), nn.Linear(4, outputs, bias=False)
    if tied:
        model.head.weight = model.body.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def seen(state: State) -> State:
    return tiny.full_state(state["model"], [state["optimizer"]])


def put_together(taken: State, kept: State, is_kept: Any) -> State:
    """By hand: what a load should make of two states."""
    return {k: v for k, v in kept.items() if is_kept(k)} | {k: v for k, v in taken.items() if not is_kept(k)}


def skipping(stored: State, live: State, skip: list[str], path: Path) -> State:
    save(path, stored)
    load(path, live, skip=skip)
    return seen(live)


def test_a_new_head_of_another_shape_is_left_with_what_the_optimizer_has_of_it(tmp_path: Path) -> None:
    stored, live = trained(1), trained(2, outputs=5, steps=1)
    expected = put_together(seen(stored), seen(live), lambda k: "head.weight" in k and "/lr" not in k)
    assert tiny.differences(skipping(stored, live, ["head.*"], tmp_path / "a"), expected) == []


def test_a_layer_that_only_the_state_or_only_the_checkpoint_has_may_be_skipped(tmp_path: Path) -> None:
    stored, live = trained(1), trained(2)
    stored["model"].old = nn.Linear(1, 1)
    live["model"].new = nn.Linear(2, 2)
    fresh = live["model"].new.weight.clone()
    found = skipping(stored, live, ["old.*", "new.*"], tmp_path / "a")
    assert torch.equal(found["model/new.weight"], fresh)
    assert torch.equal(found["model/body.weight"], stored["model"].body.weight)


def test_moments_are_taken_and_learning_rates_are_not(tmp_path: Path) -> None:
    stored, live = trained(1, lr=0.1), trained(2, lr=0.5, steps=0)
    found = skipping(stored, live, ["optimizer/0/param_groups/*/lr"], tmp_path / "a")
    expected = put_together(seen(stored), {k: 0.5 for k in seen(stored) if k.endswith("/lr")}, lambda k: "/lr" in k)
    assert tiny.differences(found, expected) == []


def test_weights_are_taken_and_optimizer_state_is_not(tmp_path: Path) -> None:
    stored, live = trained(1), trained(2, steps=1)
    expected = put_together(seen(stored), seen(live), lambda k: "/state/" in k)
    assert tiny.differences(skipping(stored, live, ["optimizer/0/*.weight/*"], tmp_path / "a"), expected) == []


def test_an_entry_of_optimizer_state_may_be_skipped_where_there_is_one(tmp_path: Path) -> None:
    stored, live = trained(1), trained(2, steps=1)
    expected = put_together(seen(stored), seen(live), lambda k: k.endswith("exp_avg"))
    assert tiny.differences(skipping(stored, live, ["optimizer/*/exp_avg"], tmp_path / "a"), expected) == []
    fresh = trained(3, steps=0)
    before = seen(fresh)
    with pytest.raises(MismatchError, match=r"\['exp_avg'\] of body.weight cannot be skipped alone.*has none yet"):
        load(tmp_path / "a", fresh, skip=["optimizer/*/exp_avg"])
    assert tiny.differences(seen(fresh), before) == []


def test_names_are_those_of_the_state_where_they_are_mapped(tmp_path: Path) -> None:
    stored, live = trained(1), trained(2)
    before = seen(live)
    save(tmp_path / "a", {"net": stored["model"]}, prefix="old.")
    mapping = {"body.weight": "head.weight", "head.weight": "body.weight"}
    with pytest.raises(MismatchError, match=r"live objects matches 'old\.\*'"):
        load(tmp_path / "a", {"net": live["model"]}, prefix="old.", key_mapping=mapping, skip=["old.*"])
    with pytest.raises(MismatchError, match=r"body.weight  shape \(3, 4\)"):
        load(tmp_path / "a", {"net": live["model"]}, prefix="old.", key_mapping=mapping, skip=["head.*"])
    assert tiny.differences(seen(live), before) == []


@pytest.mark.parametrize("strict", [True, False])
def test_a_pattern_that_names_nothing_is_an_error(strict: bool, tmp_path: Path) -> None:
    stored, live = trained(1), trained(2)
    save(tmp_path / "a", stored)
    before = seen(live)
    with pytest.raises(MismatchError, match="live objects matches 'haed"):
        load(tmp_path / "a", live, strict=strict, skip=["head.*", "haed.*"])
    assert tiny.differences(seen(live), before) == []


def test_one_name_of_a_tied_weight_cannot_be_skipped_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored, live = trained(1, outputs=4, tied=True), trained(2, outputs=4, tied=True)
    before = seen(live)
    save(tmp_path / "a", stored)
    with pytest.raises(MismatchError, match=r"head.weight  is to be skipped, but is tied to \['body.weight'\]"):
        load(tmp_path / "a", live, skip=["head.*"])
    assert tiny.differences(seen(live), before) == []
    untied = trained(3, outputs=4)
    head = untied["model"].head.weight.clone()
    with caplog.at_level("INFO"):
        load(tmp_path / "a", {"model": untied["model"]}, skip=["head.*"])
    assert "skipped, and left as they are: 1 entry, head.weight" in caplog.text
    assert torch.equal(untied["model"].head.weight, head)
    assert torch.equal(untied["model"].body.weight, stored["model"].body.weight)


def test_what_is_no_list_and_skip_without_a_state_are_refused(tmp_path: Path) -> None:
    stored = trained(1)
    save(tmp_path / "a", stored)
    with pytest.raises(ValueError, match=r"skip is a list of patterns, such as \['head.\*'\]"):
        load(tmp_path / "a", stored, skip="head.*")
    with pytest.raises(ValueError, match="needs a state"):
        load(tmp_path / "a", skip=["head.*"])


# ── the Trainer ───────────────────────────────────────────────────────────────────────────────────────────────────


class Counting(pl.Callback):
    """State of a callback."""

    count = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> State:
        return {"count": self.count}

    def load_state_dict(self, state: State) -> None:
        self.count = state["count"]


def now(trainer: pl.Trainer) -> dict[str, State]:
    """Everything that a run continues with, by part."""
    state = tiny.full_state(trainer.lightning_module, trainer.optimizers)
    (scheduler,) = (config.scheduler for config in trainer.lr_scheduler_configs)
    (counting,) = (callback for callback in trainer.callbacks if isinstance(callback, Counting))
    moments = {k: v for k, v in state.items() if "/state/" in k}
    return {
        "model": {k: v for k, v in state.items() if k.startswith("model/")},
        "optimizer": moments,
        "param_groups": {k: v for k, v in state.items() if k not in moments and not k.startswith("model/")},
        "schedulers": {k: v for k, v in scheduler.state_dict().items() if not k.startswith("_is")},
        "loops": {"step": trainer.global_step, "epoch": trainer.current_epoch},
        "callbacks": {"count": counting.count},
        "random": {"torch": torch.get_rng_state()},
    }


class Look(pl.Callback):
    """Sees the state before the first step of a run, which then ends; or that at a save."""

    def __init__(self, path: str | None = None) -> None:
        self.path, self.found, self.batches = path, dict[str, State](), list[Tensor]()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.batches.append(batch[0].clone())
        if self.path is None and not self.found:
            self.found = now(trainer)
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.path is not None and trainer.global_step == 3:
            self.found = now(trainer)
            trainer.save_checkpoint(self.path)


def run(strategy: State, seed: int, *, save_at: str | None = None, ckpt_path: str | None = None, **more: Any) -> Look:
    """A run of six steps that saves after the third, or one that looks at what it begins with."""
    pl.seed_everything(seed)
    look, module = Look(save_at), more.pop("module", None) or tiny.TinyLM()
    data = more.pop("data", None) or tiny.loader(shuffle=False, generator=torch.Generator())  # draws nothing
    io = ShardCkptIO(**more)
    trainer = tiny.trainer(strategy, max_steps=6, callbacks=[look, Counting()], plugins=[io], limit_val_batches=0)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return look


def each_part_alone(directory: str, strategies: list[State]) -> list[tuple[str, State, State, State]]:
    path = f"{directory}/a.ckpt"
    stored = run({}, 1, save_at=path).found
    found = []
    for strategy in strategies:
        fresh = run(strategy, 2).found
        for part in ("model", "optimizer") if strategy else (part for part in PARTS if part != "data"):
            found.append((part, stored, fresh, run(strategy, 2, ckpt_path=path, resume=[part]).found))
    return found


@pytest.mark.slow
def test_each_part_alone_is_taken_and_nothing_else_is(tmp_path: Path) -> None:
    strategies: list[State] = [{}, {"pipeline_parallel_size": 2}]
    for rank, results in enumerate(run_ranks(2, each_part_alone, str(tmp_path), strategies)):
        for number, (part, stored, fresh, found) in enumerate(results):
            assert tiny.differences(stored[part], fresh[part]) != []  # else it would show nothing
            for name in found:
                expected = (stored if part == name else fresh)[name]
                if part == name and number >= len(PARTS) - 1:  # a pipeline stage has some of the names
                    expected = {key: expected[key] for key in found[name]}
                    assert expected
                assert tiny.differences(found[name], expected) == [], (rank, number, part, name)


def shuffled_batches(directory: str) -> dict[str, list[Tensor]]:
    path, found = f"{directory}/a.ckpt", {}
    saving = run({}, 1, save_at=path, data=tiny.loader())
    found["straight"] = saving.batches[3:]
    for name, parts in {"all": list(PARTS), "with": ["loops", "data"], "without": ["loops", "random"]}.items():
        found[name] = run({}, 2, ckpt_path=path, resume=parts, data=tiny.loader()).batches
    return found


def test_the_position_in_the_data_is_taken_or_left_beside_the_loops(tmp_path: Path) -> None:
    for found in run_ranks(1, shuffled_batches, str(tmp_path)):
        assert torch.equal(found["all"][0], found["straight"][0])
        assert torch.equal(found["with"][0], found["straight"][0])
        assert not torch.equal(found["without"][0], found["straight"][0])


class Headed(tiny.TinyLM):
    """With another head, and a layer that the stored model did not have."""

    def _build(self) -> None:
        super()._build()
        self.head = nn.Linear(16, tiny.VOCABULARY, bias=False)
        self.added = nn.Parameter(torch.randn(3, 16))


def with_another_head(directory: str) -> tuple[dict[str, State], ...]:
    path, skip = f"{directory}/a.ckpt", ["head.*", "added"]
    stored = run({}, 1, save_at=path).found
    fresh = run(TP2, 2, module=seeded(Headed)).found
    parts = [part for part in PARTS if part != "data"]  # its order cannot continue on fewer data-parallel ranks
    found = run(TP2, 2, ckpt_path=path, module=seeded(Headed), resume=parts, resume_skip=skip).found
    return stored, fresh, found


def seeded(kind: type[tiny.TinyLM]) -> tiny.TinyLM:
    torch.manual_seed(2)
    return kind()


@pytest.mark.slow
def test_a_new_head_is_trained_from_a_run_on_another_topology(tmp_path: Path) -> None:
    for stored, fresh, found in run_ranks(2, with_another_head, str(tmp_path)):
        assert found["model"].keys() == fresh["model"].keys() and found["loops"] == stored["loops"]
        for part in ("model", "optimizer"):
            for name, tensor in found[part].items():
                source = fresh if "head." in name or "added" in name else stored
                assert torch.equal(tensor, source[part][name]), name


class Wider(tiny.TinyLM):
    """With more outputs than the stored model had."""

    def _build(self) -> None:
        super()._build()
        self.head = nn.Linear(16, tiny.VOCABULARY + 4)


def optimizer_of_another_head(directory: str) -> str:
    path = f"{directory}/a.ckpt"
    run({}, 1, save_at=path)
    with pytest.raises(MismatchError) as error:
        run({}, 2, ckpt_path=path, module=seeded(Wider), resume=["optimizer"])
    return str(error.value)


def test_optimizer_state_alone_is_not_taken_for_a_parameter_of_another_shape(tmp_path: Path) -> None:
    for said in run_ranks(2, optimizer_of_another_head, str(tmp_path)):
        assert "head.weight  has another shape in the checkpoint, and so has its state in optimizers" in said
        assert "head.bias  has another shape" in said and "2 differences" in said


def only_weights(directory: str) -> tuple[dict[str, State], ...]:
    path = f"{directory}/a.ckpt"
    saving = tiny.trainer({}, max_steps=3, limit_val_batches=0, callbacks=[Counting()])
    pl.seed_everything(1)
    saving.fit(tiny.TinyLM(), tiny.loader())
    stored = now(saving)
    saving.save_checkpoint(path, weights_only=True)
    fresh = run({}, 2).found
    with pytest.raises(MismatchError, match=r'or ShardCkptIO\(resume=\["model"\]\)'):
        run({}, 2, ckpt_path=path)
    found = run({}, 2, ckpt_path=path, resume=["model"]).found
    validated = tiny.TinyLM()
    io = ShardCkptIO(resume=["optimizer"], resume_skip=["none of these"])  # is about fit alone
    tiny.trainer({}, plugins=[io]).validate(validated, tiny.loader(shuffle=False), ckpt_path=path, verbose=False)
    return stored, fresh, found, {"model": tiny.full_state(validated, [])}


def test_a_run_begins_with_weights_and_validation_takes_them_whatever_fit_would(tmp_path: Path) -> None:
    for stored, fresh, found, validated in run_ranks(1, only_weights, str(tmp_path)):
        assert tiny.differences(found["model"], stored["model"]) == []
        assert all(tiny.differences(found[part], fresh[part]) == [] for part in found if part != "model")
        assert tiny.differences(validated["model"], stored["model"]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resume": ["weights"]}, r"unknown parts \['weights'\]; the parts of a checkpoint are model, optimizer"),
        ({"resume": "model"}, r"resume is a list of parts, such as \['model'\]"),
        ({"resume": []}, "train without a ckpt_path"),
        ({"resume": ["model", "data"]}, '"data" without "loops"'),
        ({"resume_skip": "head.*"}, "resume_skip is a list of patterns"),
    ],
)
def test_parts_that_cannot_be_are_refused(arguments: State, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardCkptIO(**arguments)


def elsewhere(directory: str) -> None:
    path = f"{directory}/a.ckpt"
    run({}, 1, save_at=path)
    with pytest.raises(MismatchError, match="live objects matches 'haed"):
        run({}, 1, ckpt_path=path, resume_skip=["haed.*"])
    with pytest.raises(StateError, match="Use ShardedStrategy, also with one device"):
        trainer = tiny.trainer("auto", plugins=[ShardCkptIO(resume=["model"])], max_steps=6)
        trainer.fit(tiny.TinyLM(), tiny.loader(), ckpt_path=path)
    refused = ({"resume": ["model"]}, "is for a Trainer"), ({"resume_skip": ["haed.*"]}, "no name to skip")
    for arguments, message in refused:
        io = ShardCkptIO(**arguments)
        net = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(), plugins=[io])
        net.launch()
        model = net.setup(nn.Sequential(nn.Linear(1, 1)))
        with pytest.raises((ValueError, MismatchError), match=message):
            net.load(path, {"model": model})


def test_what_cannot_know_that_it_resumes_a_fit_is_refused(tmp_path: Path) -> None:
    run_ranks(1, elsewhere, str(tmp_path))


def begun_with_pretrained(directory: str) -> tuple[dict[str, State], dict[str, State], dict[str, Tensor]]:
    path, weights = f"{directory}/a.ckpt", f"{directory}/weights.pt"
    stored = run({}, 1, save_at=path).found
    torch.save(seeded(tiny.TinyLM).state_dict(), weights)
    found = run({"pretrained": weights}, 3, ckpt_path=path, resume_skip=["head.*"]).found
    return stored, found, torch.load(weights)


def test_what_is_skipped_begins_with_pretrained_weights(tmp_path: Path) -> None:
    for stored, found, weights in run_ranks(1, begun_with_pretrained, str(tmp_path)):
        for name, tensor in found["model"].items():
            other = weights if "/head." in name else stored["model"]
            assert torch.equal(tensor, other[name if other is not weights else name.removeprefix("model/")]), name
