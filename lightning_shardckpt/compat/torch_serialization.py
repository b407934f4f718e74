"""The byte order of an archive of ``torch.save``, and how its pickle makes a tensor again.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import torch


def byte_order(path: str | os.PathLike[str]) -> str | None:
    """Return the byte order that an archive of ``torch.save`` names, "little" or "big"; None if it names none.

    Relies on ``torch._C.PyTorchFileReader``, by which ``torch.load`` reads archives, odd ones included.
    """
    archive: Any = torch._C.PyTorchFileReader(os.fspath(path))  # its stub lacks half of it
    return archive.get_record("byteorder").decode() if archive.has_record("byteorder") else None


def rebuilding(
    storage: object, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype | None
) -> tuple[Any, tuple[Any, ...]]:
    """Return the function and the arguments by which a pickle of ``torch.save`` makes a tensor of a storage.

    Relies on ``torch._utils._rebuild_tensor_v2``, and ``…_v3`` for an untyped storage, which ``Tensor.__reduce_ex__``
    returns; their names are in every file.

    Args:
        storage: stands for the storage.
        shape: of the tensor.
        stride: of the tensor, which begins with the storage.
        dtype: of an untyped storage; None for a typed one.
    """
    arguments: tuple[Any, ...] = (storage, 0, shape, stride, False, OrderedDict())
    if dtype is None:
        return torch._utils._rebuild_tensor_v2, arguments
    return torch._utils._rebuild_tensor_v3, (*arguments, dtype)
