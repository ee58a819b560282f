"""What a compiled program launches, and how much of it as CUDA graphs, read from XLA's dump of its thunks."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pallas_kernels.deviceless.thunks import BRANCHES, GRAPH, read_thunks

# The sequence that is run; where no pass changed it there is only the first file.
_FILES = ("thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt")


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
    thunks = list(read_thunks(files[-1].read_text(encoding="utf-8")))
    if not thunks:
        raise ValueError(f"no thunks in {files[-1]}")
    launches = [thunk for thunk in thunks if thunk.launches]
    return {
        "graphs": sum(thunk.kind == GRAPH for thunk in thunks),
        "launches": len(launches),
        "in_graphs": sum(GRAPH in thunk.around for thunk in launches),
        "syncs": sum(thunk.kind in BRANCHES and not thunk.around for thunk in thunks),
        "kinds": dict(collections.Counter(thunk.kind for thunk in launches).most_common()),
    }
