"""Single rows of the hidden states that a forward pass leaves, for what looks at prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.device.program_store import ProgramStore

CHUNK = 64  # rows of one call: what comes after it compiles once, and not for each T


class HiddenRows:
    """Picks rows out of [T, D], `CHUNK` at a time: one program for each T.

    Args:
      width: D.
      dtype: of the hidden states.
    """

    def __init__(self, width: int, dtype: Any, store: ProgramStore):
        self.shape, self.dtype, self._store = (CHUNK, width), dtype, store
        self._gathers: dict[int, jax.stages.Compiled] = {}

    @property
    def num_programs(self) -> int:
        """Compiled programs."""
        return len(self._gathers)

    @property
    def sizes(self) -> list[int]:
        """The T that there are programs for."""
        return sorted(self._gathers)

    def programs(self, token_counts: set[int]) -> list[Callable[[], Any]]:
        """What compiles each program that steps of so many (padded) tokens will need."""
        return [lambda t=t: self._gather(t) for t in sorted(token_counts)]

    def pick(self, hidden: jax.Array, rows: np.ndarray) -> jax.Array:
        """[CHUNK, D]: at most `CHUNK` rows of `hidden`, then others."""
        padded = np.zeros(CHUNK, np.int32)
        padded[: len(rows)] = rows
        return self._gather(len(hidden))(hidden, padded)

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of what `pick` gives."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def _gather(self, num_tokens: int) -> jax.stages.Compiled:
        if num_tokens not in self._gathers:
            hidden = jax.ShapeDtypeStruct((num_tokens, self.shape[1]), self.dtype)
            arguments = hidden, jax.ShapeDtypeStruct((CHUNK,), jnp.int32)
            self._gathers[num_tokens] = self._store.program(
                "gather_rows", arguments, lambda: jax.jit(gather_rows).lower(*arguments)
            )
        return self._gathers[num_tokens]


def gather_rows(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """Some rows of [T, D]."""
    return hidden[rows]
