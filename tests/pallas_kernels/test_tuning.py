"""The lookup of measured choices, and the tuner that writes them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import timing, tune, tuning

KEY = {"head_dim": 128, "group": 4, "pool_dtype": "bfloat16", "rows": 32}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    return tmp_path


def write(folder: Path, rows: int, **changes: int | str) -> Path:
    key = {**KEY, "rows": rows, **changes}
    return tuning.record("op", "decode", key, {"keys": rows}, device_kind="NVIDIA H200", folder=folder)


def look(rows: int, **changes: int | str) -> int | None:
    with tuning.device("NVIDIA H200"):
        value = tuning.lookup("op", "decode", {**KEY, "rows": rows, **changes})
    return value["keys"] if value else None


def test_the_nearest_size_that_is_not_smaller_is_taken(folder: Path) -> None:
    for rows in (256, 1, 32):
        write(folder, rows)
    assert [look(rows) for rows in (1, 2, 32, 33, 256)] == [1, 32, 32, 256, 256]
    assert look(1000) == 256, "beyond all: the nearest"


def test_other_fields_must_be_equal(folder: Path) -> None:
    write(folder, 32)
    assert look(32) == 32
    assert look(32, head_dim=64) is None
    assert look(32, pool_dtype="int8") is None
    assert look(32, more=1) == 32, "what the entry does not speak of does not matter"
    with tuning.device("NVIDIA H200"):
        assert tuning.lookup("op", "decode", {"rows": 32}) is None
        assert tuning.lookup("op", "prefill", KEY) is None
        assert tuning.lookup("other", "decode", KEY) is None


def test_two_sizes_are_weighed_together(folder: Path) -> None:
    for rows, context in ((32, 1024), (64, 8192), (32, 32768)):
        key = {"rows": rows, "context": context}
        tuning.record("op", "decode", key, {"keys": rows * context}, device_kind="NVIDIA H200", folder=folder)
    assert look(32, context=1000) == 32 * 1024
    assert look(17, context=2048) == 64 * 8192
    assert look(64, context=32768) == 32 * 32768, "smaller in rows, and the nearest of those"


def test_an_unknown_device_has_no_entries(folder: Path) -> None:
    write(folder, 32)
    with tuning.device("NVIDIA H100 80GB HBM3"):
        assert tuning.lookup("op", "decode", KEY) is None


def test_the_device_is_the_default_one_unless_told_otherwise(folder: Path) -> None:
    assert tuning.current_device() == jax.devices()[0].device_kind
    tuning.record("op", "decode", KEY, {"keys": 7})
    assert tuning.lookup("op", "decode", KEY) == {"keys": 7}
    with tuning.device("NVIDIA H200"):
        assert tuning.current_device() == "NVIDIA H200"
        assert tuning.lookup("op", "decode", KEY) is None


def test_a_mesh_of_absent_devices_names_them() -> None:
    absent = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=absent)
    with jax.sharding.use_abstract_mesh(mesh):
        assert tuning.current_device() == "NVIDIA H200"


def test_recording_replaces_the_same_key_and_keeps_the_others(folder: Path) -> None:
    path = write(folder, 256)
    write(folder, 32)
    first = path.read_text()
    tuning.record("op", "decode", KEY, {"keys": 99}, measured={"us": 1.5}, device_kind="NVIDIA H200", folder=folder)
    assert look(32) == 99 and look(256) == 256
    write(folder, 32)
    write(folder, 256)
    assert path.read_text() == first, "the order of writing does not matter"
    assert path == folder / "nvidia-h200" / "op.json"
    assert json.loads(first)["device"] == "NVIDIA H200"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"entries": 3}',
        '{"entries": [{}]}',
        '{"entries": [{"kernel": "a", "key": {}, "value": {"b": 0.5}}]}',
    ],
)
def test_a_damaged_file_is_named_and_left_alone(folder: Path, text: str) -> None:
    path = folder / "nvidia-h200" / "op.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=r"nvidia-h200/op\.json"):
        look(32)
    with pytest.raises(ValueError, match=r"nvidia-h200/op\.json"):
        write(folder, 1)
    assert path.read_text() == text


def test_values_can_be_tried_and_the_keys_asked_for_are_seen(folder: Path) -> None:
    write(folder, 32)
    with tuning.device("NVIDIA H200"), tuning.trying("op", decode={"keys": 5}, other=None) as trial:
        assert tuning.lookup("op", "decode", KEY) == {"keys": 5}
        assert tuning.lookup("op", "other", {"rows": 1}) is None
        assert tuning.lookup("another", "decode", KEY) is None
        assert tuning.lookup("op", "other", {"rows": 2}, default={"keys": 9}) == {"keys": 9}
    assert trial.asked == {"decode": KEY, "other": {"rows": 2}}
    assert trial.defaults == {"other": {"keys": 9}}
    assert look(32) == 32


def test_the_default_is_for_want_of_an_entry(folder: Path) -> None:
    write(folder, 32)
    with tuning.device("NVIDIA H200"):
        assert tuning.lookup("op", "decode", KEY, default={"keys": 9}) == {"keys": 32}
        assert tuning.lookup("op", "prefill", KEY, default={"keys": 9}) == {"keys": 9}


START = {"rows": 16, "keys": 64, "splits": 1, "num_warps": 4, "num_stages": 2}


@functools.partial(jax.jit, static_argnames=("implementation", "interpret", "sm_scale"))
def fake_attention(q: jax.Array, *arrays: Any, implementation: str, **options: Any) -> jax.Array:
    """Looks its tiles up as the kernel does; slow with few keys, wrong with 8 warps, not there with 2."""
    if implementation == "reference":
        return q
    tiles = tuning.lookup(tune.OP, "decode", {"rows": len(q)}, default=START)
    if tiles["num_warps"] == 2:
        raise NotImplementedError("two warps")
    nothing = q[0, 0, 0].astype(jnp.float32)
    for _ in range(512 // tiles["keys"]):
        nothing = jnp.sin(nothing)
    return q + ((tiles["num_warps"] == 8) + 0 * nothing).astype(q.dtype)


def fake_times(programs: Mapping[str, timing.Program], **_: Any) -> dict[str, float]:
    """A second for every sine that a program takes: the same whatever else the machine does."""
    compiled = {name: getattr(program.run, "func") for name, program in programs.items()}  # noqa: B009
    return {name: float(program.as_text().count(" sine(")) for name, program in compiled.items()}


def test_the_tuner_finds_the_best_that_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ragged_paged_attention", fake_attention)
    monkeypatch.setattr(timing, "measure", fake_times)
    monkeypatch.setitem(tune.FIELDS, "decode", {"keys": (32, 256), "num_warps": (2, 8)})
    said: list[str] = []
    cases = {"decode": timing.TINY_SHAPES["decode 2 x 40"]}
    ((job, results),) = tune.tune(cases, budget=60, folder=folder, say=said.append)
    assert (job.kernel, job.key, job.start) == ("decode", {"rows": 2}, START)
    assert results[0].tiles == {**START, "keys": 256}
    assert {"keys": 256, "num_warps": 4}.items() <= (tuning.lookup(tune.OP, "decode", {"rows": 2}) or {}).items()
    text = "\n".join(said)
    assert "wrong by 1" in text and "NotImplementedError: two warps" in text and "(heuristic)" in text
    assert all(result.tiles["num_warps"] == 4 for result in results)


def test_neighbours_differ_in_one_or_two_fields() -> None:
    found = tune.near("decode", START)
    assert START not in found and all(set(tiles) == set(START) for tiles in found)
    changes = [{name for name in START if tiles[name] != START[name]} for tiles in found]
    assert {len(change) for change in changes} == {1, 2}
    assert {**START, "splits": 2, "num_stages": 3} in found
    assert not [tiles for tiles in found if tiles["splits"] < 1 or tiles["rows"] != 16]


@pytest.mark.parametrize(
    ("implementation", "kernels"), [("gpu", ["decode", "prefill"]), ("tpu", ["tpu_decode", "tpu_prefill"])]
)
def test_kernels_look_up_what_is_tuned(implementation: str, kernels: list[str]) -> None:
    jobs = tune.jobs(timing.TINY_SHAPES, interpret=True, implementation=implementation)
    assert sorted(job.kernel for job in jobs) == kernels
    for job in jobs:
        assert set(tune.FIELDS[job.kernel]) <= set(job.start)
        assert any(size in job.key for size in tuning.SIZES)
