"""Objects of any class as pickles, for who asks for that when saving, and again when loading.

The one place where this package pickles and unpickles. Unpickling executes what is in the bytes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from lightning_shardckpt.compat.torch_tensors import local_part


def pickle_object(value: Any) -> bytes | None:
    """Return the pickle of an object; None if it cannot be pickled, or has sharded tensors, of which this rank has a
    part."""
    written = io.BytesIO()
    try:
        _Pickler(written).dump(value)
    except Exception:  # a class of the user's may do anything
        return None
    return written.getvalue()


def unpickle_object(content: bytes, type_name: str) -> Any:
    """Return the object whose pickle this is. Executes what is in it.

    Raises:
        TypeError: saying why it can't be made, naming ``type_name``: its module may be missing here.
    """
    try:
        return pickle.loads(content)
    except Exception as error:  # whatever the object's class does
        raise TypeError(f"a {type_name} cannot be unpickled: {type(error).__name__}: {error}") from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and local_part(value) is not value:
            raise TypeError("a sharded tensor")
        return NotImplemented
