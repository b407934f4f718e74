"""Pickles of objects of any class, for users who allow them in the save and in the load.

The only place where this package pickles and unpickles. Unpickling executes code of the pickle.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from lightning_shardckpt.compat.torch_tensors import local_part


def pickle_object(value: Any) -> bytes | None:
    """Return the pickle of an object; None if it cannot be pickled, or contains a sharded tensor."""
    written = io.BytesIO()
    try:
        _Pickler(written).dump(value)
    except Exception:  # the user's class may raise anything
        return None
    return written.getvalue()


def unpickle_object(content: bytes, type_name: str) -> Any:
    """Return the object of a pickle. Executes code of the pickle."""
    try:
        return pickle.loads(content)
    except Exception as error:  # the object's class may raise anything
        raise TypeError(f"a {type_name} cannot be unpickled: {type(error).__name__}: {error}") from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and local_part(value) is not value:
            raise TypeError("a sharded tensor")
        return NotImplemented
