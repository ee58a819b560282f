"""How long kernels take, beside what the device could do: attention, the write of keys and values, the norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device.worker import Context, Report
from pallas_kernels import timing, write_kv
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.timing import Program, measure

THREADS = 8  # compilations side by side

Prepare = Callable[[], Callable[[], Mapping[str, Any]]]


def run(report: Report, context: Context) -> None:
    items = attention_items(context)
    for tokens in (1,) if context.tiny else (1, 64, 2048):
        items[f"write_kv {tokens}"] = partial(small, writes, tokens, context)
        items[f"add_rms_norm {tokens}"] = partial(small, norms, tokens, context)
    report.run_prepared(items, threads=2 if context.tiny else THREADS)


def attention_items(context: Context) -> dict[str, Prepare]:
    """What times each shape of attention."""
    return {name: partial(attention, case, context) for name, case in shapes(context).items()}


def shapes(context: Context) -> dict[str, Case]:
    return timing.TINY_SHAPES if context.tiny else timing.SHAPES


def attention(case: Case, context: Context) -> Callable[[], Mapping[str, Any]]:
    """Compiles a program of calls; the answer times it."""
    inputs = timing.attention(case)
    program = inputs.program(inputs.lower(**context.kernel_options()).compile())

    def time() -> Mapping[str, Any]:
        seconds = measure({"": program}, rounds=rounds(context))[""]
        bound_by = "copy" if all(q_len <= 1 for q_len, _ in case.rows) else "matmul"
        if bound_by == "copy":
            rate = timing.attention_bytes(case) / seconds
            ceiling = context.fact("copy", "bytes_per_s")
        else:
            rate = timing.attention_flops(case) / seconds
            ceiling = context.fact("matmul", "flops_per_s")
        return {"us": 1e6 * seconds, "rate": rate, "of": bound_by, "share": rate / ceiling if ceiling else None}

    return time


def small(make: Callable[[int, int, Mapping[str, Any]], Program], tokens: int, context: Context) -> Callable[[], Any]:
    """Compiles a small operation as it is and in plain XLA, many calls each; the answer times both."""
    calls = 2 if context.tiny else 32
    kinds = {"us": context.kernel_options(), "xla_us": {"implementation": "xla"}}
    programs = {name: make(tokens, calls, options) for name, options in kinds.items()}
    return lambda: {name: 1e6 * value for name, value in measure(programs, rounds=rounds(context)).items()}


def writes(tokens: int, calls: int, options: Mapping[str, Any]) -> Program:
    """Writes of a Llama-3.1-8B, each of other numbers, into the layers of a pool that is handed from call to call."""
    layers, pages, page_size = 2, 2 + tokens // 16, 16
    draw = jax.jit(lambda i: jax.random.normal(jax.random.key(i), (tokens, 8, 6, 128), jnp.bfloat16))
    products = [draw(i) for i in range(calls)]
    angles = jax.random.uniform(jax.random.key(1), (tokens, 64))
    slots = page_size + jax.random.permutation(jax.random.key(2), (pages - 1) * page_size)[:tokens].astype(jnp.int32)
    held = [jnp.zeros((layers, pages, page_size, 16, 128), jnp.bfloat16)]

    def chain(pool: jax.Array, products: list[jax.Array], angles: jax.Array, slots: jax.Array) -> tuple[Any, ...]:
        queries = []
        for i, qkv in enumerate(products):
            q, pool = write_kv(qkv, angles, angles, pool, slots, jnp.array([i % layers], jnp.int32), **options)
            queries.append(q)
        return pool, queries

    compiled = jax.jit(chain, donate_argnums=0).lower(*held, products, angles, slots).compile()

    def run() -> jax.Array:
        held[0], queries = compiled(held[0], products, angles, slots)
        return queries[-1]

    return Program(run, calls)


def norms(tokens: int, calls: int, options: Mapping[str, Any]) -> Program:
    """Residual adds and norms of a Llama-3.1-8B, each of the one before."""
    from pallas_kernels.add_rms_norm import add_rms_norm

    x, residual = (jax.random.normal(jax.random.key(i), (tokens, 4096), jnp.bfloat16) for i in range(2))
    weight = jnp.ones(4096, jnp.bfloat16)

    def chain(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(calls):
            # XLA would fuse its own version of all calls into one kernel, which no model lets it do.
            residual, x = jax.lax.optimization_barrier(add_rms_norm(x, residual, weight, eps=1e-5, **options))
        return residual, x

    return Program(partial(jax.jit(chain).lower(x, residual, weight).compile(), x, residual, weight), calls)


def rounds(context: Context) -> int:
    return 1 if context.tiny else 7
