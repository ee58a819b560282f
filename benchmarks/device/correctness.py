"""Every kernel against the reference on the device: the named cases, with poisoned pages, and pools beyond 2^31."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.pools import arbitrary_pool
from benchmarks.device.worker import Context, Report
from pallas_kernels import ragged_paged_attention, write_kv
from pallas_kernels.pool import to_float32
from pallas_kernels.ragged_paged_attention.cases import CASES, Case, make_inputs

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
TINY = ("many_queries_in_a_decode_shape",)
THREADS = 8  # compilations side by side

Check = Callable[[], Mapping[str, Any]]


def run(report: Report, context: Context) -> None:
    options = context.kernel_options()
    checks: dict[str, Callable[[], Check]] = {}
    for name, case in CASES.items():
        if not context.tiny or name in TINY:
            checks[f"attention {name}"] = partial(attention, case, zlib.crc32(name.encode()), options)
    for name, shape in _some(WRITES, context).items():
        checks[f"write_kv {name}"] = partial(writes, options, **shape)
    for name, shape in _some(NORMS, context).items():
        checks[f"add_rms_norm {name}"] = partial(norms, options, **shape)
    if not context.tiny:
        checks["attention of a large pool"] = partial(large_attention, options)
        checks["write_kv to a large pool"] = partial(large_write, options)
    report.run_prepared(checks, threads=2 if context.tiny else THREADS)


def _some(shapes: dict[str, dict[str, Any]], context: Context) -> dict[str, dict[str, Any]]:
    return dict(list(shapes.items())[: 1 if context.tiny else None])


def attention(case: Case, seed: int, options: Mapping[str, Any]) -> Check:
    """Compiles one case; the answer runs it."""
    inputs = make_inputs(case, seed)
    want, got = (
        jax.jit(partial(ragged_paged_attention, **inputs.options, **choice)).lower(*inputs.arrays).compile()
        for choice in ({"implementation": "reference"}, options)
    )
    owned = sum(q_len for q_len, _ in case.rows)

    def check() -> Mapping[str, Any]:
        result, out = (np.asarray(program(*inputs.arrays), np.float32) for program in (want, got))
        row = compare([out], [result], case.dtype)
        if out[owned:].any():
            row |= {"ok": False, "why": "tokens that no row owns are not zero"}
        return row

    return check


WRITES: dict[str, dict[str, Any]] = {
    "1 token": {"tokens": 1},
    "17 tokens": {"tokens": 17},
    "2048 tokens": {"tokens": 2048},
    "part of the dims": {"tokens": 33, "rotary": 32},
    "no rotation": {"tokens": 33, "rotary": 0},
    "float32, head dim 80": {"tokens": 33, "dtype": "float32", "head_dim": 80},
    "float16, one head each": {"tokens": 33, "dtype": "float16", "group": 1},
    "float8 pool": {"tokens": 33, "pool_dtype": "float8_e4m3fn", "scales": (0.7, 1.5)},
    "int8 pool": {"tokens": 33, "pool_dtype": "int8", "scales": (0.05, 0.02)},
    "bits of bfloat16": {"tokens": 33, "pool_dtype": "uint16"},
}


def writes(
    options: Mapping[str, Any],
    *,
    tokens: int,
    dtype: str = "bfloat16",
    pool_dtype: str | None = None,
    head_dim: int = 128,
    rotary: int | None = None,
    group: int = 4,
    scales: tuple[float, float] | None = None,
) -> Check:
    """Compiles one write; the answer runs it. The last tokens are padding, where there are many."""
    rng = np.random.default_rng(tokens)
    kv_heads, page_size, layers = 2, 16, 2
    pages = 3 + tokens // page_size
    live = tokens - tokens // 8
    slots = np.zeros(tokens, np.int32)
    slots[:live] = page_size + rng.permutation(np.arange((pages - 1) * page_size))[:live]
    half = (head_dim if rotary is None else rotary) // 2
    angles = rng.uniform(0, 6, (tokens, half)).astype(np.float32)
    pool = jnp.asarray(rng.standard_normal((layers, pages, page_size, 2 * kv_heads, head_dim), np.float32))
    arrays = (
        jnp.asarray(rng.standard_normal((tokens, kv_heads, group + 2, head_dim), np.float32)).astype(dtype),
        jnp.cos(angles),
        jnp.sin(angles),
        pool.astype(pool_dtype or dtype),
        jnp.asarray(slots),
        jnp.array([1], jnp.int32),
    )
    more = {"k_scale": scales[0], "v_scale": scales[1]} if scales else {}
    want, got = (
        jax.jit(partial(write_kv, **more, **choice)).lower(*arrays).compile()
        for choice in ({"implementation": "reference"}, options)
    )

    def check() -> Mapping[str, Any]:
        (q, pool), (wanted_q, wanted_pool) = got(*arrays), want(*arrays)
        pools = [np.asarray(to_float32(x)) for x in (pool, wanted_pool)]
        pools = [np.concatenate([x[:1].ravel(), x[1:, 1:].ravel()]) for x in pools]  # the written scratch page left out
        row = compare([np.asarray(q[:live], np.float32)], [np.asarray(wanted_q[:live], np.float32)], dtype)
        if scales:  # a quotient on the edge may round either way in a coarse dtype: by a step, and seldom
            differ = float(np.mean(pools[0] != pools[1]))
            near = np.allclose(*pools, rtol=0.13, atol=1.0 if pool_dtype == "int8" else 0.01)
            good = near and differ < 1e-3
        else:
            differ = float(np.max(np.abs(pools[0] - pools[1])))
            good = differ <= 4 * TOLERANCE[dtype]
        return row if good else row | {"ok": False, "why": f"the pool differs: {differ:.3g}"}

    return check


NORMS: dict[str, dict[str, Any]] = {
    "1 token": {"tokens": 1},
    "17 tokens": {"tokens": 17},
    "2048 tokens": {"tokens": 2048},
    "float32, 96 dims, offset 1": {"tokens": 33, "dims": 96, "dtype": "float32", "offset": 1.0},
    "5120 dims": {"tokens": 33, "dims": 5120},
    "float16": {"tokens": 33, "dtype": "float16"},
}


def norms(
    options: Mapping[str, Any], *, tokens: int, dims: int = 4096, dtype: str = "bfloat16", offset: float = 0.0
) -> Check:
    """Compiles one norm; the answer runs it."""
    from pallas_kernels.add_rms_norm import add_rms_norm

    keys = jax.random.split(jax.random.key(tokens), 4)
    x, delta = (jax.random.normal(key, (tokens, dims), dtype) for key in keys[:2])
    weight, own = (jax.random.normal(key, (dims,), dtype) for key in keys[2:])
    arrays = (x, delta, weight, own) if offset else (x, delta, weight)  # as Gemma has it

    def compiled(choice: Mapping[str, Any]) -> jax.stages.Compiled:
        def norm(x: jax.Array, delta: jax.Array, weight: jax.Array, own: jax.Array | None = None) -> Any:
            return add_rms_norm(x, delta, weight, eps=1e-5, offset=offset, delta_weight=own, **choice)

        return jax.jit(norm).lower(*arrays).compile()

    want, got = compiled({"implementation": "reference"}), compiled(options)

    def check() -> Mapping[str, Any]:
        outs, wanted = ([np.asarray(y, np.float32) for y in f(*arrays)] for f in (got, want))
        return compare(outs, wanted, dtype)

    return check


# 3 * 2^31 numbers: indices of its elements do not fit in 32 bits.
LARGE = (3, 1 << 16, 16, 16, 128)


def large_attention(options: Mapping[str, Any]) -> Check:
    """Attention over the last pages of the last layer of a large pool, against a pool of these pages only."""
    case = replace(CASES["decode"], rows=((1, 300), (1, 17), (1, 1), (1, 160)), tokens=4, num_rows=4)
    case = replace(case, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", num_pages=64)
    inputs = make_inputs(case, 0, poison=False)
    q, _, kv_lens, page_indices, cu_q_lens, num_seqs, _ = inputs.arrays
    last = jnp.array([2], jnp.int32)

    def check() -> Mapping[str, Any]:
        pool = arbitrary_pool(LARGE, "bfloat16")
        offset = pool.shape[1] - 64
        rest = (cu_q_lens, num_seqs)
        got = ragged_paged_attention(q, pool, kv_lens, page_indices + offset, *rest, last, **inputs.options, **options)
        small = pool[2:, offset:]
        want = ragged_paged_attention(
            q, small, kv_lens, page_indices, *rest, last - 2, **inputs.options, implementation="reference"
        )
        return compare([np.asarray(got, np.float32)], [np.asarray(want, np.float32)], "bfloat16")

    return check


def large_write(options: Mapping[str, Any]) -> Check:
    """A write into the last page of a large pool."""

    def check() -> Mapping[str, Any]:
        qkv = jax.random.normal(jax.random.key(0), (16, 8, 6, 128), jnp.bfloat16)
        none = jnp.zeros((16, 0), jnp.float32)
        slots = (1 << 20) - 16 + jnp.arange(16, dtype=jnp.int32)
        write = jax.jit(partial(write_kv, **options), donate_argnums=3)
        _, pool = write(qkv, none, none, arbitrary_pool(LARGE, "bfloat16"), slots, jnp.array([2], jnp.int32))
        got, before = pool[2, -1], pool[2, -2]
        untouched = bool(jnp.all(before == arbitrary_pool(LARGE, "bfloat16")[2, -2]))
        want = jnp.stack([qkv[:, :, -2], qkv[:, :, -1]], axis=2).reshape(16, 16, 128)
        row = compare([np.asarray(got, np.float32)], [np.asarray(want, np.float32)], "bfloat16")
        return row if untouched else row | {"ok": False, "why": "another page changed"}

    return check


def compare(got: list[np.ndarray], want: list[np.ndarray], dtype: str) -> dict[str, Any]:
    """Whether arrays agree within the dtype's tolerance, and the largest difference relative to the whole."""
    tolerance = TOLERANCE[dtype]
    ok = all(np.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in zip(got, want, strict=True))
    worst = max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in zip(got, want, strict=True))
    if ok:
        return {"ok": True, "relative_error": worst}
    return {"ok": False, "why": f"differs by {worst:.2g}" if np.isfinite(worst) else "NaN"}
