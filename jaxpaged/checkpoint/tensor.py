"""A tensor that is described now and read later: what every checkpoint format is reduced to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class LazyTensor:
    """One checkpoint tensor, not yet read.

    Attributes:
      shape: of the array that `read` returns.
      dtype: of the array that `read` returns; bfloat16 and float8 are those of ml_dtypes.
      read: makes the array. Memory-mapped formats return a read-only view of the file that is unmapped with
        its last reference; quantized ones a new float32 array. Nothing is cached: two reads are two arrays.
      fill: writes the elements into an array of the shape, in its dtype; None: by way of `read`. Quantized formats have
        one, so that no whole array of float32 is needed.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = field(repr=False, compare=False)
    fill: Callable[[np.ndarray], None] | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array that `read` returns."""
        return self.size * self.dtype.itemsize

    def read_as(self, dtype: np.dtype) -> np.ndarray:
        """A new array of that dtype, which the device of a CPU can have without another copy: see `aligned`."""
        array = aligned(self.shape, dtype)
        if self.fill is not None:
            self.fill(array)
        else:
            array[...] = self.read()
        return array


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of whatever was there, at an address that XLA accepts; NumPy's own are copied to such a one."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    first = -room.ctypes.data % _ALIGNMENT
    return room[first : first + nbytes].view(dtype).reshape(shape)


def map_file(path: Path, *, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only view of one stretch of a file.

    Each call makes a mapping of its own, so that a tensor's pages leave memory with the tensor and not with
    the file: loading a model keeps one tensor resident, not all of them.
    """
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(math.prod(shape) * dtype.itemsize,))
    return mapped.view(np.ndarray).view(dtype).reshape(shape)
