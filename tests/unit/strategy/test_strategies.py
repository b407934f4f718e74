"""Both strategies take the same arguments, and what cannot be is refused when they are made."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shardckpt import FSDP, Pipeline, fabric, pytorch
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.strategy.steps import refuse_unpipelined
from tests.support.boring import Asks, trainer
from tests.support.pool import ROOT

BOTH = [pytorch.ShardedStrategy, fabric.ShardedStrategy]


def test_both_strategies_have_one_signature() -> None:
    ours, theirs = (inspect.signature(strategy) for strategy in BOTH)
    assert ours == theirs and len(ours.parameters) == 9
    assert {parameter.kind for parameter in ours.parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": Pipeline(schedule="1f1b")}, r'Pipeline\(loss="microbatch"\).*"gpipe"'),
        ({"pipeline": Pipeline(schedule="interleaved_1f1b", loss="microbatch")}, "interleaved_1f1b.*at least 2"),
        ({"fsdp": FSDP(reshard_after_forward=True)}, "Use reshard_after_forward=False"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(strategy: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        strategy(pipeline_parallel_size=2, **options)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (Pipeline, {"microbatches": 0}, r"Pipeline\(microbatches=…\) must be at least 1, found 0"),
        (Pipeline, {"loss": "sample"}, r"Pipeline\(loss=…\) must be one of .*found 'sample'"),
        (FSDP, {"reduce_dtype": "float16"}, r"FSDP\(reduce_dtype=…\) is .*found 'float16'"),
    ],
)
def test_values_that_cannot_be_are_refused_at_once(value: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        value(**options)


def test_callbacks_that_average_a_whole_module_are_refused_in_a_pipeline(tmp_path: Path) -> None:
    averages, asks = StochasticWeightAveraging(0.1), Asks("on_fit_start", refuse_unpipelined)
    with pytest.raises(UnsupportedCodeError, match="StochasticWeightAveraging averages the weights in a copy"):
        trainer(tmp_path, averages, asks, max_epochs=1, max_steps=1).fit(BoringModel())


# ── ``strategy="sharded"`` is known to both registries, whichever package is imported first ───────────────────────────


REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_shardckpt.pytorch"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_shardckpt.fabric"),
}


@pytest.mark.parametrize(
    "imports",
    [
        "lightning_shardckpt, lightning",  # as import sorters put `from lightning_shardckpt import …`
        pytest.param("lightning.fabric, lightning_shardckpt, lightning.pytorch", marks=pytest.mark.sweep),
        pytest.param("lightning_shardckpt.pytorch, lightning_shardckpt.fabric", marks=pytest.mark.sweep),
    ],
)
def test_the_name_makes_the_strategy_of_each(imports: str) -> None:
    checks = "; ".join(
        f"from {module} import {registry} as r; s = r.get('sharded'); "
        f"assert type(s).__module__ == {home!r}, s"
        for module, (registry, home) in REGISTRIES.items()
    )
    trainer = "import lightning.pytorch as pl; t = pl.Trainer(strategy='sharded', accelerator='cpu', logger=False)"
    script = f"import {imports}, sys; {checks}; {trainer}; assert 'shardckpt' not in repr(sys.meta_path)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
