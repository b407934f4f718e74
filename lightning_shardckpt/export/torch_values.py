"""Tensors, dtypes and devices in a pickle as ``torch.save`` writes them, without torch.

What a checkpoint of this package holds is described by names. Only a device among its values takes torch, which knows
what devices there are. Checkpoints of other formats come with objects of torch, and are described in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lightning_shardckpt.export.pickle_writer import Call, Named, Reference
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.value_checks import bytes_in
from lightning_shardckpt.state.dtype_names import LEGACY_STORAGES, TORCH_NAMES
from lightning_shardckpt.state.json_values import OfTorch, shape_filled_by


@dataclass(frozen=True, slots=True, eq=False)
class ArchivedTensor:
    """A tensor of a file that is to be written, and a record of its own in it; ``dtype`` as torch calls it.

    ``content``: its bytes, or component and key of the tensor that is stored.
    """

    dtype: str
    shape: Shape
    nbytes: int
    content: memoryview | tuple[str, str]


def stored_record(dtype: str, shape: Shape, content: tuple[str, str]) -> ArchivedTensor:
    """Return the record of a stored tensor that is written in a dtype, by its name in the format."""
    return ArchivedTensor(TORCH_NAMES.get(dtype, dtype), shape, bytes_in(shape, dtype), content)


def of_torch(stored: Callable[[str], ArchivedTensor]) -> OfTorch:
    """Return how values are decoded for a file; ``stored`` gives the record of a stored tensor."""
    return OfTorch(stored, _inline, lambda name: Named("torch", TORCH_NAMES[name]), _device)


def _inline(content: bytes, dtype: str, shape: list[int]) -> ArchivedTensor:
    return ArchivedTensor(TORCH_NAMES[dtype], shape_filled_by(content, dtype, shape), len(content), memoryview(content))


def _device(text: str) -> Any:
    import torch  # it knows which there are

    return torch.device(text)


def from_numpy(value: Any) -> ArchivedTensor | None:
    """Return the tensor that ``torch.from_numpy`` makes of an array in native byte order; None if it has no such dtype.
    """
    dtype = _NUMPY_DTYPES.get(value.dtype.str[1:])
    content = memoryview(value.tobytes())
    return None if dtype is None else ArchivedTensor(dtype, tuple(value.shape), len(content), content)


class TensorPickling:
    """Tells how the objects of torch in a value are made, and numbers its tensors: by the number of their storage."""

    def __init__(self) -> None:
        self.tensors: list[ArchivedTensor] = []

    def made_by(self, value: Any) -> Named | Call:
        """Return how ``torch.load`` makes a record, or an object of torch.

        Raises:
            StateError: for a tensor that is not dense.
            TypeError: for anything else.
        """
        if isinstance(value, ArchivedTensor):
            return self._rebuilt(value)
        if is_of_torch(value, "dtype"):
            return Named("torch", str(value).removeprefix("torch."))
        if is_of_torch(value, "device"):
            return Call(Named("torch", "device"), value.__reduce__()[1])
        if is_of_torch(value, "Tensor"):
            return self._rebuilt(_record_of(value))
        raise TypeError(f"a {type(value).__name__} cannot be in a file for torch.load")

    def _rebuilt(self, tensor: ArchivedTensor) -> Call:
        legacy = LEGACY_STORAGES.get(tensor.dtype)
        kind = Named("torch", legacy) if legacy is not None else Named("torch.storage", "UntypedStorage")
        numel = prod(tensor.shape) if legacy is not None else tensor.nbytes
        storage = Reference(("storage", kind, str(len(self.tensors)), "cpu", numel))
        self.tensors.append(tensor)
        hooks = Call(Named("collections", "OrderedDict"), ())
        shape = (*tensor.shape,)  # each its own, since a pickle refers to what was in it before
        arguments = (storage, 0, shape, strides_of(shape), False, hooks)
        if legacy is not None:
            return Call(Named("torch._utils", "_rebuild_tensor_v2"), arguments)
        return Call(Named("torch._utils", "_rebuild_tensor_v3"), (*arguments, Named("torch", tensor.dtype)))


def is_of_torch(value: Any, name: str) -> bool:
    """Return whether a value is exactly of a class of torch, by its name; without torch there is none."""
    return type(value).__name__ == name and type(value).__module__ == "torch"


def _record_of(tensor: Any) -> ArchivedTensor:
    import torch  # who made the tensor has it

    from lightning_shardckpt.state.tensor_bytes import dtype_name, host_bytes

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        dtype_name(tensor, "beside the model and the optimizers")  # says what is wrong
    content = host_bytes(tensor)
    return ArchivedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), len(content), content)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor.

    >>> strides_of((5, 0, 3, 2))
    (6, 6, 2, 1)
    """
    found = [1]
    for length in reversed(shape[1:]):
        found.append(found[-1] * max(length, 1))
    return tuple(reversed(found)) if shape else ()


_NUMPY_DTYPES = {"b1": "bool", "c8": "complex64", "c16": "complex128"}
_NUMPY_DTYPES |= {f"i{size}": f"int{size * 8}" for size in (1, 2, 4, 8)}
_NUMPY_DTYPES |= {f"u{size}": f"uint{size * 8}" for size in (1, 2, 4, 8)}
_NUMPY_DTYPES |= {f"f{size}": f"float{size * 8}" for size in (2, 4, 8)}
