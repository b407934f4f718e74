"""Contents of ``torch.save`` files besides values: kinds of storages, and versions in state dicts. No torch.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

LEGACY_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""By the name of a dtype of ``torch``: the class of that module that a pickle names for the storage of a tensor.

A tensor of any other dtype has an untyped storage there, and its dtype apart. Relies on
``TypedStorage._pickle_storage_type`` and on ``Tensor._reduce_ex_internal``.
"""


def versions_of(state_dict: OrderedDict[Any, Any]) -> Any:
    """Return the versions of modules that ``Module.state_dict`` attaches to what it returns; None if there are none.

    Relies on the attribute ``_metadata``, which ``Module.load_state_dict`` reads.
    """
    return vars(state_dict).get("_metadata")


def attach_versions(state_dict: OrderedDict[Any, Any], versions: Any) -> None:
    """Attach what ``versions_of`` returned to another state dict."""
    state_dict._metadata = versions  # type: ignore[attr-defined]  # as torch does


def byte_order(path: str | os.PathLike[str]) -> str | None:
    """Return the byte order that an archive of ``torch.save`` names, "little" or "big"; None if it names none.

    Relies on ``torch._C.PyTorchFileReader``, by which ``torch.load`` reads archives, odd ones included.
    """
    import torch  # who reads an archive of others has it

    archive: Any = torch._C.PyTorchFileReader(os.fspath(path))  # its stub lacks half of it
    return archive.get_record("byteorder").decode() if archive.has_record("byteorder") else None
