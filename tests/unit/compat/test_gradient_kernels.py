"""Kernels over lists of gradients, and where a GradScaler calls one, as `compat.gradient_kernels` has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_shardckpt.compat.gradient_kernels import norms, replace_unscale, unscale


def test_norms_are_those_of_each_tensor_in_the_given_dtype() -> None:
    tensors = [torch.full((4,), 300.0, dtype=torch.float16), torch.tensor([3.0, -4.0], dtype=torch.float16)]
    found = norms(tensors, 2.0, torch.float32)
    assert [n.item() for n in found] == [600.0, 5.0] and {n.dtype for n in found} == {torch.float32}
    assert norms(tensors[1:], math.inf, torch.float32)[0].item() == 4


def test_gradients_are_scaled_in_place_and_infinities_are_reported() -> None:
    finite, found = torch.tensor([2.0, 4.0]), torch.zeros(())
    unscale([finite], torch.tensor(0.5), found)
    assert finite.tolist() == [1, 2] and found.item() == 0
    unscale([finite, torch.tensor([math.nan])], torch.tensor(1.0), found)
    assert found.item() == 1


def test_a_scaler_calls_what_took_the_place_of_its_own_and_skips_a_step_by_its_answer() -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    answer = torch.zeros(())
    seen: list[tuple[float, bool]] = []

    def function(
        of: torch.optim.Optimizer, inverse: Tensor, zero: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        assert of is optimizer and zero.item() == 0
        seen.append((inverse.item(), allow_fp16))
        return {torch.device("cpu"): answer}

    replace_unscale(scaler, function)
    scaler.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert seen == [(0.25, False)] and parameter.item() == 1 - 4  # nothing has unscaled it
    answer.fill_(1.0)
    scaler.step(optimizer)
    assert len(seen) == 2 and parameter.item() == 1 - 4
