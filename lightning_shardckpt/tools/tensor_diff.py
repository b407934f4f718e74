"""Measure by how much two tensors differ, a window at a time, also in dtypes that numpy lacks.

bfloat16 becomes float32 by a shift of its bits, an 8-bit float by a table of its 256 values. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan, sqrt
from typing import TYPE_CHECKING, Any

import numpy

from lightning_shardckpt.format.value_checks import DTYPE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMPY = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "C64": "c8",
    "C128": "c16",
    "BOOL": "u1",
    **{f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
}
_FLOAT8 = {  # bits of exponent and mantissa, bias, whether there are infinities, whether -0 is the only NaN
    "F8_E4M3": (4, 3, 7, False, False),
    "F8_E5M2": (5, 2, 15, True, False),
    "F8_E4M3FNUZ": (4, 3, 8, False, True),
    "F8_E5M2FNUZ": (5, 2, 16, False, True),
}
_AT_ONCE = 1 << 18  # elements: as doubles they still lie in a cache


def numbers(data: memoryview, dtype: str) -> NDArray[Any]:
    """Return the elements of a tensor as numbers of a dtype that numpy has, exactly.

    >>> [numbers(memoryview(bytes(b)), d).tolist() for b, d in (([0x80, 0x3F], "BF16"), ([0x38], "F8_E4M3"))]
    [[1.0], [1.0]]
    """
    if dtype == "BF16":
        bits: NDArray[numpy.uint32] = numpy.frombuffer(data, numpy.uint16).astype(numpy.uint32) << numpy.uint32(16)
        return bits.view(numpy.float32)
    if dtype.startswith("F8_"):
        return _float8_values(dtype)[numpy.frombuffer(data, numpy.uint8)]
    return numpy.frombuffer(data, f"<{_NUMPY[dtype]}")


@lru_cache
def _float8_values(dtype: str) -> NDArray[numpy.float32]:
    """Return the value of every byte, after the OCP 8-bit floating point specification; FNUZ after arXiv:2206.02915."""
    if dtype == "F8_E8M0":  # a power of two, of scales
        return numpy.array([*(2.0 ** (byte - 127) for byte in range(255)), nan], numpy.float32)
    return numpy.array([_float8(byte, *_FLOAT8[dtype]) for byte in range(256)], numpy.float32)


def _float8(
    byte: int, exponent_bits: int, mantissa_bits: int, bias: int, has_inf: bool, is_unsigned_zero: bool
) -> float:
    mantissa, exponent = byte & ((1 << mantissa_bits) - 1), byte >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign, highest = -1.0 if byte & 0x80 else 1.0, (1 << exponent_bits) - 1
    if is_unsigned_zero and byte == 0x80:
        return nan
    if not is_unsigned_zero and exponent == highest:
        if has_inf:
            return nan if mantissa else sign * inf
        if mantissa == (1 << mantissa_bits) - 1:
            return nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@dataclass(slots=True)
class TensorDistance:
    """The distance of two tensors of one dtype, summed over windows.

    Attributes:
        elements: number of elements with different bits.
        not_finite: how many of these are infinite or NaN on either side; the magnitudes are those of the others.
        max_abs: the largest difference.
    """

    elements: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    _squares: float = 0.0
    _of_first: float = 0.0

    def add(self, first: memoryview, second: memoryview, dtype: str) -> None:
        """Add a window of both tensors."""
        step = _AT_ONCE * DTYPE_BYTES[dtype]
        with numpy.errstate(all="ignore"):  # NaNs, and squares of the largest doubles, which become infinite
            for begin in range(0, len(first), step):
                self._add(first[begin : begin + step], second[begin : begin + step], dtype)

    def _add(self, first: memoryview, second: memoryview, dtype: str) -> None:
        kind = numpy.complex128 if dtype.startswith("C") else numpy.float64
        a, size = numbers(first, dtype).astype(kind), DTYPE_BYTES[dtype]
        self._of_first += _squares(a[numpy.isfinite(a)])
        if first == second:
            return
        bits = [numpy.frombuffer(data, "u1").reshape(-1, size) for data in (first, second)]
        differs = (bits[0] != bits[1]).any(axis=1)
        a, b = a[differs], numbers(second, dtype)[differs].astype(kind)
        finite = numpy.isfinite(a) & numpy.isfinite(b)
        self.elements += int(differs.sum())
        self.not_finite += int((~finite).sum())
        apart = numpy.abs(b[finite] - a[finite])
        self._squares += _squares(apart)
        self.max_abs = max(self.max_abs, float(apart.max(initial=0.0)))

    @property
    def relative_l2(self) -> float | None:
        """The norm of the difference divided by that of the first tensor; None if that is 0 or not finite."""
        if self._of_first in (0.0, inf) or self._squares == inf:
            return None
        found = sqrt(self._squares) / sqrt(self._of_first)
        return found if found < inf else None


def _squares(values: NDArray[Any]) -> float:
    return float(numpy.sum(values.real**2) + (numpy.sum(values.imag**2) if values.dtype.kind == "c" else 0.0))
