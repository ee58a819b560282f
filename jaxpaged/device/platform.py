"""Facts about the machine that the defaults depend on."""

from __future__ import annotations

from pathlib import Path

import jax

_CPU_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm


def platform() -> str:
    """ "cpu", "gpu" or "tpu"; starts the JAX backend."""
    return jax.default_backend()


def native_bfloat16() -> bool:
    """Whether matrix products in bfloat16 run in hardware."""
    return platform() != "cpu" or bool(_CPU_BFLOAT16_FLAGS & cpu_flags())


def cpu_flags() -> set[str]:
    """Feature flags of the CPU; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(x.partition(":")[2].split()) for x in lines if x.lower().startswith(("flags", "features"))), set())
