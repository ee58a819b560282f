"""Reads a GGUF file: its metadata at once, its tensors when asked.

The gguf package gives the block formats and their dequantizers. Its reader is not used: it makes a Python object
per string of the vocabulary and took 3.4 s for the demo model, against 0.1 s here.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxpaged.checkpoint.tensor import LazyTensor, map_file
from jaxpaged.errors import CheckpointError, UnsupportedError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F64: np.dtype("<f8"),
    GGMLQuantizationType.I8: np.dtype("i1"),
    GGMLQuantizationType.I16: np.dtype("<i2"),
    GGMLQuantizationType.I32: np.dtype("<i4"),
    GGMLQuantizationType.I64: np.dtype("<i8"),
}
_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")
_SLAB = 1 << 17  # elements dequantized at a time: half a MB of float32 stays in cache


@dataclass(frozen=True)
class GGUFFile:
    """One GGUF model; a split one counts as one.

    Attributes:
      path: of the file, or of the first split.
      metadata: key -> bool, int, float, str or list of them.
      tensors: GGUF name -> tensor, in the order of the file; quantized ones read as float32.
      kinds: GGUF name -> how it is stored: "F32", "Q4_K".
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, LazyTensor]
    kinds: dict[str, str]


class ArchitectureMetadata:
    """Metadata of a file under its architecture's prefix: "context_length" for "llama.context_length"."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.architecture: str = file.metadata.get("general.architecture", "")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default`."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """The value; raises CheckpointError if it is missing."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.file.path} lacks the metadata", missing=[f"{self.architecture}.{key}"])
        return value

    def need_one(self, key: str) -> int:
        """A count that GGUF may give per layer; every layer must agree."""
        value = self.need(key)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise UnsupportedError(f"{self.file.path}: {self.architecture}.{key} differs between layers: {value}")
        return value[0]

    def vector(self, name: str) -> list[float] | None:
        """The numbers of a small tensor; None if there is none of that name."""
        tensor = self.file.tensors.get(name)
        return None if tensor is None else [float(x) for x in tensor.read()]


def read_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file, and its other splits if it is one of several.

    Raises:
      CheckpointError: it is no GGUF file, is truncated, or a split is missing.
      UnsupportedError: big-endian, an unknown version, or a block format that the gguf package cannot decode.
    """
    paths = _splits(path)
    first = _read_one(paths[0])
    tensors, kinds = dict(first.tensors), dict(first.kinds)
    for other in map(_read_one, paths[1:]):
        twice = sorted(tensors.keys() & other.tensors.keys())
        if twice:
            raise CheckpointError(f"{other.path} repeats tensors of another split: {', '.join(twice)}")
        tensors |= other.tensors
        kinds |= other.kinds
    return GGUFFile(paths[0], first.metadata, tensors, kinds)


def _splits(path: Path) -> list[Path]:
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} splits, but some are not there", missing=missing)
    return paths


def _read_one(path: Path) -> GGUFFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                cursor = _Cursor(data, path)
                metadata, infos = cursor.header()
            except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
                raise CheckpointError(f"{path} is truncated or damaged: {error}") from error
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.offset // alignment) * alignment
    tensors, kinds = {}, {}
    for name, shape, kind, offset in infos:
        tensors[name] = _tensor(path, name, shape, kind, start + offset, size)
        kinds[name] = kind.name
    return GGUFFile(path, metadata, tensors, kinds)


class _Cursor:
    """Walks the header; `offset` is the next byte."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data = data
        self._path = path
        self.offset = len(_MAGIC)

    def header(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]]]:
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise UnsupportedError(f"{self._path} is a big-endian GGUF file")
        if version not in _VERSIONS:
            raise UnsupportedError(f"{self._path} is GGUF version {version}; versions {_VERSIONS} are read")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name = self._string()
            dims = self._scalars("Q", self._scalar("I"))
            kind = self._scalar("I")
            infos.append((name, tuple(reversed(dims)), GGMLQuantizationType(kind), self._scalar("Q")))
        return metadata, infos

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize("<" + code)
        if count * size > len(self._data) - self.offset:
            raise ValueError(f"{count} values at byte {self.offset} reach past the end")
        values = struct.unpack_from(f"<{count}{code}", self._data, self.offset)
        self.offset += count * size
        return list(values)

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self.offset)
        start = self.offset + 8
        if length > len(self._data) - start:
            raise ValueError(f"a string at byte {self.offset} reaches past the end")
        self.offset = start + length
        return self._data[start : self.offset].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        element, count = self._scalar("I"), self._scalar("Q")
        if element in (_STRING, _ARRAY):
            return [self._value(element) for _ in range(count)]
        return self._scalars(_SCALARS[element], count)


def _tensor(
    path: Path, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int, file_size: int
) -> LazyTensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = math.prod(shape)
    if count % block or (shape and shape[-1] % block):
        raise CheckpointError(f"{path}: {name} of shape {shape} does not divide into {kind.name} blocks of {block}")
    nbytes = count // block * block_bytes
    if offset + nbytes > file_size:
        raise CheckpointError(f"{path} is truncated: {name} ends at byte {offset + nbytes} of {file_size}")
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        return LazyTensor(shape, dtype, functools.partial(map_file, path, offset=offset, dtype=dtype, shape=shape))
    if not _decodable(kind):
        raise UnsupportedError(f"{path}: {name} is stored as {kind.name}, which the gguf package cannot decode")

    def fill(out: np.ndarray) -> None:
        raw = map_file(path, offset=offset, dtype=np.dtype(np.uint8), shape=(nbytes,))
        _dequantize(raw, kind, out.reshape(-1))

    def read() -> np.ndarray:
        out = np.empty(shape, np.float32)
        fill(out)
        return out

    return LazyTensor(shape, np.dtype(np.float32), read, fill)


@functools.cache
def _decodable(kind: GGMLQuantizationType) -> bool:
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _dequantize(raw: np.ndarray, kind: GGMLQuantizationType, out: np.ndarray) -> None:
    """Fills `out`, one axis of any float dtype, from its blocks, uint8 [bytes].

    The package works on 16 rows at a time whatever their length, and blocks lie one after the other across rows,
    so it is given rows of a length that keeps NumPy busy: twice as fast on the demo model.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]
    step = max(_SLAB // block, 16) // 16 * 16
    total = out.size // block
    for start in range(0, total, step):
        stop = min(start + step, total)
        rows = 16 if stop - start == step else 1
        part = raw[start * block_bytes : stop * block_bytes].reshape(rows, -1)
        out[start * block : stop * block] = quants.dequantize(part, kind).reshape(-1)
