"""The roofline: its counts against XLA's, the arrays' sizes and the compiled step, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.device import roofline
from benchmarks.device.work import SAMPLE_LAUNCHES, Work, step_rows, work
from jaxpaged.device.abstract_step import abstract_step, weight_bytes
from pallas_kernels import ragged_paged_attention, timing
from pallas_kernels.deviceless import compile_for
from pallas_kernels.ragged_paged_attention.cases import Case
from tests.compilers import needs_compilers

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2"},  # biases
    "qwen3": {**LLAMA, "model_type": "qwen3", "tie_word_embeddings": True},
    "gemma3": {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 16},
}
DECODE, MIXED = step_rows(32, 32), step_rows(31, 32, 97)


def total(step: Work, field: str) -> int:
    return sum(op.count * getattr(op, field) for op in step.ops())


@pytest.mark.parametrize("model, rows", [("gemma3", DECODE), ("llama", MIXED)])
def test_flops_are_those_that_xla_counts(model: str, rows: list[tuple[int, int]]) -> None:
    """Attention apart, of whose loops XLA counts one round each; what is no product is a few % more."""
    step = work(MODELS[model], rows)
    tokens = None if rows is DECODE else step.tokens
    options: dict[str, Any] = {"platform": "cpu", "pool_bytes": 1 << 20, "max_num_seqs": 32}
    program = abstract_step(MODELS[model], rows=32, tokens=tokens, **options).forward
    counted = xla_flops(program.function, *program.args)
    counted -= sum(attention_round(step, program.args[1], window) for window in step.config.sliding_windows)
    products = sum(op.count * op.flops for op in step.ops() if op.kind == "product")
    assert 1 <= counted / products < 1.03


def xla_flops(function: Callable[..., Any], *args: Any) -> float:
    counted = jax.jit(function).lower(*args).cost_analysis()
    assert counted is not None
    return counted["flops"]


def attention_round(step: Work, pool: Any, window: int | None) -> float:
    """What XLA counts of a layer's attention."""
    config, rows = step.config, len(step.rows)
    attend = partial(ragged_paged_attention, sm_scale=1.0, sliding_window=window, implementation="xla")
    q = jax.ShapeDtypeStruct((step.tokens, config.num_heads, config.head_dim), step.dtype)
    integers = [(rows,), (rows, step.max_pages), (rows + 1,), (1,), (1,)]
    return xla_flops(attend, q, pool, *(jax.ShapeDtypeStruct(shape, "int32") for shape in integers))


def test_pages_are_as_large_as_they_are_said_to_be() -> None:
    few, many = (total(work(LLAMA, DECODE, page_size=size), "activations") for size in (32, 4))
    assert many - few == 2 * 4 * 32 * (64 // 4 - 64 // 32)


@pytest.mark.parametrize("model", MODELS)
def test_every_weight_is_read_once(model: str) -> None:
    """The embedding for a row per token only, unless it is the head as well."""
    step = work(MODELS[model], DECODE)
    table = weight_bytes(step.params["embed"])
    rows_read = 32 * 512 * 2
    unread = 0 if step.config.tie_word_embeddings else table
    assert total(step, "weights") == weight_bytes(step.params) - unread + rows_read


def test_keys_and_values_are_read_once_and_written_once() -> None:
    """Those that a window hides are not."""
    pool = 32 * 32 * 2 * 2 * 64 * 2  # rows, keys, K and V, heads, dims, bytes
    written = 32 * 2 * 2 * 64 * 2
    assert total(work(MODELS["llama"], DECODE), "cache") == 2 * (pool + written)
    assert total(work(MODELS["gemma3"], DECODE), "cache") == 5 * (pool // 2 + written) + pool + written
    narrow = work(MODELS["llama"], DECODE, cache_dtype="int8")
    assert total(narrow, "cache") == (pool + written)
    assert narrow.memory == weight_bytes(narrow.params) + 2 * pool // 2


@pytest.mark.parametrize("window", [None, 1, 5, 12, 40])
def test_attention_counts_what_the_mask_leaves(window: int | None) -> None:
    rows = ((1, 9), (4, 12), (12, 12))
    seen = [
        (np.tril(np.ones((keys, keys))) - np.tril(np.ones((keys, keys)), -(window or keys)))[keys - queries :]
        for queries, keys in rows
    ]
    case = Case(rows=rows, heads=4, kv_heads=2, head_dim=8, sliding_window=window)
    assert timing.attention_flops(case) == 4 * sum(mask.sum() for mask in seen) * 4 * 8
    keys = sum(mask.any(0).sum() for mask in seen)
    assert timing.attention_bytes(case) == 4 * (keys * 2 * 2 * 8 + 17 * 2 * 4 * 8)


@needs_compilers
@pytest.mark.parametrize(
    "rows", [step_rows(64, 32), pytest.param(step_rows(63, 32, 193), marks=pytest.mark.slow)], ids=["decode", "mixed"]
)
def test_launches_are_those_of_the_compiled_step(rows: list[tuple[int, int]]) -> None:
    step = work(LLAMA, rows)
    tokens = None if len(rows) == step.tokens else step.tokens
    program = abstract_step(LLAMA, rows=64, tokens=tokens, pool_bytes=1 << 26).forward
    compiled = compile_for(
        "h200",
        program.function,
        *program.args,
        donate_argnums=program.donate_argnums,
        compiler_options=program.compiler_options,
    )
    assert total(step, "launches") - SAMPLE_LAUNCHES == pytest.approx(len(compiled.launches), abs=2)
    assert sum(op.count * op.launches for op in step.ops()[1:-3]) == 2 * (9 if tokens is None else 10)


def test_time_follows_what_the_device_can_do() -> None:
    step = work(LLAMA, step_rows(64, 32))
    limits = roofline.ceilings("h200")
    slow, fast = (limits._replace(bandwidth=limits.bandwidth * by, flops=limits.flops * by) for by in (1, 2))
    assert roofline.predict(step, fast)["floor_ms"] == pytest.approx(roofline.predict(step, slow)["floor_ms"] / 2)
    found = roofline.predict(step, limits)
    assert found["ms"] > found["floor_ms"] + 1e3 * found["launches"] * roofline.LAUNCH_SECONDS
    assert found["tokens_per_s"] == pytest.approx(64e3 / found["ms"])
    assert found["fits"] and not roofline.predict(step, limits._replace(memory=step.memory))["fits"]
    chunk = roofline.predict(work(LLAMA, step_rows(1, 32, 1 << 16)), limits)["ops"]
    bounds = {row["op"]: row["bound_by"] for row in chunk}
    assert bounds["down"] == "products" and bounds["activation"] == "memory" and bounds["head"] == "launches"
    single = replace(step, dtype="float32")
    assert roofline.predict(single, limits)["ms"] > found["ms"]


def test_a_device_without_ceilings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'v6e'.*h200"):
        roofline.ceilings("v6e")


def test_the_command_prints_a_table_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "config.json", tmp_path / "roofline.json"
    config.write_text(json.dumps(LLAMA))
    roofline.main(["--model", str(config), "--device", "h200", "--rows", "8", "--context", "64", "--json", str(out)])
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "| gate_up " in text and "| config.json" in text
    (step,) = found["steps"]
    assert sum(row["us"] for row in step["ops"]) == pytest.approx(1e3 * step["ms"])
    assert [row["rows"] for row in found["results"]] == [*roofline.CURVE]
    assert found["settings"]["assumed"]["efficiency"].keys() == {"product", "attend", "other"}
