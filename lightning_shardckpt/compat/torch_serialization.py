"""Contents of ``torch.save`` files besides values: kinds of storages, and versions in state dicts.

Checked with torch 2.13.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import torch


def storage_class(storage: torch.storage.TypedStorage) -> type:
    """Return the class of the ``torch`` module that a pickle names for a storage, such as ``torch.FloatStorage``.

    Relies on ``TypedStorage._pickle_storage_type``.
    """
    found: type = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]  # torch's
    return found


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
    archive: Any = torch._C.PyTorchFileReader(os.fspath(path))  # its stub lacks half of it
    return archive.get_record("byteorder").decode() if archive.has_record("byteorder") else None
