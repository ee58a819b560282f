"""Compiling a function for a device by name."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.deviceless.compilers import mesh_for, ptxas
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
    row_major: Sequence[int] = (),
    may_spill: Sequence[str] = (),
) -> Program:
    """Compiles `function(*args)` for a device that this machine need not have.

    Args:
      device: a key of `DEVICES`.
      args: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes are looked at.
      donate_argnums: as for `jax.jit`.
      compiler_options: more of XLA's options, by name.
      row_major: the arguments that are held in row-major order, as `jax.experimental.layout.Format` does it, and so are
        results of their shape; the others are in the order that XLA prefers for their shape.
      may_spill: the beginnings of names of GPU kernels that may spill registers.

    Raises:
      ValueError: unknown device.
      CompilerMissingError: its compiler is not installed.
      NotImplementedError: Pallas cannot lower an operation for this device.
      CompileError: the compiler cannot compile it, see the subclasses.
    """
    mesh = mesh_for(device)
    abstract = [_place(arg, mesh, row_major=i in row_major) for i, arg in enumerate(args)]
    fixed = [(x.shape, x.dtype) for i in row_major for x in jax.tree.leaves(args[i])]
    options: dict[str, str | bool] = dict(compiler_options or {})
    begin = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _nothing_persists():
        results = jax.eval_shape(function, *abstract) if fixed else None
        formats = jax.tree.map(lambda x: _format(x, mesh, row_major=(x.shape, x.dtype) in fixed), results)
        lowered = jax.jit(function, donate_argnums=donate_argnums, out_shardings=formats).lower(*abstract)
        try:
            if not isinstance(get_device(device), Gpu):
                return read_program(device, lowered.compile(options), begin)
            return _compile_gpu(device, lowered, options, tuple(may_spill), begin)
        except jax.errors.JaxRuntimeError as error:
            kind = MemoryOverflowError if str(error).startswith("RESOURCE_EXHAUSTED") else CompileError
            raise kind(f"cannot compile for {device}: {error}") from error


def _place(tree: Any, mesh: Mesh, *, row_major: bool) -> Any:
    """The shapes and dtypes of a pytree, on the device."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_format(x, mesh, row_major=row_major)), tree
    )


def _format(x: Any, mesh: Mesh, *, row_major: bool) -> Format | NamedSharding:
    where = NamedSharding(mesh, PartitionSpec())
    return Format(Layout(tuple(range(len(x.shape)))), where) if row_major else where


def _compile_gpu(
    device: str, lowered: jax.stages.Lowered, options: dict[str, str | bool], may_spill: tuple[str, ...], begin: float
) -> Program:
    """Compiles with spills as errors, and if only kernels that may do so spill, without."""
    assembler = ptxas()
    assert assembler, "there is one, or there were no mesh"
    options |= {"xla_gpu_cuda_data_dir": str(assembler.parents[1]), "xla_dump_emitter_re": "ptx"}
    spills: dict[str, int] = {}
    for refuse in (True, False):
        with tempfile.TemporaryDirectory(prefix="deviceless-") as dump:
            options |= {"xla_dump_to": dump, "xla_gpu_fail_ptx_compilation_on_register_spilling": refuse}
            try:
                return read_program(device, lowered.compile(options), begin, Path(dump), spills)
            except jax.errors.JaxRuntimeError as error:
                if "register spilling" not in str(error):
                    raise
                spills = _spills(assembler, Path(dump))
                if not spills or not all(name.startswith(may_spill) for name in spills):
                    kernels = ", ".join(f"{name} ({size} bytes)" for name, size in spills.items()) or "some kernel"
                    raise RegisterSpillError(f"registers are spilled on {device} by {kernels}") from error
    raise AssertionError("XLA refuses spills that it was told to allow")


def _spills(assembler: Path, dump: Path) -> dict[str, int]:
    """Kernel -> bytes it stores for lack of registers. XLA does not name it, so all of its PTX is assembled anew."""
    spills: dict[str, int] = {}
    for file in sorted(dump.glob("*.ptx")):
        if target := re.search(r"\.target (\w+)", file.read_text()):
            command = [str(assembler), f"-arch={target[1]}", "--verbose", "--output-file=/dev/null", str(file)]
            lines = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            found = re.findall(r"properties for (\w+)\n.*?(\d+) bytes spill stores", lines)
            spills |= {name: int(size) for name, size in found if int(size)}
    return spills


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
