"""Compiles any operation for GPUs and TPUs on a machine that has none, and says what the program does there.

    from functools import partial
    from jax import ShapeDtypeStruct as Array
    from pallas_kernels import deviceless, ragged_paged_attention

    attend = partial(ragged_paged_attention, sm_scale=0.1, implementation="gpu")
    program = deviceless.compile_for("h200", attend, Array((64, 32, 128), "bfloat16"), ...)
    for launch in program.launches:
        print(launch.name, launch.grid, launch.threads, launch.shared_memory)
    print(program.copied_bytes, program.temporary_bytes, program.aliases)

The real compilers run (XLA, Triton and ptxas; Mosaic for TPUs) and yield real binaries: what does not fit in shared
memory or registers, or cannot be lowered, is an error here. Not as on the device: XLA does not tune its matrix
products, and whether launches are captured in a CUDA graph is decided there.
"""

from pallas_kernels.deviceless.compile import CompileError, MemoryOverflowError, RegisterSpillError, compile_for
from pallas_kernels.deviceless.compilers import CompilerMissingError, missing, requirements
from pallas_kernels.deviceless.devices import DEVICES
from pallas_kernels.deviceless.hlo import Copy
from pallas_kernels.deviceless.program import Buffer, Launch, Program

__all__ = [
    "DEVICES",
    "Buffer",
    "CompileError",
    "CompilerMissingError",
    "Copy",
    "Launch",
    "MemoryOverflowError",
    "Program",
    "RegisterSpillError",
    "compile_for",
    "missing",
    "requirements",
]
