"""``strategy="sharded"`` is known to both registries, whichever package is imported first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.pool import ROOT

REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_shardckpt.pytorch"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_shardckpt.fabric"),
}
DOORS = "lightning_shardckpt.pytorch, lightning_shardckpt.fabric"


@pytest.mark.parametrize(
    "imports",
    [
        "lightning_shardckpt, lightning",  # as import sorters put `from lightning_shardckpt import …`
        pytest.param("lightning, lightning_shardckpt", marks=pytest.mark.sweep),
        pytest.param("lightning_shardckpt, lightning.pytorch", marks=pytest.mark.sweep),
        pytest.param("lightning.fabric, lightning_shardckpt, lightning.pytorch", marks=pytest.mark.sweep),
        pytest.param(DOORS, marks=pytest.mark.sweep),
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


def test_the_tools_import_neither() -> None:
    script = "import lightning_shardckpt, sys; assert not {'lightning', 'torch'} & sys.modules.keys()"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
