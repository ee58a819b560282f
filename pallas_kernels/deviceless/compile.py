"""Compiling a function for a device by name."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.deviceless.compilers import mesh_for
from pallas_kernels.deviceless.devices import Gpu, get_device
from pallas_kernels.deviceless.program import Program, read_program


class CompileError(RuntimeError):
    """The compiler refused a program; the message has its own words."""


class RegisterSpillError(CompileError):
    """A kernel needs more registers than there are, and would keep values in memory."""


class MemoryOverflowError(CompileError):
    """A kernel needs more shared memory (GPU) or VMEM (TPU) than there is, or the program more device memory."""


def compile_for(
    device: str,
    function: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, str | bool] | None = None,
    allow_spills: bool = False,
) -> Program:
    """Compiles `function(*args)` for a device that this machine need not have.

    Args:
      device: a key of `DEVICES`.
      args: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes are looked at.
      donate_argnums: as for `jax.jit`.
      compiler_options: more of XLA's options, by name.
      allow_spills: compile GPU kernels that spill registers too.

    Raises:
      ValueError: unknown device.
      CompilerMissingError: its compiler is not installed.
      NotImplementedError: Pallas cannot lower an operation for this device.
      CompileError: the compiler cannot compile it, see the subclasses.
    """
    gpu = isinstance(get_device(device), Gpu)
    mesh = mesh_for(device)
    everywhere = NamedSharding(mesh, PartitionSpec())
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args)
    with (
        tempfile.TemporaryDirectory(prefix="deviceless-") as dump,
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        _nothing_persists(),
    ):
        options: dict[str, str | bool] = dict(compiler_options or {})
        if gpu:
            options["xla_dump_to"] = dump
            options["xla_gpu_fail_ptx_compilation_on_register_spilling"] = not allow_spills
        begin = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*abstract)
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise _clear(error, device, Path(dump)) from error
        return read_program(device, compiled, Path(dump), time.perf_counter() - begin)


@contextlib.contextmanager
def _nothing_persists() -> Iterator[None]:
    """Keeps programs out of the compilation cache: they could not be loaded from there without the device."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _clear(error: Exception, device: str, dump: Path) -> CompileError:
    message = str(error)
    if "register spilling" in message:
        return RegisterSpillError(
            f"a kernel spills registers on {device}; the last one compiled was {_last_kernel(dump)} ({message}); "
            "allow_spills=True compiles it"
        )
    if message.startswith("RESOURCE_EXHAUSTED"):
        return MemoryOverflowError(f"too much memory for {device}: {message}")
    return CompileError(f"cannot compile for {device}: {message}")


def _last_kernel(dump: Path) -> str:
    """The kernel whose PTX was written last: XLA does not say which one it gave up on."""
    files = sorted(dump.glob("*.ptx"), key=lambda file: file.stat().st_mtime_ns)
    names = [name for file in files for name in re.findall(r"\.entry (\w+)", file.read_text())]
    return names[-1] if names else "unknown"
