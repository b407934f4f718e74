"""``strategy="sharded"`` is known to both registries, whichever is imported first."""

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


@pytest.mark.parametrize("first", ["lightning_shardckpt", pytest.param("lightning", marks=pytest.mark.sweep)])
def test_the_name_makes_the_strategy_of_each(first: str) -> None:
    checks = "; ".join(
        f"from {module} import {registry} as r; s = r.get('sharded'); "
        f"assert type(s).__module__ == {home!r}, s"
        for module, (registry, home) in REGISTRIES.items()
    )
    imports = ["lightning", "lightning_shardckpt"] if first == "lightning" else ["lightning_shardckpt"]
    script = f"import {', '.join(imports)}, sys; {checks}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
