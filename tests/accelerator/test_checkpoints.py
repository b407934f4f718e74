"""Checkpoints of pretend GPUs: resumed there, on other devices, on other topologies and on CPUs.

Oracle: the run that was not interrupted, and the state that was saved, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shardckpt import ShardCkptIO, load, save, save_async, wait
from tests.accelerator import device
from tests.accelerator.ranks import require_device, run_on_gpus
from tests.support.pool import run_ranks
from tests.support.tiny import SaveAt, differences, fit

pytestmark = pytest.mark.gpu

SAVED, LAST = 2, 4


def _straight(path: str, io: Mapping[str, Any]) -> dict[str, Any]:
    """Train on, with a save in the middle; return the losses, and the states then and at the end, on the CPU."""
    plugins = [ShardCkptIO(**io)]
    found = fit({}, LAST, accelerator="cuda", plugins=plugins, callbacks=[SaveAt(SAVED, path)])
    plugins[0].wait()
    return _on_cpu(found)


def _resumed(strategy: Mapping[str, Any], path: str, steps: int, options: Mapping[str, Any]) -> dict[str, Any]:
    return _on_cpu(fit(strategy, steps, resume=path, seed=5, **options))


def _on_cpu(found: dict[str, Any]) -> dict[str, Any]:
    found["state"] = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in found["state"].items()}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    path = str(tmp_path_factory.mktemp("gpus") / "middle.ckpt")
    return path, run_on_gpus(2, _straight, path, {})


@pytest.mark.parametrize("devices", [[0, 1], [1, 0]])
def test_a_run_resumes_exactly_on_the_same_and_on_other_device_numbers(
    saved: tuple[str, list[dict[str, Any]]], devices: list[int]
) -> None:
    """Its dropout continues, too: each rank draws from its own device."""
    path, straight = saved
    resumed = run_on_gpus(2, _resumed, {}, path, LAST, {"accelerator": "cuda", "devices": devices})
    for before, after in zip(straight, resumed, strict=True):
        assert after["losses"] == before["losses"][SAVED:]
        assert differences(before["state"], after["state"]) == []


def _waits_of_saves(path: str) -> list[int]:
    """How often the host waits for the device in a save of few tensors, and in one of many; none is a mere value."""
    waits = []
    for count in (4, 40):
        state = {"x": {f"{n}": torch.arange(300.0 * (n + 1), device="cuda") for n in range(count)}}
        before = device.counts()["host_waits"]
        save(f"{path}-{count}", state)
        waits.append(device.counts()["host_waits"] - before)
        loaded = {"x": {n: torch.zeros_like(tensor) for n, tensor in state["x"].items()}}
        load(f"{path}-{count}", loaded)
        assert all(torch.equal(loaded["x"][n], tensor) for n, tensor in state["x"].items())
    return waits


def test_waits_of_a_save_do_not_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    require_device()
    for waits in run_on_gpus(2, _waits_of_saves, str(tmp_path / "saved")):
        assert max(waits) <= 3


def _pinned_by_saves(path: str) -> list[tuple[int, int]]:
    """Pinned bytes after each of some asynchronous saves, of two sizes, and the bytes of the tensors."""
    found = []
    for number, columns in enumerate((300, 300, 350, 350)):
        state = {"x": {f"{n}": torch.full((500, columns), float(number), device="cuda") for n in range(3)}}
        save_async(f"{path}-{number}", state)
        wait()
        found.append((device.counts()["pinned"], sum(tensor.nbytes for tensor in state["x"].values())))
    return found


def test_pinned_memory_of_saves_is_used_again_and_hardly_more_than_their_bytes(tmp_path: Path) -> None:
    require_device()
    for pinned, nbytes in run_on_gpus(1, _pinned_by_saves, str(tmp_path / "saved"))[0]:
        assert nbytes <= pinned <= 1.1 * nbytes


def _loaded_by_one_process(path: str) -> dict[str, Any]:
    (loaded,) = run_ranks(1, _resumed, {}, path, SAVED, {}, init_process_group=False)
    return dict(loaded["state"])


@pytest.fixture(scope="module")
def expected(saved: tuple[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What one process, without a GPU, loads of it."""
    return _loaded_by_one_process(saved[0])


@pytest.mark.slow
def test_an_asynchronous_save_has_the_values_of_its_step(expected: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    run_on_gpus(2, _straight, path, {"use_async": True})
    assert differences(expected, _loaded_by_one_process(path)) == []


def test_a_checkpoint_of_gpus_resumes_on_cpus_and_theirs_on_gpus(
    saved: tuple[str, list[dict[str, Any]]], expected: dict[str, Any], tmp_path: Path
) -> None:
    back = str(tmp_path / "back.ckpt")
    run_ranks(2, _resumed, {}, saved[0], SAVED, {"save": back})
    loaded = run_on_gpus(2, _resumed, {}, back, SAVED, {"accelerator": "cuda"})
    assert differences(expected, loaded[0]["state"]) == []
