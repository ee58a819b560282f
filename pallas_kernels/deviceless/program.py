"""What a compiled program does, read from what the compiler says about it: launches, copies, memory."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.deviceless.hlo import Copy, Module, plain_shape
from pallas_kernels.deviceless.thunks import read_thunks


class Launch(NamedTuple):
    """One kernel or copy that the program starts on the device.

    Attributes:
      kind: "CustomKernel", "CublasLtMatmul", "Copy", "Memset", ... on GPUs; the HLO opcode on TPUs.
      name: of the kernel. Equal calls share one kernel, launched under the same name.
      grid, threads: blocks, and threads in a block; empty on TPUs and for what is no kernel.
      shared_memory: bytes a block.
      source: where the traced function asked for it, such as "jit(step)/layers_0/mlp/dot_general"; may be "".
      inside: control flow around it, such as "While/Conditional"; "" for what runs once, always.
    """

    kind: str
    name: str
    grid: tuple[int, ...]
    threads: tuple[int, ...]
    shared_memory: int
    source: str
    inside: str


class Buffer(NamedTuple):
    """A value that the program keeps in temporary memory; values that live at different times share their place."""

    name: str
    shape: str
    bytes: int


@dataclass(frozen=True)
class Program:
    """A program compiled for a device that need not be there.

    Attributes:
      device: its name in `DEVICES`.
      launches: in the order they are started. Those of a loop's body are listed once, those of every branch all.
      copies: pure moves of data, largest first.
      argument_bytes, output_bytes: of all arguments and results.
      aliased_bytes: of the results, what is written in place of donated arguments.
      temporary_bytes: what it allocates while it runs.
      temporaries: what is kept there, largest first; empty on TPUs.
      spills: GPU kernels that spill registers, and the bytes that a thread stores.
      aliases: argument -> index of the output that is written in its place, as numbers in flattened order.
      seconds: to lower and compile.
      compiled: jax's own object; `as_text()` is the optimized HLO.
    """

    device: str
    launches: tuple[Launch, ...]
    copies: tuple[Copy, ...]
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    temporaries: tuple[Buffer, ...]
    aliases: dict[int, int]
    spills: dict[str, int]
    seconds: float
    compiled: jax.stages.Compiled

    @property
    def copied_bytes(self) -> int:
        """What all copies write, each counted once."""
        return sum(copy.bytes for copy in self.copies)

    @property
    def copied_argument_bytes(self) -> int:
        """What those copies write that copy (a part of) an argument."""
        return sum(copy.bytes for copy in self.copies if copy.argument)


def read_program(
    device: str,
    compiled: jax.stages.Compiled,
    begin: float,
    dump: Path | None = None,
    spills: dict[str, int] | None = None,
) -> Program:
    """The program, from the compiled object.

    Args:
      begin: when `time.perf_counter()` began to count.
      dump: the folder that XLA dumped into, for GPUs.
      spills: see `Program`.
    """
    seconds = time.perf_counter() - begin
    module = Module(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None, "both compilers report memory"
    sequence = _only_file(dump, "thunk_sequence.txt")
    return Program(
        device=device,
        launches=tuple(
            _gpu_launches(sequence, _only_file(dump, "thunk_metadata.txt"), module)
            if sequence
            else _tpu_launches(module)
        ),
        copies=tuple(sorted(module.copies(), key=lambda copy: -copy.bytes)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        temporaries=tuple(sorted(_temporaries(_only_file(dump, "buffer-assignment.txt")), key=lambda b: -b.bytes)),
        aliases=module.aliases(),
        spills=spills or {},
        seconds=seconds,
        compiled=compiled,
    )


def _only_file(dump: Path | None, suffix: str) -> str:
    """The content of the one file of that suffix; "" if there is none."""
    files = list(dump.glob(f"*{suffix}")) if dump else []
    assert len(files) < 2, files
    return files[0].read_text() if files else ""


def _gpu_launches(sequence: str, metadata: str, module: Module) -> Iterator[Launch]:
    """From XLA's `thunk_sequence.txt`; the metadata beside it names the instruction of each thunk."""
    names = dict(re.findall(r'profile_annotation: "(.*?)"\s+thunk_id: (\d+)', metadata))
    source_of = {int(thunk): module.by_name[name].source for name, thunk in names.items() if name in module.by_name}
    for thunk in read_thunks(sequence):
        if thunk.launches:
            _, kind, name, grid, threads, shared, around = thunk
            yield Launch(kind, name, grid, threads, shared, source_of.get(thunk.number, ""), "/".join(around))


_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call", "after-all"}


def _tpu_launches(module: Module) -> Iterator[Launch]:
    """libtpu lists no launches: every instruction on arrays outside of fusions is one that does more than rename."""
    for i in module.scheduled():
        if i.opcode not in _FREE and not i.opcode.endswith("-done") and "[]" not in i.shape:
            yield Launch(i.opcode, i.name, (), (), 0, i.source, module.inside(i))


def _temporaries(assignment: str) -> Iterator[Buffer]:
    """Reads XLA's `buffer-assignment.txt`: allocations, each with the values that share it."""
    temporary = False
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            temporary = line.rstrip(":").endswith("preallocated-temp")
        elif temporary and (value := re.match(r" value: <\d+ (.+?) @\d+> \(size=(\d+),offset=\d+\): (.+)", line)):
            yield Buffer(value[1], plain_shape(value[3]), int(value[2]))
