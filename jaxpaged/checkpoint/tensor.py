"""A tensor that is described now and read later: what every checkpoint format is reduced to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class LazyTensor:
    """One checkpoint tensor, not yet read.

    Attributes:
      shape: of the array that `read` returns.
      dtype: of the array that `read` returns; bfloat16 and float8 are those of ml_dtypes.
      read: makes the array. Memory-mapped formats return a read-only view of the file that is unmapped with
        its last reference; quantized ones a new float32 array. Nothing is cached: two reads are two arrays.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array that `read` returns."""
        return self.size * self.dtype.itemsize


def map_file(path: Path, *, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only view of one stretch of a file.

    Each call makes a mapping of its own, so that a tensor's pages leave memory with the tensor and not with
    the file: loading a model keeps one tensor resident, not all of them.
    """
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(math.prod(shape) * dtype.itemsize,))
    return mapped.view(np.ndarray).view(dtype).reshape(shape)
