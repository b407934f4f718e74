"""How a file for torch.load is written before its bytes are there. Oracle: torch's own files."""

from __future__ import annotations

import io

import pytest
import torch

from lightning_shardckpt.compat.torch_tensors import fake_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.complex64, torch.float8_e4m3fn])
def test_a_fake_tensor_is_written_as_a_real_one_without_its_bytes(dtype: torch.dtype) -> None:
    real, make = torch.arange(1, 7).to(dtype).view(2, 3), fake_tensors()
    files = io.BytesIO(), io.BytesIO()
    torch.save([real], files[0])
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save([make((2, 3), dtype)], files[1])
    full, empty = (file.getvalue() for file in files)
    content = real.numpy().tobytes() if dtype not in (torch.float8_e4m3fn,) else bytes(real.view(torch.uint8).flatten())
    at = full.index(content)
    assert empty[at : at + len(content)] == bytes(len(content)) and empty[:400] == full[:400]
