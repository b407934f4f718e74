"""Models with adapters of PEFT: training equals plain torch; adapters alone are saved, resumed and loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_shardckpt import ShardCkptIO, load_from_checkpoint
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import MismatchError, StateError, TopologyError
from lightning_shardckpt.format.clean_fqn import base_fqn
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.parallel.sharding.tensor_parallel import apply_plan, resolve_plan
from lightning_shardckpt.state.trainer import frozen_base_parameters
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.support import adapters, small, tiny
from tests.support.adapters import FSDP, PP, TP, base, fit_each, fit_once, whole
from tests.support.nets import BUILDERS, TOLERANCE, Case, lora, train_all, twins
from tests.support.pool import run_each, run_ranks, selected

LORA, DORA, TIED = Case("lora", late=True), Case("dora", late=True), Case("lora embedding", late=True)


@pytest.fixture(scope="module")
def expected() -> dict[Case, Any]:
    found = run_each({"plain": (1, twins, [LORA, DORA]), "dropout": (1, train_all, [TIED], {})})
    return dict(zip([LORA, DORA, TIED], [*found["plain"][0], *found["dropout"][0]], strict=True))


WAYS: dict[str, tuple[dict[str, Any], Case]] = {
    "fsdp2": ({}, DORA), "tp2": (TP, LORA), "pp2": (PP, LORA),
    "tp2, with dropout": (TP, TIED),  # of what it would drop on one process
}


def train_ways(names: list[str]) -> dict[str, Any]:
    return {name: train_all([WAYS[name][1]], WAYS[name][0])[0] for name in names}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two ranks saw of all selected ways to train, one after another."""
    return run_ranks(2, train_ways, selected(request, "way"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_plain_torch(way: str, trained: list[dict[str, Any]], expected: dict[Case, Any]) -> None:
    alone, names = expected[WAYS[way][1]], set[str]()
    for got in (rank[way] for rank in trained):
        assert got.losses == pytest.approx(alone.losses, abs=TOLERANCE)
        names |= got.last.keys()
        for name in got.last:  # of its stage, if there are stages
            assert torch.equal(got.first[name], alone.first[name]), name
            torch.testing.assert_close(got.last[name], alone.last[name], rtol=0, atol=TOLERANCE, msg=name)
    assert names == alone.last.keys()


def resolve_sharding(plan: Any, builder: str, **options: Any) -> dict[str, tuple[Any, ...]]:
    """Placements of what was sharded in the first layer, by the name in the layer; two tensor-parallel ranks."""
    pl.seed_everything(3, verbose=False)
    net = lora(BUILDERS[builder](), **options)
    root = torch.nn.ModuleDict({"net": net})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    apply_plan(root, resolve_plan(root, plan, [], 2), mesh)
    layer = "net.base_model.model.model.layers.0."
    found = {name: p for name, p in root.named_parameters() if isinstance(p, DTensor)}
    return {name.removeprefix(layer): p.placements for name, p in found.items() if "layers.1" not in name}


def test_a_plan_of_the_base_model_shards_the_adapters_with_it_or_names_what_it_cannot_shard() -> None:
    assert run_ranks(2, check_placements) == [None, None]


def check_placements() -> None:
    rows, columns = (Shard(0),), (Shard(1),)
    found = resolve_sharding("auto", "llama", target_modules=["q_proj", "o_proj"])
    assert found["self_attn.q_proj.base_layer.weight"] == rows == found["self_attn.q_proj.lora_B.default.weight"]
    assert found["self_attn.o_proj.base_layer.weight"] == columns == found["self_attn.o_proj.lora_A.default.weight"]
    whole = {"self_attn.q_proj.lora_A.default.weight", "self_attn.o_proj.lora_B.default.weight"}
    assert found["self_attn.k_proj.weight"] == rows and not whole & found.keys()
    plan = {"net.model.layers.*.mlp.up_proj": "colwise"}
    found = resolve_sharding(plan, "llama", modules_to_save=["mlp"], target_modules=["q_proj"])
    assert found == dict.fromkeys(
        ("mlp.original_module.up_proj.weight", "mlp.modules_to_save.default.up_proj.weight"), rows
    )
    name = r"net\.base_model\.model\.model\.layers\.0\.self_attn\.q_proj \(Linear, ColwiseParallel\)"
    with pytest.raises(TopologyError, match=name):
        resolve_sharding("auto", "llama", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(TopologyError, match=r"embed_tokens \(TrainableTokensWrapper"):
        resolve_sharding("auto", "llama", target_modules=["q_proj"], trainable_token_indices=[1])


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────


__all__ = ["base"]  # a fixture


def stored(path: str) -> set[str]:
    with Checkpoint(LocalStorage(), path) as checkpoint:
        return set(checkpoint.root.components["model"].tensors)


@pytest.mark.slow
def test_adapters_alone_resume_on_any_topology(base: str, tmp_path: Path) -> None:
    ways = [(TP, PP), (PP, FSDP)]
    paths = [str(tmp_path / f"{number}.ckpt") for number in range(len(ways))]
    saves = [(way[0], {"base": base, "save": path}) for way, path in zip(ways, paths, strict=True)]
    resumes = [(way[1], {"base": base, "resume": path, "seed": 2}) for way, path in zip(ways, paths, strict=True)]
    by_way = zip(*run_ranks(2, fit_each, saves), strict=True), zip(*run_ranks(2, fit_each, resumes), strict=True)
    for path, before, after in zip(paths, *by_way, strict=True):
        expected, found = whole(list(before)), whole(list(after))
        trained = {key.removeprefix("model/") for key in expected if key.startswith("model/") and _is_adapter(key)}
        assert stored(path) == trained
        assert tiny.differences(expected, found) == []


def _is_adapter(key: str) -> bool:
    return "lora_" in key or "modules_to_save" in key


def save_base(folder: str) -> None:
    """Save a base model in float32, with other weights than those of ``Adapted``."""
    pl.seed_everything(7, verbose=False)
    adapters.llama().save_pretrained(folder)


def start_from(path: str, strategy: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Load into a model with adapters, then train a step; returns the states after both, and what was warned of."""
    pl.seed_everything(5, verbose=False)
    module = adapters.Adapted()
    module.strict_loading = False
    run = tiny.trainer(strategy, max_steps=1, limit_val_batches=1, limit_train_batches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.validate(module, tiny.loader(), ckpt_path=path, verbose=False)
    first = tiny.full_state(module, [])
    run.fit(module, tiny.loader())
    return first, tiny.full_state(module, []), [str(w.message) for w in caught if path in str(w.message)]


@pytest.mark.slow
def test_a_base_model_is_loaded_under_the_names_that_lora_gives_it(tmp_path: Path) -> None:
    path = str(tmp_path / "base.ckpt")
    expected = whole(run_ranks(2, fit_once, FSDP, {"base": None, "options": None, "io": {}, "save": path}))
    ranks = run_ranks(2, start_from, path, PP)
    first, last = whole([rank[0] for rank in ranks]), whole([rank[1] for rank in ranks])
    for key, value in first.items():
        if "lora_B" in key:
            assert not value.any()
        elif "lora_A" not in key:
            assert torch.equal(value, expected[base_fqn(key)]), key
    assert {base_fqn(key) for key in first if "lora_" not in key} == {k for k in expected if k.startswith("model/")}
    assert [key for key in first if not torch.equal(first[key], last[key])]  # it trains from there
    (note,) = ranks[0][2]
    assert "left as they are: 20 differences" in note and "lora_A.default.weight  in model only" in note


KINDS: dict[str, dict[str, Any]] = {
    "lora_magnitude_vector": {"use_dora": True},
    "lora_A": {"init_lora_weights": "pissa"},
    "": {"modules_to_save": ["lm_head"]},
}


def begin_with_base(kind: str, base: str) -> dict[str, Any]:
    """Return the loss of a first step by the way in which the base model was loaded, or the error."""
    options, found = {"target_modules": ["q_proj"]} | KINDS[kind], dict[str, Any]()
    for way in ("from_pretrained", "pretrained", "ckpt_path"):
        pl.seed_everything(5, verbose=False)
        module = adapters.Adapted(base if way == "from_pretrained" else None, options)
        run = tiny.trainer({"pretrained": base} if way == "pretrained" else {}, max_steps=1, limit_val_batches=1)
        try:
            if way == "ckpt_path":
                module.strict_loading = bool(kind)
                warnings.filterwarnings("ignore", "left as they are: 4 differences")
                run.validate(module, tiny.loader(shuffle=False), ckpt_path=base, verbose=False)
            run.fit(module, tiny.loader(shuffle=False))
            (found[way],) = module.losses
        except MismatchError as error:
            found[way] = str(error)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_with_values_of_the_base_are_not_left_as_they_are(kind: str, tmp_path: Path) -> None:
    """Their first values belong to the weights that PEFT found; copies in modules_to_save are filled."""
    run_ranks(1, save_base, str(tmp_path))
    (found,) = run_ranks(1, begin_with_base, kind, str(tmp_path))
    if kind:
        assert f".{kind}.default" in found["pretrained"] and "not pretrained=" in found["pretrained"]
        assert f".{kind}.default" in found["ckpt_path"]
    else:
        assert found["from_pretrained"] == found["pretrained"] == found["ckpt_path"]


def go_on_with_both(base: str, path: str) -> dict[str, list[float]]:
    """Return the losses of the second step by the way in which the base model was loaded before the adapters."""
    options, found = {"target_modules": ["q_proj"], "use_dora": True}, dict[str, list[float]]()
    for way in ("save", "from_pretrained", "pretrained"):
        pl.seed_everything(5, verbose=False)
        module = adapters.Adapted(None if way == "pretrained" else base, options)
        module.strict_loading = False
        strategy = {"pretrained": base} if way == "pretrained" else {}
        run = tiny.trainer(strategy, max_steps=1 + (way != "save"), plugins=[ShardCkptIO(adapters_only=True)])
        run.fit(module, tiny.loader(shuffle=False), ckpt_path=None if way == "save" else path)
        if way == "save":
            run.save_checkpoint(path)
        found[way] = module.losses
    return found


def test_a_checkpoint_of_adapters_fills_what_peft_computed_from_pretrained_weights(tmp_path: Path) -> None:
    run_ranks(1, save_base, str(tmp_path))
    (losses,) = run_ranks(1, go_on_with_both, str(tmp_path), str(tmp_path / "a.ckpt"))
    assert losses["from_pretrained"] == losses["pretrained"] and len(losses["pretrained"]) == 1


# ── differences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def resumes_refused(path: str, *cases: dict[str, Any]) -> list[str]:
    said = []
    for options in cases:
        with pytest.raises(MismatchError) as caught:
            adapters.fit(FSDP, 3, resume=path, **options)
        said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_missing_adapters_are_a_difference_and_the_missing_base_is_none(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(2, fit_once, FSDP, {"base": None, "save": path, "options": {"target_modules": ["q_proj", "o_proj"]}})
    options = {"target_modules": ["q_proj", "up_proj"]}, {"target_modules": ["q_proj", "o_proj"], "r": 5}
    message, other = run_ranks(1, resumes_refused, path, *({"base": None, "options": each} for each in options))[0]
    lines = [line.strip() for line in message.splitlines() if line.startswith("  ")]
    layer = "model.base_model.model.model.layers.0"
    assert f"{layer}.mlp.up_proj.lora_A.default.weight  in model only" in "\n".join(lines)
    assert f"{layer}.self_attn.o_proj.lora_B.default.weight  in checkpoint only" in lines
    assert not [line for line in lines if line.startswith(f"{layer}.self_attn.v_proj.weight")]  # left out
    assert f"{layer}.self_attn.q_proj.lora_A.default.weight  shape (3, 16) in checkpoint, (5, 16) in model" in other


@pytest.mark.slow
def test_what_was_left_out_is_described_and_compared(base: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(1, fit_once, FSDP, {"base": base, "save": str(path)})
    name = "model.base_model.model.model.norm.weight"

    def shrunk(frozen: dict[str, Any]) -> None:
        assert frozen[name] == ["BF16", [16]]
        frozen[name] = ["F32", [16]]

    small.edit(path, "frozen-state-dist-00000.json", shrunk)
    ((message,),) = run_ranks(1, resumes_refused, str(path), {"base": base})
    assert f"1 difference\n  {name}  F32 (16,) when the checkpoint left it out, BF16 (16,) in model" in message


# ── what else may be trained, and other ways to save and load ───────────────────────────────────────────────────────


class Thawed(adapters.Adapted):  # one layer norm of the base is trained, too; it is frozen again before the save
    def configure_model(self) -> None:
        super().configure_model()
        self.norm.requires_grad_(self.global_step == 0)

    @property
    def norm(self) -> torch.nn.Parameter:
        found: torch.nn.Parameter = self.model.base_model.model.model.norm.weight
        return found

    def on_train_end(self) -> None:
        self.norm.requires_grad_(False)


def save_thawed(path: str) -> list[str]:
    pl.seed_everything(1, verbose=False)
    run = tiny.trainer(FSDP, max_steps=1, limit_val_batches=0, plugins=[ShardCkptIO(adapters_only=True)])
    run.fit(Thawed(), tiny.loader())
    run.save_checkpoint(path)
    return sorted(key for key in stored(path) if "lora_" not in key)


@pytest.mark.slow
def test_a_parameter_that_was_trained_is_saved_even_if_it_is_frozen_by_now(tmp_path: Path) -> None:
    prefix = "model.base_model.model."
    expected = [f"{prefix}lm_head.modules_to_save.default.weight", f"{prefix}model.norm.weight"]
    assert run_ranks(2, save_thawed, str(tmp_path / "a.ckpt")) == [expected, expected]


def left_out(options: dict[str, Any] | None) -> set[str]:
    """What of a frozen model checkpoints of adapters leave out, by the names that it has without adapters."""
    model = adapters.llama().requires_grad_(False)
    wrapped = model if options is None else adapters.lora(model, **options)
    return {base_fqn(f"net.{name}") for name in frozen_base_parameters(wrapped)}


def check_left_out() -> None:
    everything = {f"net.{name}" for name in adapters.llama().state_dict()}
    assert left_out(None) == set()  # nobody else is known to have what PEFT did not freeze
    plain: dict[str, Any] = {"target_modules": ["q_proj"], "r": 2}
    assert left_out(plain) == everything
    changed = {f"net.model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    assert left_out(plain | {"init_lora_weights": "pissa"}) == everything - changed


def test_what_an_adapter_changed_of_the_base_when_it_was_made_is_saved_with_it() -> None:
    run_ranks(1, check_left_out, init_process_group=False)


def load_alone(path: str, file: str, base: str, expected: dict[str, Any]) -> list[Any]:
    """By ``load_from_checkpoint`` from the directory, and by a Trainer from the single file."""
    module = load_from_checkpoint(adapters.Adapted, path)
    found = [tiny.differences(expected, tiny.full_state(module, []))]
    state = adapters.fit(FSDP, 1, base=base, resume=file, io={}, seed=3)
    found.append(tiny.differences(expected, {k: v for k, v in state.items() if k.startswith("model/")}))
    with pytest.raises(MismatchError, match=r"35 differences\n  .*lm_head\.weight  in model only\n"):
        load_from_checkpoint(adapters.Adapted, path, options={"target_modules": ["q_proj"]})
    return found


def test_adapters_alone_are_consolidated_and_loaded_without_a_trainer(
    base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "a.ckpt")
    state = whole(run_ranks(2, fit_once, TP, {"base": base, "save": path}))
    file = str(consolidate(path))
    assert "saved with adapters_only=True: 21 frozen parameters are not in the output" in caplog.text
    expected = {key: value for key, value in state.items() if key.startswith("model/")}
    assert run_ranks(1, load_alone, path, file, base, expected) == [[[], []]]


def save_without_strategy(path: str) -> None:
    run = tiny.trainer("auto", max_steps=1, limit_val_batches=0, plugins=[ShardCkptIO(adapters_only=True)])
    run.fit(adapters.Adapted(), tiny.loader())
    with pytest.raises(StateError, match="Use ShardedStrategy"):
        run.save_checkpoint(path)


def test_adapters_only_is_refused_where_nothing_tells_what_is_frozen(tmp_path: Path) -> None:
    run_ranks(1, save_without_strategy, str(tmp_path / "a.ckpt"))
    assert not (tmp_path / "a.ckpt" / ROOT_NAME).exists()
