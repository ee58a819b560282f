"""Sums of hidden states over parts of prompts, from which embeddings are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.step import Step
from jaxpaged.device.hidden_rows import CHUNK, HiddenRows
from jaxpaged.device.step_program import program_bytes


class Pooling:
    """Sums up what a step's `pooled` ranges say, in float32, `CHUNK` hidden states at a time: one program.

    Args:
      rows: picks them.
      max_num_seqs: S, most ranges of a step.
    """

    def __init__(self, rows: HiddenRows, max_num_seqs: int):
        self._rows, self._shape = rows, (max_num_seqs, rows.shape[1])
        self._zeros: jax.Array | None = None
        self._add: jax.stages.Compiled | None = None

    @property
    def num_programs(self) -> int:
        """Compiled programs, besides those of `rows`."""
        return int(self._add is not None)

    def programs(self) -> list[Callable[[], Any]]:
        """What compiles each program."""
        return [self._add_program]

    def launch(self, hidden: jax.Array, step: Step) -> jax.Array:
        """Starts summing up the step's hidden states [T, D]: f32[S, D], a row for each of its `pooled`."""
        rows, ranges = _positions(step)
        program = self._add_program()
        assert self._zeros is not None
        sums = self._zeros
        for start in range(0, len(rows), CHUNK):
            some = slice(start, start + CHUNK)
            targets = np.full(CHUNK, self._shape[0], np.int32)  # out of range: dropped
            targets[: len(ranges[some])] = ranges[some]
            sums = program(sums, self._rows.pick(hidden, rows[some]), targets)
        sums.copy_to_host_async()
        return sums

    def collect(self, step: Step, sums: jax.Array | None) -> list[np.ndarray]:
        """Waits for what `launch` started: a sum for each of the step's `pooled`."""
        return [] if sums is None else list(np.asarray(sums)[: len(step.pooled)])

    def step_bytes(self) -> tuple[int, int]:
        """What it takes: bytes that stay until they are collected, and while it runs."""
        results, temporaries = program_bytes(self._add_program())
        return 2 * results, temporaries + results

    def _add_program(self) -> jax.stages.Compiled:
        """`add(sums f32[S, D], hidden [CHUNK, D], targets i32[CHUNK]) -> sums`, compiled once."""
        if self._add is None:
            sums = jax.ShapeDtypeStruct(self._shape, jnp.float32)
            targets = jax.ShapeDtypeStruct((CHUNK,), jnp.int32)
            self._zeros = jax.device_put(np.zeros(self._shape, np.float32))
            self._add = jax.jit(add).lower(sums, self._rows.abstract(), targets).compile()
        return self._add


def add(sums: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Adds each hidden state to the row of `sums` that its target names, if there is one."""
    # Not as a product with zeros and ones: neighbours and padding may be NaN.
    return sums.at[targets].add(hidden.astype(jnp.float32), mode="drop")


def _positions(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """For each position to be summed up: the packed token there, and the index of its range."""
    starts = np.cumsum(step.num_tokens) - step.num_tokens
    first = [int(starts[part.row]) + part.first - step.starts[part.row] for part in step.pooled]
    rows = [np.arange(a, a + part.num_tokens) for a, part in zip(first, step.pooled, strict=True)]
    return np.concatenate(rows), np.repeat(np.arange(len(rows)), [part.num_tokens for part in step.pooled])
