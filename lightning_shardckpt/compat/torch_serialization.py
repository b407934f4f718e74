"""The byte order of an archive of ``torch.save``.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def byte_order(path: str | os.PathLike[str]) -> str | None:
    """Return the byte order that an archive of ``torch.save`` names, "little" or "big"; None if it names none.

    Relies on ``torch._C.PyTorchFileReader``, by which ``torch.load`` reads archives, odd ones included.
    """
    archive: Any = torch._C.PyTorchFileReader(os.fspath(path))  # its stub lacks half of it
    return archive.get_record("byteorder").decode() if archive.has_record("byteorder") else None
