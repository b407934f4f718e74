"""Tensors that no checkpoint holds are refused by name, at the save, and at the load into them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.state.documents import parse_document


def two() -> Any:
    return TwoTensor(torch.ones(2, 2), torch.ones(2, 2))  # type: ignore[no-untyped-call]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "made of others": (two, r"a torch\.testing.*TwoTensor is made of other tensors"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "(N|n)ested"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quint8"),
    "on no device": (lambda: torch.ones(3, device="meta"), "meta device"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["value", "buffer", "moment"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(kind: str, where: str, tmp_path: Path) -> None:
    build, said = REFUSED[kind]
    state: dict[str, Any] = {"odd": build()}
    if where == "buffer":
        module = nn.Linear(2, 2)
        module.register_buffer("odd", build())
        state = {"model": module}
    elif where == "moment":
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters())
        optimizer.state[module.weight]["odd"] = build()
        state = {"model": module, "optimizer": optimizer}
    with pytest.raises(StateError, match=said) as caught:
        ckpt.save(tmp_path / "c", state)
    assert "odd" in str(caught.value)


def test_a_module_of_compound_tensors_is_refused_by_a_load_too(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    ckpt.save(tmp_path / "c", {"model": module})
    module.weight = nn.Parameter(two(), requires_grad=False)
    with pytest.raises(StateError, match=r"model/weight: a .*TwoTensor is made of other tensors"):
        ckpt.load(tmp_path / "c", {"model": module})
    for state in ({"model": dict(module.state_dict())}, {"model": {**nn.Linear(2, 2).state_dict(), "weight": two()}}):
        with pytest.raises(StateError, match=r"model.weight: a .*TwoTensor is made of other tensors"):
            ckpt.load(tmp_path / "c", state)


def test_checkpoints_with_records_of_compound_tensors_are_refused() -> None:
    with pytest.raises(FormatError, match="'weight#' describes a tensor made of others"):
        parse_document("model", b'{"weight#": {"class": "a.B"}}', "here")
    optimizer = b'{"0": {"groups": {}, "numbered": false, "values": {"exp_avg#": []}}}'
    with pytest.raises(FormatError, match="'exp_avg#' describes a tensor made of others"):
        parse_document("optimizer", optimizer, "here")
