"""Reading the optimized HLO of a program: its instructions, and those that only move data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Copy(NamedTuple):
    """An instruction that only moves data: a copy, transpose, slice, concatenation or change of dtype.

    Attributes:
      name: of the instruction.
      source: where the traced function asked for it, such as "jit(step)/layers_0/mlp/transpose"; may be "".
      shape: what it writes, such as "bf16[4096,4096]".
      bytes: what it writes.
      argument: the argument that it copies all or part of, such as "params['layers_0']['attn']['o']"; "" if it copies
        what was computed. An argument that was updated in place still counts as itself.
    """

    name: str
    source: str
    shape: str
    bytes: int
    argument: str


@dataclass(frozen=True)
class Instruction:
    """A line of HLO.

    Attributes:
      computation: that it stands in.
      index: of a get-tuple-element or of a parameter.
      calls: the computations that it runs: a fusion's, a loop's, the branches of a conditional.
    """

    name: str
    computation: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    source: str
    index: int
    calls: tuple[str, ...]


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*?)\)(.*)$")
_CALLS = re.compile(r"(?:calls|body|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%[\w.-]+)")
_APPLIED = re.compile(r"(?:to_apply|comparator|select|scatter)=%([\w.-]+)")
_NAME = re.compile(r"%([\w.-]+)")
_SOURCE = re.compile(r'op_name="(.*?)"')
_INDEX = re.compile(r"index=(\d+)")

_MOVES = {"copy", "copy-start", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "reverse", "convert"}
_VIEWS = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element", "broadcast"}
_ON_CHIP = re.compile(r"S\(\d+\)")  # a TPU's fast memories: what is brought there is read, not copied


class Module:
    """The instructions of a module, by name, and what can be asked about them."""

    def __init__(self, text: str):
        self.header = text.partition("\n")[0]
        self.by_name: dict[str, Instruction] = {}
        self._bodies: dict[str, list[Instruction]] = {}
        self._callers: dict[str, Instruction] = {}
        fused: set[str] = set()
        computation = ""
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                computation = start[1]
                self._bodies[computation] = []
            elif match := _INSTRUCTION.match(line):
                instruction = _instruction(match, computation)
                self.by_name[instruction.name] = instruction
                self._bodies[computation].append(instruction)
                self._callers.update(dict.fromkeys(instruction.calls, instruction))
                fused.update(_APPLIED.findall(match[5]))
                if instruction.opcode == "fusion":
                    fused.update(instruction.calls)
        self._fused = fused

    def scheduled(self) -> Iterator[Instruction]:
        """The instructions that are no part of a fusion or a reduction."""
        for name, body in self._bodies.items():
            if name not in self._fused:
                yield from body

    def inside(self, i: Instruction) -> str:
        """The control flow around an instruction, such as "While/Conditional"."""
        around: list[str] = []
        while caller := self._callers.get(i.computation):
            around.insert(0, caller.opcode.capitalize())
            i = caller
        return "/".join(around)

    def aliases(self) -> dict[int, int]:
        """{argument: output}, from `input_output_alias={ {0}: (15, {}, may-alias), ... }`; a lone output is {}."""
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", self.header)
        return {int(argument): int(output or 0) for output, argument in pairs}

    def copies(self) -> Iterator[Copy]:
        """Everything that only moves data in the device's memory."""
        for i in self.scheduled():
            if self._only_moves(i) and not _ON_CHIP.search(i.shape):
                arguments = filter(None, (self._argument(operand) for operand in i.operands))
                yield Copy(i.name, i.source, plain_shape(i.shape), shape_bytes(i.shape), next(arguments, ""))

    def _only_moves(self, i: Instruction) -> bool:
        """Whether it moves arrays and computes nothing, but for scalars (indices)."""
        parts = self._bodies[i.calls[0]] if i.opcode == "fusion" else [i]
        opcodes = {part.opcode for part in parts if part.opcode == "reduce" or "[]" not in part.shape}
        moves = bool(opcodes & _MOVES) and opcodes <= _MOVES | _VIEWS
        return moves and (i.opcode != "fusion" or "parameter" in opcodes)  # else it fills in constants

    def _argument(self, name: str) -> str:
        """The argument that a value is, seen in another shape, carried through a loop, or updated in place."""
        seen = {name}
        queue = [(name, -1)]
        while queue:
            name, element = queue.pop()
            i = self.by_name.get(name)
            if i is None:
                continue
            if i.opcode == "parameter" and i.computation not in self._callers:
                return i.source
            origins = [origin for origin in self._origins(i, element) if origin[0] not in seen or origin[1] >= 0]
            seen.update(origin for origin, _ in origins)
            queue += origins
        return ""

    def _origins(self, i: Instruction, element: int) -> list[tuple[str, int]]:
        """The values (name, element of it or -1) that hold what `element` of an instruction's result holds."""
        if i.opcode == "get-tuple-element":
            return [(i.operands[0], i.index)]
        if i.opcode == "tuple":
            return [(i.operands[element], -1)] if element >= 0 else []
        if i.opcode == "parameter":
            caller = self._callers[i.computation]
            if caller.opcode == "conditional":
                return [(caller.operands[1 + caller.calls.index(i.computation)], element)]
            return [(caller.operands[i.index], element)]
        if i.opcode == "while":
            return [(i.operands[0], element)]
        if i.opcode in {"bitcast", "reshape", "copy-done", *_MOVES}:
            return [(i.operands[0], -1)]
        if i.opcode in {"fusion", "custom-call", "dynamic-update-slice", "scatter"}:
            # In place or not, what has the shape of an operand may be that operand with something written into it.
            shapes = [f"{dtype}[{sizes}]" for dtype, sizes in _SHAPE.findall(i.shape)]
            shape = shapes[max(element, 0)] if shapes else ""
            same = [
                name for name in i.operands if name in self.by_name and plain_shape(self.by_name[name].shape) == shape
            ]
            return [(name, -1) for name in same]
        return []


def _instruction(match: re.Match, computation: str) -> Instruction:
    name, shape, opcode, operands, rest = match.groups()
    source, index = _SOURCE.search(rest), _INDEX.search(rest)
    number = operands if opcode == "parameter" else index[1] if index else "0"
    return Instruction(
        name=name,
        computation=computation,
        shape=shape,
        opcode=opcode,
        operands=tuple(_NAME.findall(operands)),
        source=source[1] if source else "",
        index=int(number),
        calls=tuple(call for group in _CALLS.findall(rest) for call in _NAME.findall(group)),
    )


_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


def plain_shape(shape: str) -> str:
    """A shape without its layout; those of a tuple, one after the other."""
    return ", ".join(f"{dtype}[{sizes}]" for dtype, sizes in _SHAPE.findall(shape))


def shape_bytes(shape: str) -> int:
    """Bytes of an array or of a tuple's arrays; what has no width, like a token, counts nothing."""
    total = 0
    for dtype, sizes in _SHAPE.findall(shape):
        width = re.search(r"\d+", dtype)
        bits = int(width[0]) if width else 8 * (dtype == "pred")
        total += math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
    return total
