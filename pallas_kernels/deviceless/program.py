"""What a compiled program does, read from what the compiler says about it: launches, copies, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax


class Launch(NamedTuple):
    """One kernel or copy that the program starts on the device.

    Attributes:
      kind: "CustomKernel", "Gemm", "Copy", "Memset", ... on GPUs; the HLO opcode on TPUs.
      name: of the kernel. A program with equal calls has one kernel, launched under the same name.
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


class Copy(NamedTuple):
    """An instruction that only moves data: a copy, transpose, slice, concatenation or change of dtype.

    Attributes:
      name, source: as of launches.
      shape: what it writes, such as "bf16[4096,4096]".
      bytes: what it writes.
      argument: the argument that it reads, such as "params['layers_0']['attn']['o']", or "" if it is no argument.
    """

    name: str
    source: str
    shape: str
    bytes: int
    argument: str


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
    aliases: dict[int, int]
    seconds: float
    compiled: jax.stages.Compiled

    @property
    def copied_bytes(self) -> int:
        """What all copies write, each counted once."""
        return sum(copy.bytes for copy in self.copies)


class Instruction(NamedTuple):
    """A line of HLO outside of fusions."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    source: str
    moves_only: bool


def read_program(device: str, compiled: jax.stages.Compiled, dump: Path, seconds: float) -> Program:
    """The program, from the compiled object and the folder that XLA dumped into."""
    text = compiled.as_text() or ""
    instructions = list(_instructions(text))
    thunks = list(dump.glob("*.thunk_sequence.txt"))
    if thunks:
        assert len(thunks) == 1, thunks
        metadata = thunks[0].with_name(thunks[0].name.replace("thunk_sequence", "thunk_metadata")).read_text()
        launches = _gpu_launches(thunks[0].read_text(), metadata, instructions)
    else:
        launches = _tpu_launches(instructions)
    memory = compiled.memory_analysis()
    assert memory is not None, "both compilers report memory"
    return Program(
        device=device,
        launches=tuple(launches),
        copies=tuple(sorted(_copies(instructions), key=lambda copy: -copy.bytes)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliases=_aliases(text),
        seconds=seconds,
        compiled=compiled,
    )


_THUNK = re.compile(r"( *)(\d+): k(\w+)")
_KERNEL = re.compile(r"\] (\S+) grid: \[(.*?)\] threads: \[(.*?)\]\s+shared_memory: (\d+) bytes")
_INDENT = 4  # of the thunks inside another one
_NO_LAUNCH = {"Sequential", "CommandBuffer", "Conditional", "While", "WaitForStreams", "CopyDone", "AsyncDone"}


def _gpu_launches(sequence: str, metadata: str, instructions: Iterable[Instruction]) -> Iterator[Launch]:
    """Reads XLA's `thunk_sequence.txt`; the metadata beside it names the instruction of each thunk."""
    names = dict(re.findall(r'thunk_info \{\s+profile_annotation: "(.*?)"\s+thunk_id: (\d+)', metadata))
    sources = {i.name: i.source for i in instructions}
    source_of = {int(thunk): sources.get(name, "") for name, thunk in names.items()}
    outer: list[str] = []
    for line in sequence.splitlines():
        thunk = _THUNK.search(line)
        if thunk is None:
            continue
        del outer[len(thunk[1]) // _INDENT :]
        kind = thunk[3]
        if kind not in _NO_LAUNCH:
            kernel = _KERNEL.search(line)
            name, grid, threads, shared = kernel.groups() if kernel else (kind, "", "", "0")
            source = source_of.get(int(thunk[2]), "")
            yield Launch(kind, name, _numbers(grid), _numbers(threads), int(shared), source, "/".join(outer))
        outer.append(kind)


_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call", "after-all"}


def _tpu_launches(instructions: Iterable[Instruction]) -> Iterator[Launch]:
    """libtpu lists no launches: every instruction outside of fusions is one, unless it only gives names to values."""
    for i in instructions:
        if i.opcode not in _FREE and not i.opcode.endswith("-done"):
            yield Launch(i.opcode, i.name, (), (), 0, i.source, "")


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*?)\)")
_INNER = re.compile(r"(?:calls|to_apply|comparator|select|scatter)=%?([\w.-]+)")
_SOURCE = re.compile(r'op_name="(.*?)"')
_MOVES = {"copy", "copy-start", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "reverse", "convert"}
_NAMES = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element", "broadcast"}


def _instructions(text: str) -> Iterator[Instruction]:
    """The instructions of all computations that are no part of a fusion or a reduction."""
    bodies: dict[str, list[tuple[re.Match, str]]] = {}
    inner: set[str] = set()
    body: list[tuple[re.Match, str]] = []
    for line in text.splitlines():
        if computation := _COMPUTATION.match(line):
            body = bodies[computation[1]] = []
        elif instruction := _INSTRUCTION.match(line):
            body.append((instruction, line))
            inner.update(_INNER.findall(line))
    for name in bodies.keys() - inner:
        for match, line in bodies[name]:
            fused = re.search(r"calls=%?([\w.-]+)", line)
            parts = [part for part, _ in bodies[fused[1]]] if fused and match[3] == "fusion" else [match]
            source = _SOURCE.search(line)
            operands = tuple(re.findall(r"%([\w.-]+)", match[4]))
            yield Instruction(match[1], match[2], match[3], operands, source[1] if source else "", _only_moves(parts))


def _only_moves(parts: list[re.Match]) -> bool:
    """Whether instructions move data and compute nothing, but for scalars (indices)."""
    opcodes = {part[3] for part in parts if part[3] == "reduce" or not re.fullmatch(r"\w+\[\]\S*", part[2])}
    return bool(opcodes & _MOVES) and opcodes <= _MOVES | _NAMES


def _copies(instructions: list[Instruction]) -> Iterator[Copy]:
    by_name = {i.name: i for i in instructions}
    for i in instructions:
        if i.moves_only and _VMEM not in i.shape:
            arguments = filter(None, (_argument(by_name, operand) for operand in i.operands))
            yield Copy(i.name, i.source, _plain(i.shape), _bytes(i.shape), next(arguments, ""))


def _argument(by_name: dict[str, Instruction], name: str) -> str:
    """The argument that an instruction's result is, under another shape perhaps; "" if it is computed."""
    instruction = by_name.get(name)
    while instruction and instruction.opcode in {"bitcast", "reshape"}:
        instruction = by_name.get(instruction.operands[0])
    return instruction.source if instruction and instruction.opcode == "parameter" else ""


def _aliases(text: str) -> dict[int, int]:
    """{argument: output} of the module's `input_output_alias={ {0}: (15, {}, may-alias), ... }`; a lone output is 0."""
    header = text.partition("\n")[0]
    return {int(arg): int(out or 0) for out, arg in re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", header)}


_VMEM = "S(1)"  # a TPU's fast memory: what is brought there is read, not copied
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


def _plain(shape: str) -> str:
    """A shape without its layout."""
    return ", ".join(f"{dtype}[{sizes}]" for dtype, sizes in _SHAPE.findall(shape))


def _bytes(shape: str) -> int:
    """Bytes of an array or tuple of them; what has no width, like a token, counts nothing."""
    total = 0
    for dtype, sizes in _SHAPE.findall(shape):
        width = re.search(r"\d+", dtype)
        bits = int(width[0]) if width else 8 * (dtype == "pred")
        total += math.prod(_numbers(sizes)) * bits // 8
    return total


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
