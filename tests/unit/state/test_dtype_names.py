"""The names of storages are those in files of torch.save. Oracle: torch's own files."""

from __future__ import annotations

import io
import pickletools
import zipfile

import pytest
import torch

from lightning_shardckpt.state.dtype_names import LEGACY_STORAGES
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_a_pickle_of_torch_names_the_class_of_a_storage(dtype: torch.dtype) -> None:
    file = io.BytesIO()
    torch.save(torch.zeros(2, dtype=dtype), file)
    with zipfile.ZipFile(file) as archive:
        pickled = archive.read("archive/data.pkl")
    named = {argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)}
    name = str(dtype).removeprefix("torch.")
    legacy = LEGACY_STORAGES.get(name)
    expected = {"torch.storage UntypedStorage", f"torch {name}"} if legacy is None else {f"torch {legacy}"}
    assert {one for one in named if one.startswith(("torch ", "torch.storage "))} == expected
