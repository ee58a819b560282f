"""Reading XLA's list of what a GPU program starts, its thunks: kernels, copies, graphs, and control flow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

GRAPH = "CommandBuffer"
BRANCHES = frozenset({"Conditional", "While"})
_NO_LAUNCH = BRANCHES | {GRAPH, "Sequential", "WaitForStreams", "CopyDone", "AsyncDone"}

_THUNK = re.compile(r"( *)(\d+): k(\w+)")
_KERNEL = re.compile(r"\] (\S+) grid: \[(.*?)\] threads: \[(.*?)\]\s+shared_memory: (\d+) bytes")
_INDENT = 4  # of the thunks inside another one


class Thunk(NamedTuple):
    """A line of the list.

    Attributes:
      number: XLA's, by which its metadata calls it.
      kind: "CustomKernel", "CublasLtMatmul", "Copy", "Memset", "Conditional", ...
      name: of the kernel; else the kind.
      grid, threads: blocks, and threads in a block; empty for what is no kernel.
      shared_memory: bytes a block.
      around: the kinds of the thunks that it stands in, outermost first.
    """

    number: int
    kind: str
    name: str
    grid: tuple[int, ...]
    threads: tuple[int, ...]
    shared_memory: int
    around: tuple[str, ...]

    @property
    def launches(self) -> bool:
        """Whether it starts something on the device itself, rather than others or not at all."""
        return self.kind not in _NO_LAUNCH


def read_thunks(sequence: str) -> Iterator[Thunk]:
    """The thunks of one of XLA's `thunk_sequence*.txt`, in the order they are started; those of every branch."""
    outer: list[str] = []
    for line in sequence.splitlines():
        found = _THUNK.match(line)
        if found is None:
            continue
        spaces, number, kind = found.groups()
        del outer[len(spaces) // _INDENT :]
        kernel = _KERNEL.search(line)
        name, grid, threads, shared = kernel.groups() if kernel else (kind, "", "", "0")
        yield Thunk(int(number), kind, name, _numbers(grid), _numbers(threads), int(shared), tuple(outer))
        outer.append(kind)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
