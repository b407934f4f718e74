"""How a pickle makes a tensor again. Oracle: torch's own files and tensors."""

from __future__ import annotations

import pytest
import torch

from lightning_shardckpt.compat.torch_tensors import rebuilding


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16])  # of a typed storage, and of an untyped one
def test_a_tensor_is_made_again_as_torch_itself_does(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3)
    function, arguments = tensor.__reduce_ex__(2)
    untyped = dtype if dtype is torch.uint16 else None
    assert rebuilding(arguments[0], (2, 3), (3, 1), untyped) == (function, arguments)
