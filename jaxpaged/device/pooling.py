"""Sums of hidden states over parts of prompts, from which embeddings are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.step import Step
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.device.step_program import program_bytes


class Pooling:
    """Sums up what a step's `pooled` ranges say, in float32, in one call: a program for each T.

    Args:
      width: D.
      dtype: of the hidden states.
      max_num_seqs: S, most ranges of a step.
    """

    def __init__(self, width: int, dtype: Any, max_num_seqs: int, store: ProgramStore):
        self._width, self._dtype, self._max_num_seqs, self._store = width, dtype, max_num_seqs, store
        self._programs: dict[int, jax.stages.Compiled] = {}

    @property
    def num_programs(self) -> int:
        """Compiled programs."""
        return len(self._programs)

    @property
    def sizes(self) -> list[int]:
        """The T that there are programs for."""
        return sorted(self._programs)

    def programs(self, token_counts: set[int]) -> list[Callable[[], Any]]:
        """What compiles each program that steps of so many (padded) tokens will need."""
        return [lambda t=t: self._program(t) for t in sorted(token_counts)]

    def launch(self, hidden: jax.Array, step: Step) -> jax.Array:
        """Starts summing up the step's hidden states [T, D]: f32[S, D], a row for each of its `pooled`."""
        targets = _targets(step, len(hidden), self._max_num_seqs)
        sums = self._program(len(hidden))(hidden, targets)
        sums.copy_to_host_async()
        return sums

    def collect(self, step: Step, sums: jax.Array | None) -> list[np.ndarray]:
        """Waits for what `launch` started: a sum for each of the step's `pooled`."""
        return [] if sums is None else list(np.asarray(sums)[: len(step.pooled)])

    def step_bytes(self, num_tokens: int) -> tuple[int, int]:
        """What a step of so many (padded) tokens takes: bytes that stay until they are collected, and meanwhile."""
        return program_bytes(self._program(num_tokens))

    def _program(self, num_tokens: int) -> jax.stages.Compiled:
        """`sum_up` of hidden states [num_tokens, D], compiled once."""
        if num_tokens not in self._programs:
            hidden = jax.ShapeDtypeStruct((num_tokens, self._width), self._dtype)
            arguments = hidden, jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
            function = jax.jit(partial(sum_up, num_sums=self._max_num_seqs))
            self._programs[num_tokens] = self._store.program(
                f"sum_up {self._max_num_seqs}", arguments, lambda: function.lower(*arguments)
            )
        return self._programs[num_tokens]


def sum_up(hidden: jax.Array, targets: jax.Array, num_sums: int) -> jax.Array:
    """f32[num_sums, D]: each of the hidden states [T, D] is added to the row that its target names, if there is one."""
    # Not as a product with zeros and ones: neighbours and padding may be NaN.
    sums = jnp.zeros((num_sums, hidden.shape[1]), jnp.float32)
    return sums.at[targets].add(hidden.astype(jnp.float32), mode="drop")


def _targets(step: Step, num_tokens: int, nowhere: int) -> np.ndarray:
    """i32[num_tokens]: for each packed token the index of its range in `pooled`; `nowhere` if it is in none."""
    targets = np.full(num_tokens, nowhere, np.int32)
    starts = np.cumsum(step.num_tokens) - step.num_tokens
    for index, part in enumerate(step.pooled):
        first = int(starts[part.row]) + part.first - step.starts[part.row]
        targets[first : first + part.num_tokens] = index
    return targets
