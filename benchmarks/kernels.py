"""Times the operations of pallas_kernels on named shapes: `python benchmarks/kernels.py [--ops decode] [--json out]`.

Every variant is timed in turn within each round, so that whatever else the machine does hits all alike; the table
shows medians. One call runs several layers of a pool, one after the other, as a model's step does; times are per layer.
`CPU ms` is processor time of all threads: on a busy machine it says more than the wall clock.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ragged_paged_attention, storage_dtype, write_kv
from pallas_kernels.ragged_paged_attention.cases import BENCHMARKS, Case, make_inputs


def attention(case: Case) -> tuple[Callable, tuple, float]:
    """One program of `case.layers` calls, its arguments, and GFLOP per layer."""
    inputs = make_inputs(case, seed=0, poison=False)
    q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, _ = inputs.arrays

    def layers(q: jax.Array, kv_pages: jax.Array) -> jax.Array:
        for layer in range(case.layers):
            index = jnp.array([layer], jnp.int32)
            q = q + ragged_paged_attention(
                q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, index, **inputs.options
            )
        return q

    pairs = sum(q_len * kv_len - q_len * (q_len - 1) // 2 for q_len, kv_len in case.rows)
    return jax.jit(layers), (q, kv_pages), 4e-9 * pairs * case.heads * case.head_dim


def writes(case: Case, tokens: int) -> tuple[Callable, tuple, float]:
    """One program of `case.layers` writes into a donated pool that is handed from call to call."""
    q, kv_pages, *_ = make_inputs(replace(case, tokens=tokens), seed=0, poison=False).arrays
    qkv = jnp.zeros((tokens, case.kv_heads, case.heads // case.kv_heads + 2, case.head_dim), q.dtype)
    angles = jnp.ones((tokens, case.head_dim // 2), jnp.float32)
    slots = (jnp.arange(tokens, dtype=jnp.int32) * 37) % (case.page_size * (kv_pages.shape[1] - 1)) + case.page_size

    def layers(kv_pages: jax.Array, qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = jnp.zeros((), qkv.dtype)
        for layer in range(case.layers):
            index = jnp.array([layer], jnp.int32)
            q, kv_pages = write_kv(qkv, angles, angles, kv_pages, slots, index)
        return kv_pages, q

    program = jax.jit(layers, donate_argnums=0)
    held = [kv_pages]

    def call(qkv: jax.Array) -> jax.Array:
        held[0], out = program(held[0], qkv)
        return out

    return call, (qkv,), 0.0


def variants(ops: str) -> dict[str, tuple[Callable, tuple, float, int]]:
    """Name -> (program, arguments, GFLOP per layer, layers) of everything whose name contains `ops`."""
    found = {}
    for dtype in ("bfloat16", "float32"):
        for name, case in BENCHMARKS.items():
            case = replace(case, dtype=dtype, pool_dtype=str(storage_dtype(dtype)))
            if ops in f"attention {name} {dtype}":
                found[f"attention {name} {dtype}"] = (*attention(case), case.layers)
        for tokens in (32, 512):
            case = replace(BENCHMARKS["decode_1x256"], dtype=dtype, pool_dtype=str(storage_dtype(dtype)))
            if ops in f"write_kv {tokens} {dtype}":
                found[f"write_kv {tokens} {dtype}"] = (*writes(case, tokens), case.layers)
    return found


def measure(found: dict[str, tuple[Callable, tuple, float, int]], rounds: int) -> list[dict[str, Any]]:
    """Median wall and processor time per layer of each variant, timed in turn."""
    compile_s = {}
    for name, (program, arguments, _, _) in found.items():
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        compile_s[name] = time.perf_counter() - start
    wall: dict[str, list[float]] = {name: [] for name in found}
    processor: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, (program, arguments, _, layers) in found.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(*arguments))
            wall[name].append((time.perf_counter() - start) / layers)
            processor[name].append((time.process_time() - start_cpu) / layers)
    return [
        {
            "name": name,
            "wall_ms": 1e3 * statistics.median(wall[name]),
            "best_ms": 1e3 * min(wall[name]),
            "cpu_ms": 1e3 * statistics.median(processor[name]),
            "gflops": gflop / min(wall[name]) if gflop else None,
            "compile_s": compile_s[name],
        }
        for name, (_, _, gflop, _) in found.items()
    ]


def facts() -> dict[str, str]:
    """Where and on what this ran."""
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="", help="only variants whose name contains this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    results = measure(variants(options.ops), options.rounds)
    print(f"{'per layer':44s} {'median ms':>10s} {'best ms':>9s} {'CPU ms':>8s} {'GFLOP/s':>8s} {'compile s':>9s}")
    for row in results:
        flops = "" if row["gflops"] is None else f"{row['gflops']:.0f}"
        print(
            f"{row['name']:44s} {row['wall_ms']:10.3f} {row['best_ms']:9.3f} {row['cpu_ms']:8.3f} {flops:>8s} "
            f"{row['compile_s']:9.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps({**facts(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
