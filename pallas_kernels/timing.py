"""Timing kernels on a device: large inputs made there, programs of many calls, interleaved rounds.

A launch from Python costs more than a small kernel, so a program makes many calls, over layers that together are larger
than any cache.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pool import to_storage
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import Case

_COLD_BYTES = 512 << 20  # several times the last-level cache of any GPU
_FULL_SPEED = (4e12, 4e14)  # bytes/s and FLOP/s of a large GPU, about: only to choose how many calls a program makes
_PROGRAM_SECONDS = 2e-3
_MAX_CALLS = 32


@dataclass(frozen=True)
class Program:
    """Something to time.

    Attributes:
      run: starts it and returns the arrays to wait for.
      calls: of the kernel, in one run.
    """

    run: Callable[[], Any]
    calls: int = 1


def measure(programs: Mapping[str, Program], *, rounds: int = 7, sample_seconds: float = 0.01) -> dict[str, float]:
    """Median seconds per call of each program, all timed in turn within each round.

    Args:
      rounds: samples of each.
      sample_seconds: a sample is as many runs, waited for once, as take about this long.
    """
    repeats = {}
    for name, program in programs.items():
        jax.block_until_ready(program.run())
        start = time.perf_counter()
        jax.block_until_ready(program.run())
        repeats[name] = max(1, min(200, round(sample_seconds / (time.perf_counter() - start))))
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            out = None
            for _ in range(repeats[name]):
                out = program.run()
            jax.block_until_ready(out)
            samples[name].append((time.perf_counter() - start) / (repeats[name] * program.calls))
    return {name: statistics.median(times) for name, times in samples.items()}


def _llama_8b(*rows: tuple[int, int], num_rows: int | None = None) -> Case:
    return Case(rows=rows, num_rows=num_rows, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")


SHAPES: dict[str, Case] = {
    "decode 32 x 4096": _llama_8b(*((1, 4096),) * 32),
    "decode 1 x 4096": _llama_8b((1, 4096)),
    "decode 64 x 1024": _llama_8b(*((1, 1024),) * 64),
    "decode 256 x 1024": _llama_8b(*((1, 1024),) * 256),
    "decode 1 x 32768": _llama_8b((1, 32768)),
    "prefill 1 x 8192": _llama_8b((8192, 8192), num_rows=256),
    "prefill 4 x 2048": _llama_8b(*((2048, 2048),) * 4, num_rows=256),
    "prefill 2048 on 16384": _llama_8b((2048, 16384), num_rows=256),
}
"""What a Llama-3.1-8B asks of its attention; mixed steps are padded to many rows, as an engine's are."""

TINY_SHAPES: dict[str, Case] = {
    "decode 2 x 40": replace(SHAPES["decode 1 x 4096"], rows=((1, 40), (1, 17)), heads=2, kv_heads=1, head_dim=32),
    "prefill 1 x 24": replace(
        SHAPES["prefill 1 x 8192"], rows=((24, 24),), num_rows=2, heads=2, kv_heads=1, head_dim=32
    ),
}
"""The same in small, for where a Pallas kernel is interpreted."""


def attention_bytes(case: Case) -> int:
    """Bytes that a call must read and write: keys and values that any query sees once, queries and outputs."""
    pool = jnp.dtype(case.pool_dtype or case.dtype).itemsize
    tokens = sum(q_len for q_len, _ in case.rows)
    window = case.sliding_window or max((kv_len for _, kv_len in case.rows), default=0)
    keys = sum(min(kv_len, q_len - 1 + window) for q_len, kv_len in case.rows)
    per_token = 2 * case.heads * case.head_dim * jnp.dtype(case.dtype).itemsize
    return keys * 2 * case.kv_heads * case.head_dim * pool + tokens * per_token


def attention_flops(case: Case) -> int:
    """Floating-point operations of the two products, over the pairs of query and key that the mask leaves."""

    def triangle(n: int) -> int:
        """1 + 2 + ... + n."""
        return n * (n + 1) // 2 if n > 0 else 0

    pairs = 0
    for q_len, kv_len in case.rows:
        window = case.sliding_window or kv_len
        # Query i of kv_len sees i keys, but for the i - window that are too far away.
        pairs += triangle(kv_len) - triangle(kv_len - q_len)
        pairs -= triangle(kv_len - window) - triangle(kv_len - q_len - window)
    return 4 * pairs * case.heads * case.head_dim


@dataclass(frozen=True)
class Attention:
    """Inputs of one case on the device.

    Attributes:
      case: with `layers` set to what the calls go through.
      arrays: q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs.
      calls: in a program.
    """

    case: Case
    arrays: tuple[jax.Array, ...]
    calls: int

    def function(self, **options: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """All calls, each over the next layer: (first output, last output).

        The output of one call is the query of the next, so that none can overlap another.

        Args:
          options: of the operation, as `implementation`.
        """

        @jax.jit  # calls of the same function are traced once
        def call(layer: jax.Array, q: jax.Array, *rest: jax.Array) -> jax.Array:
            scale = self.case.head_dim**-0.5
            return ragged_paged_attention(q, *rest, layer, sm_scale=scale, **options)  # pyright: ignore[reportCallIssue]

        def program(q: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
            first = q = call(jnp.zeros(1, jnp.int32), q, *rest)
            for index in range(1, self.calls):
                q = call(jnp.array([index % self.case.layers], jnp.int32), q, *rest)
            return first, q

        return program

    def lower(self, **options: Any) -> jax.stages.Lowered:
        """The program of `function`."""
        return jax.jit(self.function(**options)).lower(*self.arrays)

    def program(self, compiled: jax.stages.Compiled) -> Program:
        """To be timed."""
        return Program(partial(compiled, *self.arrays), self.calls)

    def reference(self) -> jax.Array:
        """What the first call should give."""
        layer = jnp.zeros(1, jnp.int32)
        options = {"sm_scale": self.case.head_dim**-0.5, "implementation": "reference"}
        return jax.jit(partial(ragged_paged_attention, **options))(*self.arrays, layer)


def attention(case: Case, seed: int = 0) -> Attention:
    """Random inputs of a case, made on the device: a pool of gigabytes would take long to draw and send."""
    cold = math.ceil(_COLD_BYTES / attention_bytes(case))
    floor = max(attention_bytes(case) / _FULL_SPEED[0], attention_flops(case) / _FULL_SPEED[1])
    calls = max(2, min(_MAX_CALLS, math.ceil(_PROGRAM_SECONDS / floor)))
    if jax.default_backend() == "cpu":
        cold, calls = 1, 2
    case = replace(case, layers=max(1, min(cold, calls)))
    rng = np.random.default_rng(seed)
    lens = np.array([kv_len for _, kv_len in case.rows], np.int32)
    counts = -(-lens // case.page_size)
    rows = case.num_rows or len(lens)
    table = np.zeros((rows, counts.max()), np.int32)
    pages = np.split(rng.permutation(np.arange(1, 1 + counts.sum(), dtype=np.int32)), np.cumsum(counts)[:-1])
    for row, mine in enumerate(pages):
        table[row, : len(mine)] = mine
    q_lens = np.zeros(rows, np.int32)
    q_lens[: len(lens)] = [q_len for q_len, _ in case.rows]
    key_q, key_pool = jax.random.split(jax.random.key(seed))
    pool_shape = (case.layers, 1 + int(counts.sum()), case.page_size, 2 * case.kv_heads, case.head_dim)
    arrays = (
        _normal(key_q, (int(q_lens.sum()), case.heads, case.head_dim), case.dtype, case.dtype),
        _normal(key_pool, pool_shape, case.dtype, case.pool_dtype or case.dtype),
        jnp.asarray(np.pad(lens, (0, rows - len(lens)))),
        jnp.asarray(table),
        jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        jnp.array([len(lens)], jnp.int32),
    )
    return Attention(case, arrays, calls)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str, stored: str) -> jax.Array:
    return to_storage(jax.random.normal(key, shape, dtype), None, stored)
