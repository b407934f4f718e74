"""Copies of parameters are heard of, each once."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lightning_shardckpt.compat.parameter_copies import on_deepcopy


def test_each_parameter_that_is_deep_copied_is_told_with_its_copy_until_it_ends() -> None:
    told = list[tuple[nn.Parameter, nn.Parameter]]()
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    net[1].weight = net[0].weight  # type: ignore[assignment]  # tied
    end = on_deepcopy(lambda *pair: told.append(pair))
    try:
        copied = copy.deepcopy(net)
    finally:
        end()
    pairs = zip(net.parameters(), copied.parameters(), strict=True)
    assert [(id(a), id(b)) for a, b in told] == [(id(p), id(q)) for p, q in pairs]
    assert all(torch.equal(a, b) for a, b in told)
    copy.deepcopy(net)
    assert len(told) == 2
