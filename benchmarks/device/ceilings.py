"""What the device is, and what it can do at most: copying, reading, multiplying."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from benchmarks.device.worker import Context, Report
from pallas_kernels.timing import Program, measure

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "torch", "transformers")


def run(report: Report, context: Context) -> None:
    report.run("device", device)
    size = (1 << 22) if context.tiny else (1 << 29)
    report.run("copy", partial(copy_rate, size))
    report.run("matmul", partial(matmul_rate, 256 if context.tiny else 8192))


def device() -> dict[str, Any]:
    """Kind, driver, memory in GiB, versions."""
    first = jax.devices()[0]
    stats = first.memory_stats() or {}
    gib = {name: stats[name] / 2**30 for name in ("bytes_limit", "bytes_in_use") if name in stats}
    return {
        "kind": first.device_kind,
        "platform": first.platform,
        "count": len(jax.devices()),
        "driver": driver(),
        "memory_gib": {name: round(value, 2) for name, value in gib.items()},
        "versions": record.versions(PACKAGES),
    }


def driver() -> str:
    """Name, driver and memory as NVIDIA's tool tells them; empty without it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def copy_rate(words: int) -> dict[str, float]:
    """Bytes read and written per second by a large copy, and read by a large sum.

    Args:
      words: of 32 bits.
    """
    x = jax.jit(partial(jax.random.bits, shape=(words,)))(jax.random.key(0))
    programs = {
        "copy": _program(jnp.copy, x),
        "flip": _program(lambda x: x ^ 1, x),  # a kernel that copies, where a copy may be the runtime's
        "read": _program(lambda x: jnp.bitwise_xor.reduce(x.reshape(-1, 1 << 10), axis=1), x),
    }
    seconds = measure(programs, rounds=7, sample_seconds=0.02)
    copies = {name: 8 * words / seconds[name] for name in ("copy", "flip")}
    return {
        "bytes_per_s": max(copies.values()),
        "read_bytes_per_s": 4 * words / seconds["read"],
        **{f"{name}_bytes_per_s": rate for name, rate in copies.items()},
    }


def matmul_rate(size: int) -> dict[str, float]:
    """Floating-point operations per second of a large product in bfloat16, on random numbers."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    seconds = measure({"matmul": _program(jnp.matmul, a, b)}, rounds=7, sample_seconds=0.05)["matmul"]
    return {"flops_per_s": 2 * size**3 / seconds}


def _program(function: Callable[..., jax.Array], *arrays: jax.Array) -> Program:
    return Program(partial(jax.jit(function).lower(*arrays).compile(), *arrays))
