"""Reads safetensors: one file, or the shards that an index names. Memory-mapped, bfloat16 and float8 without torch."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged.checkpoint.tensor import LazyTensor, map_file
from jaxpaged.errors import CheckpointError, UnsupportedError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


def read_folder(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of a model folder, name -> tensor.

    As in transformers `model.safetensors` comes first, then the index; other `*.safetensors` are read only where
    neither is there, so that a stray `consolidated.safetensors` is never taken for a part of the model.

    Raises:
      CheckpointError: no safetensors at all, shards or tensors that the index names are missing, a damaged file.
    """
    if (folder / SINGLE).is_file():
        return read_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_index(folder / INDEX)
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter_")))
    if not files:
        raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}; {_what_else(folder)}")
    return _merge(files)


def _what_else(folder: Path) -> str:
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".safetensors"))
    if not others:
        return "it holds no weights"
    return f"{', '.join(others)} cannot be read: only safetensors and GGUF are, as pickled weights can run code"


def _read_index(index: Path) -> dict[str, LazyTensor]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    outside = [name for name in shards if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(map(str, outside))}")
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(f"{index} names files that are not there", missing=missing)
    files = {name: read_file(index.parent / name) for name in shards}
    absent = [f"{name} (in {shard})" for name, shard in weight_map.items() if name not in files[shard]]
    if absent:
        raise CheckpointError(f"{index} names tensors that its files lack", missing=absent)
    return {name: files[shard][name] for name, shard in weight_map.items()}


def _merge(files: Iterable[Path]) -> dict[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    for path in files:
        part = read_file(path)
        twice = sorted(tensors.keys() & part.keys())
        if twice:
            raise CheckpointError(f"{path} repeats tensors of another file beside it: {', '.join(twice)}")
        tensors |= part
    return tensors


def read_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one safetensors file; only its header is read.

    Raises:
      CheckpointError: the header is damaged, offsets are out of range or overlap, or the file is cut short.
      UnsupportedError: a dtype that NumPy has no type for.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{path} is no safetensors file, or cut short: {size} bytes, header of {length}")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        entries = {name: _entry(name, info) for name, info in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the header is damaged: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error
    _check_layout(path, entries, size - 8 - length)
    tensors = {}
    for name, (dtype, shape, start, _) in entries.items():
        read = functools.partial(map_file, path, offset=8 + length + start, dtype=dtype, shape=shape)
        tensors[name] = LazyTensor(shape, dtype, read)
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(name: str, info: dict[str, Any]) -> tuple[np.dtype, tuple[int, ...], int, int]:
    if info["dtype"] not in _DTYPES:
        raise UnsupportedError(f"{name} has dtype {info['dtype']!r}; known: {', '.join(_DTYPES)}")
    dtype, shape = _DTYPES[info["dtype"]], tuple(info["shape"])
    start, stop = info["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name} has shape {shape} and offsets {start}..{stop}")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {dtype.name}{list(shape)} does not fill bytes {start}..{stop}")
    return dtype, shape, start, stop


def _check_layout(path: Path, entries: dict[str, tuple[np.dtype, tuple[int, ...], int, int]], data_size: int) -> None:
    """As the format demands: the tensors fill the data without gaps and without overlap."""
    end, last = 0, "the header"
    for name, (_, _, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != end:
            what = "overlaps" if start < end else "leaves a gap after"
            raise CheckpointError(f"{path}: {name} at bytes {start}..{stop} {what} {last}, which ends at {end}")
        end, last = stop, name
    if end > data_size:
        raise CheckpointError(f"{path} is cut short: {last} ends at byte {end} of its data, which has {data_size}")
    if end < data_size:
        raise CheckpointError(f"{path} has {data_size - end} bytes that belong to no tensor")
