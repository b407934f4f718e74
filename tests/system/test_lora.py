"""Models with adapters of PEFT, trained under ShardedStrategy on every topology. Oracle: plain torch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.tensor_parallel import apply_plan, resolve_plan
from tests.support.nets import BUILDERS, TOLERANCE, Case, lora, train_all, twins
from tests.support.pool import run_ranks, selected

LORA, DORA = Case("lora", late=True), Case("dora", late=True)
TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def expected() -> dict[Case, Any]:
    cases = [LORA, DORA]
    return dict(zip(cases, run_ranks(1, twins, cases)[0], strict=True))


WAYS: dict[str, tuple[dict[str, Any], Case]] = {"fsdp2": ({}, DORA), "tp2": (TP, LORA), "pp2": (PP, LORA)}


def train_here(case: Case, sizes: dict[str, Any]) -> Any:
    return train_all([case], sizes)[0]


def train_ways(names: list[str]) -> dict[str, Any]:
    return {name: train_here(WAYS[name][1], WAYS[name][0]) for name in names}


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


@pytest.mark.slow
def test_dropout_before_a_sharded_adapter_drops_what_it_would_on_one_process() -> None:
    """Of a tied embedding with an adapter, too."""
    case = Case("lora embedding", late=True)
    (alone,) = run_ranks(1, train_here, case, {})
    undropped = run_ranks(1, undropped_losses, case)[0]
    assert alone.losses[0] == undropped[0]  # lora_B is zero at first
    assert alone.losses[1:] != undropped[1:]  # so that there is something to compare
    for got in run_ranks(2, train_here, case, TP):
        assert got.losses == pytest.approx(alone.losses, abs=TOLERANCE)
        for name in alone.last:
            torch.testing.assert_close(got.last[name], alone.last[name], rtol=0, atol=TOLERANCE, msg=name)


def undropped_losses(case: Case) -> list[float]:
    torch.nn.Dropout.forward = lambda module, x: x  # type: ignore[method-assign]  # in a process of its own
    losses: list[float] = train_here(case, {}).losses
    return losses


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


def test_a_plan_of_the_base_model_shards_the_adapters_with_it() -> None:
    assert run_ranks(2, check_placements) == [None, None]


def check_placements() -> None:
    rows, columns = (Shard(0),), (Shard(1),)
    found = resolve_sharding("auto", "llama", target_modules=["q_proj", "o_proj", "lm_head"])
    head = "net.base_model.model.lm_head"
    assert found["self_attn.q_proj.base_layer.weight"] == rows == found["self_attn.q_proj.lora_B.default.weight"]
    assert found["self_attn.o_proj.base_layer.weight"] == columns == found["self_attn.o_proj.lora_A.default.weight"]
    assert found[f"{head}.base_layer.weight"] == rows == found[f"{head}.lora_B.default.weight"]
    assert found["self_attn.k_proj.weight"] == rows
    whole = {"self_attn.q_proj.lora_A.default.weight", "self_attn.o_proj.lora_B.default.weight"}
    assert not whole & found.keys()
    plan = {"net.model.layers.*.mlp.up_proj": "colwise"}
    found = resolve_sharding(plan, "llama", modules_to_save=["mlp"], target_modules=["q_proj"])
    assert found == {
        "mlp.original_module.up_proj.weight": rows,
        "mlp.modules_to_save.default.up_proj.weight": rows,
    }
    named = "net.base_model.model.model.layers.0.self_attn."
    plan = {f"{named}q_proj": "colwise", f"{named}o_proj.base_layer": "rowwise_rep"}
    assert resolve_sharding(plan, "llama", target_modules=["q_proj", "o_proj"]).keys() == {
        "self_attn.q_proj.base_layer.weight",
        "self_attn.q_proj.lora_B.default.weight",
        "self_attn.o_proj.base_layer.weight",
    }


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    assert run_ranks(2, check_refusals) == [None, None]


def check_refusals() -> None:
    name = r"net\.base_model\.model\.model\.layers\.0\.self_attn\.q_proj \(peft\..*"
    with pytest.raises(TopologyError, match=name + "only plain LoRA can be sharded, not DoraLinearVariant"):
        resolve_sharding("auto", "llama", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(TopologyError, match=r"embed_tokens \(peft\..*only modules_to_save can be sharded"):
        resolve_sharding("auto", "llama", target_modules=["q_proj"], trainable_token_indices=[1])
    plan = {"net.model.layers.*.self_attn.q_proj": ColwiseParallel(input_layouts=Shard(1))}
    with pytest.raises(TopologyError, match="not by ColwiseParallel with other layouts"):
        resolve_sharding(plan, "llama", target_modules=["q_proj"])
    with pytest.raises(TopologyError, match=name + "only LoRA can be sharded"):
        root = torch.nn.ModuleDict({"net": ia3(BUILDERS["llama"]())})
        resolve_plan(root, "auto", [], 2)


def ia3(net: torch.nn.Module) -> torch.nn.Module:
    from peft import IA3Config, get_peft_model

    return get_peft_model(net, IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM"))
