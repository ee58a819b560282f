"""Measured choices as data: what was found best for an operation's kernels on a kind of device.

`tuned/<device>/<op>.json` holds entries; `python -m pallas_kernels.tune` writes them and kernels read them while they
are traced. An entry says for which key it was measured:

    {"kernel": "decode", "key": {"head_dim": 128, "rows": 32}, "value": {"keys": 64, "num_warps": 4}, "measured": {}}

It fits a call whose key has the same value in every field of the entry's key, except in `SIZES`: there the nearest
entry that is not smaller is taken, and for want of one the nearest.
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import jax

FOLDER = Path(__file__).parent / "tuned"
SIZES = ("rows", "tokens", "context")  # key fields that need not be equal

Key = Mapping[str, int | str]


@dataclass
class Trial:
    """Values that lookups get while they are tried out, and what was asked.

    Attributes:
      op: whose lookups.
      values: kernel -> the value its lookups get; None where a kernel gets what it would get without any entry.
      asked: kernel -> the key of its last lookup.
      defaults: kernel -> what it does without an entry, where it says so.
    """

    op: str
    values: Mapping[str, Mapping[str, int] | None]
    asked: dict[str, dict[str, int | str]] = field(default_factory=dict)
    defaults: dict[str, dict[str, int]] = field(default_factory=dict)


_device: ContextVar[str | None] = ContextVar("device", default=None)
_trial: ContextVar[Trial | None] = ContextVar("trial", default=None)


@overload
def lookup(op: str, kernel: str, key: Key) -> dict[str, int] | None: ...
@overload
def lookup(op: str, kernel: str, key: Key, default: Mapping[str, int]) -> dict[str, int]: ...
def lookup(op: str, kernel: str, key: Key, default: Mapping[str, int] | None = None) -> dict[str, int] | None:
    """The best known value for a call, or the default where nothing that fits it was measured.

    Args:
      op: name of the operation, which is the file's.
      kernel: one of the operation's kernels.
      key: what the call is like.
      default: from a heuristic; the tuner starts there.

    Raises:
      ValueError: the file is damaged; the message names it.
    """
    trial = _trial.get()
    if trial and trial.op == op and kernel in trial.values:
        trial.asked[kernel] = dict(key)
        if default is not None:
            trial.defaults[kernel] = dict(default)
        value = trial.values[kernel]
    else:
        entries = _read(_path(FOLDER, current_device(), op))
        fitting = [entry for entry in entries if entry["kernel"] == kernel and _fits(entry["key"], key)]
        value = min(fitting, key=lambda entry: _distance(entry["key"], key))["value"] if fitting else None
    value = default if value is None else value
    return None if value is None else dict(value)


def record(
    op: str,
    kernel: str,
    key: Key,
    value: Mapping[str, int],
    *,
    measured: Mapping[str, Any] | None = None,
    device_kind: str | None = None,
    folder: Path | None = None,
) -> Path:
    """Writes an entry, in the place of one with the same kernel and key; other entries stay.

    Args:
      measured: how good it was; for readers only.
      device_kind: as JAX names the device; None: the one that programs are now made for.
      folder: what holds the devices' folders; None: `FOLDER`.

    Returns:
      The file.

    Raises:
      ValueError: there is a damaged file; it is left alone.
    """
    device_kind = device_kind or current_device()
    path = _path(folder or FOLDER, device_kind, op)
    new = {"kernel": kernel, "key": dict(key), "value": dict(value), "measured": dict(measured or {})}
    kept = [entry for entry in _read(path) if (entry["kernel"], entry["key"]) != (kernel, new["key"])]
    entries = sorted([*kept, new], key=lambda entry: (entry["kernel"], _order(entry["key"])))
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    head = f'  "op": {json.dumps(op)},\n  "device": {json.dumps(device_kind)},\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{head}  "entries": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    _read.cache_clear()
    return path


@contextlib.contextmanager
def trying(op: str, **values: Mapping[str, int] | None) -> Iterator[Trial]:
    """Within it, lookups of this thread get these values (by kernel) instead of the recorded ones.

    A function that was traced before keeps what it was traced with: forget it with `jax.clear_caches()`.
    """
    trial = Trial(op, values)
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        _trial.reset(token)


@contextlib.contextmanager
def device(kind: str) -> Iterator[None]:
    """Within it, lookups of this thread are for this kind of device. As `trying`, it does not reach what is traced."""
    token = _device.set(kind)
    try:
        yield
    finally:
        _device.reset(token)


def current_device() -> str:
    """The kind of device that a program traced now is for.

    That of `device`; else of the mesh in use, which a compilation for a device that is not there sets; else of the
    default device.
    """
    kind = _device.get()
    if kind is None:
        abstract = jax.sharding.get_abstract_mesh().abstract_device
        kind = abstract.device_kind if abstract else None
    if kind is None:
        default = jax.config.values["jax_default_device"]
        kind = getattr(default, "device_kind", None) or jax.devices()[0].device_kind
    return kind


def _path(folder: Path, device_kind: str, op: str) -> Path:
    """Where the entries of an operation on a device are: "NVIDIA H200" has the folder nvidia-h200."""
    return folder / re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") / f"{op}.json"


@functools.cache
def _read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file; none if there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f'{path} has no list "entries"')
    for entry in entries:
        if not _is_entry(entry):
            raise ValueError(f'{path} holds {entry!r}: an entry has a "kernel", a "key" and a "value" of integers')
    return entries


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("kernel"), str):
        return False
    key, value = entry.get("key"), entry.get("value")
    return (
        isinstance(key, dict)
        and isinstance(value, dict)
        and all(isinstance(x, int | str) for x in key.values())
        and all(type(key[size]) is int and key[size] > 0 for size in SIZES if size in key)
        and all(type(x) is int for x in value.values())
    )


def _fits(measured: Key, asked: Key) -> bool:
    return all(name in asked and (name in SIZES or asked[name] == value) for name, value in measured.items())


def _distance(measured: Key, asked: Key) -> tuple[bool, float]:
    """How far the sizes are apart; a size that is smaller than asked counts as further than any that is not."""
    ratios = [math.log2(int(measured[size]) / max(1, int(asked[size]))) for size in SIZES if size in measured]
    return any(ratio < 0 for ratio in ratios), sum(abs(ratio) for ratio in ratios)


def _order(key: Key) -> list[tuple[str, bool, int, str]]:
    """Sorts keys whose values are of both kinds."""
    return [
        (name, isinstance(value, str), 0 if isinstance(value, str) else value, str(value))
        for name, value in sorted(key.items())
    ]
