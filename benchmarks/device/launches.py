"""What a compiled program launches, and how much of it as CUDA graphs, read from XLA's dump of its thunks."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The sequence that is run; where no pass changed it there is only the first file.
_FILES = ("thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt")
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)", re.MULTILINE)
_GRAPH = "kCommandBuffer"


def module_name(function: Callable[..., Any]) -> str:
    """What XLA calls the program of a jitted function."""
    return f"jit_{function.__name__}"


def dump_options(folder: Path, function: Callable[..., Any]) -> dict[str, Any]:
    """Compiler options that write the dump of the function's program."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_module_re": f"^{module_name(function)}$"}


def count(folder: Path, function: Callable[..., Any]) -> dict[str, Any]:
    """Launches of the function's program, which was dumped there.

    Returns:
      `graphs`; `launches` in all, those of every branch, and `in_graphs` of them; `syncs`, branches and loops outside
      any graph, for which the host waits until it can read which way they go; `kinds`, how many there are of each.

    Raises:
      FileNotFoundError: there is no dump; only GPU programs have one.
      ValueError: it lists nothing.
    """
    names = [f"*.{module_name(function)}.*{name}" for name in _FILES]
    files = next((found for name in names if (found := sorted(folder.glob(name)))), None)
    if not files:
        raise FileNotFoundError(f"XLA wrote no thunks of {module_name(function)} to {folder}")
    kinds: collections.Counter[str] = collections.Counter()
    graphs = in_graphs = syncs = 0
    depth = None  # indentation of the graph that we are in
    for indent, kind in _THUNK.findall(files[-1].read_text(encoding="utf-8")):
        if depth is not None and len(indent) <= depth:
            depth = None
        if kind == _GRAPH:
            graphs += 1
            depth = len(indent) if depth is None else depth
        elif kind != "kSequential":
            kinds[kind] += 1
            in_graphs += depth is not None
            syncs += not indent and kind in ("kConditional", "kWhile")
    if not kinds:
        raise ValueError(f"no thunks in {files[-1]}")
    return {
        "graphs": graphs,
        "launches": kinds.total(),
        "in_graphs": in_graphs,
        "syncs": syncs,
        "kinds": dict(kinds.most_common()),
    }
