"""Checkpoint tensors -> params pytree, one parameter at a time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpaged.checkpoint.table import CheckpointTable, Weight
from jaxpaged.checkpoint.tensor import LazyTensor
from jaxpaged.errors import CheckpointError

Put = Callable[[str, np.ndarray], Any]
Progress = Callable[[int, int], None]
_READERS = 2  # threads that make parameters: NumPy and the system work outside the GIL


def load_params(
    table: CheckpointTable,
    abstract: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    *,
    dtype: Any | None,
    put: Put | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Makes every parameter of a model exactly once: assemble, cast, put.

    Names and shapes are compared before the first tensor is read. Host memory holds the sources of two parameters at a
    time, and the parameter before them while its transfer runs; on a CPU the arrays made here are the device's.

    Args:
      table: how parameters are made from checkpoint tensors.
      abstract: nested dict of `jax.ShapeDtypeStruct`: the parameters that the model wants.
      tensors: the checkpoint's, by name.
      dtype: of floating-point parameters; None takes that of `abstract`. Integer ones keep the checkpoint's.
      put: (path, array) -> device array, where path is "layers_0/attn/qkv"; default: the default device. The
        array is `put`'s to keep: nothing else refers to it, and it never is a view of the file.
      progress: called with (bytes done, bytes in all) of the parameters, at the start and after each one.

    Raises:
      CheckpointError: with all missing, unused and mis-shaped names.
    """
    wanted = dict(_leaves(abstract))
    _check(table, wanted, tensors)
    put = put or _put_default
    dtypes = {w.path: _final_dtype(w, wanted[w.path], tensors, dtype) for w in table.weights}
    total = sum(int(np.prod(wanted[path].shape)) * kind.itemsize for path, kind in dtypes.items())
    done, params, pending = 0, {}, None
    if progress is not None:
        progress(done, total)
    for weight, array in _made(table.weights, tensors, dtypes):
        done += array.nbytes
        jax.block_until_ready(pending)
        pending = put(weight.path, array)
        del array
        _insert(params, weight.path, pending)
        if progress is not None:
            progress(done, total)
    jax.block_until_ready(pending)
    return params


def _put_default(path: str, array: np.ndarray) -> jax.Array:
    return jax.device_put(array)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _insert(tree: dict[str, Any], path: str, value: Any) -> None:
    *folders, leaf = path.split("/")
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[leaf] = value


def _final_dtype(weight: Weight, wanted: Any, tensors: Mapping[str, LazyTensor], dtype: Any | None) -> np.dtype:
    stored = tensors[weight.sources[0]].dtype
    if not jax.numpy.issubdtype(stored, np.floating):
        return stored
    return np.dtype(wanted.dtype if dtype is None else jax.numpy.dtype(dtype))


def _made(
    weights: Sequence[Weight], tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, np.dtype]
) -> Iterator[tuple[Weight, np.ndarray]]:
    """Each weight and its array, in order; while one is used, the next is made."""
    with ThreadPoolExecutor(_READERS) as pool:
        pending: deque[tuple[Weight, Future[np.ndarray]]] = deque()
        for weight in weights:
            pending.append((weight, pool.submit(_make, weight, tensors, dtypes[weight.path])))
            if len(pending) == _READERS:
                first, array = pending.popleft()
                yield first, array.result()
        for weight, array in pending:
            yield weight, array.result()


def _make(weight: Weight, tensors: Mapping[str, LazyTensor], dtype: np.dtype) -> np.ndarray:
    # Never a view of the file: on a CPU, JAX keeps aligned host memory instead of copying it, and then the weights
    # would change with the file.
    return np.ascontiguousarray(weight.assemble([tensors[name].read_as(dtype) for name in weight.sources]))


def _check(table: CheckpointTable, wanted: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> None:
    missing, misshaped, used, paths = [], [], set(), set()
    for weight in table.weights:
        if weight.path in paths:
            misshaped.append(f"{weight.path} is declared twice by the model's table")
        elif weight.path not in wanted:
            misshaped.append(f"{weight.path} is declared by the model's table, but no parameter of the model")
        paths.add(weight.path)
        used.update(weight.sources)
        absent = [name for name in weight.sources if name not in tensors]
        missing += [name for name in absent if name not in missing]
        if not absent and weight.path in wanted:
            problem = _kind_problem(weight, wanted[weight.path].dtype, tensors)
            problem = problem or _shape_problem(weight, wanted[weight.path].shape, tensors)
            misshaped += [problem] if problem else []
    missing += [f"{path} (not in the model's table)" for path in wanted if path not in paths]
    ignored = [re.compile(pattern) for pattern in table.ignored]
    unused = [name for name in tensors if name not in used and not any(p.search(name) for p in ignored)]
    if missing or unused or misshaped:
        raise CheckpointError(
            "the checkpoint does not fit the model", missing=missing, unused=sorted(unused), misshaped=misshaped
        )


def _kind_problem(weight: Weight, expected: Any, tensors: Mapping[str, LazyTensor]) -> str | None:
    """Whole numbers where weights belong would load, and give garbage."""
    if not jax.numpy.issubdtype(expected, np.floating):
        return None
    whole = [
        f"{n} is {tensors[n].dtype}" for n in weight.sources if not jax.numpy.issubdtype(tensors[n].dtype, np.floating)
    ]
    return f"{', '.join(whole)}, not floating-point" if whole else None


def _shape_problem(weight: Weight, expected: tuple[int, ...], tensors: Mapping[str, LazyTensor]) -> str | None:
    sources = [tensors[name] for name in weight.sources]
    described = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(weight.sources, sources, strict=True))
    try:
        shape = _dry_run(weight, sources)
    except (ValueError, IndexError, TypeError) as error:
        return f"{described}: cannot make {weight.path} {list(expected)} ({error})"
    if shape != tuple(expected):
        return f"{described}: makes {weight.path} {list(shape)}, the model wants {list(expected)}"
    return None


def _dry_run(weight: Weight, sources: list[LazyTensor]) -> tuple[int, ...]:
    """The shape that `assemble` will give, without its cost.

    Elements of zero bytes go through reshapes, transposes and concatenations for nothing. A table that also
    computes gets real numbers, one in memory however large the tensor.
    """
    try:
        return weight.assemble([np.empty(t.shape, np.dtype("V0")) for t in sources]).shape
    except TypeError:
        return weight.assemble([np.broadcast_to(np.zeros((), t.dtype), t.shape) for t in sources]).shape
