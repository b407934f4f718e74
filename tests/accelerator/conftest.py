"""``python -m pytest -m gpu`` runs what is marked so on real GPUs; any other run of the tests on the pretend device."""

from __future__ import annotations

import pytest

from tests.accelerator import ranks


@pytest.fixture(autouse=True, scope="session")
def kind_of_devices(request: pytest.FixtureRequest) -> None:
    """Choose the devices of `run_on_gpus`; skip at once where there are none."""
    ranks.on_real_gpus = request.config.option.markexpr.strip() == "gpu"
    if ranks.on_real_gpus:
        ranks.require_gpus(1)
