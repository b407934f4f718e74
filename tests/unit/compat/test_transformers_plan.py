"""The tensor-parallel plans of models of transformers, as `compat.transformers` finds them."""

from __future__ import annotations

from torch import nn

from lightning_shardckpt.compat.transformers import own_tensor_parallel_plan
from tests.support.nets import qwen3


class Around(nn.Module):
    """Passes on what it does not have, as a PeftModel does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def test_a_model_has_the_plan_of_its_layers_and_what_wraps_it_has_none() -> None:
    model = qwen3()
    plan = own_tensor_parallel_plan(model)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise" and plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert "lm_head" in plan
    assert hasattr(Around(model), "_tp_plan")
    assert own_tensor_parallel_plan(Around(model)) == {}
    assert own_tensor_parallel_plan(nn.Linear(2, 2)) == {}
