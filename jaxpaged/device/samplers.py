"""The sampling programs of a runner, and which of them a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpaged.device.options import Options, mask_words
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.device.sampling import Sampled
from jaxpaged.device.slots import Feature, Slots
from jaxpaged.device.step_program import (
    SAMPLE_DONATED,
    Forwarded,
    StepOptions,
    abstract,
    make_sample,
    make_sample_plain,
    sample_arguments,
    sample_plain_arguments,
    step_compiler_options,
)


class Samplers:
    """For each number of rows a program with all features, and one for steps whose rows use none.

    The host chooses: a branch on what only the device knows would make the host wait for it, on GPUs.

    Attributes:
      full, plain: the compiled programs, by their number of rows.
    """

    def __init__(self, options: StepOptions, slots: Slots, wide: Options, vocab_rows: int, store: ProgramStore):
        """Compiles nothing.

        Args:
          vocab_rows: of the head.
        """
        self._options, self._vocab_rows, self._store = options, vocab_rows, store
        self._slots, self._wide = abstract((slots, wide))
        self.full: dict[int, jax.stages.Compiled] = {}
        self.plain: dict[int, jax.stages.Compiled] = {}
        self._featured: set[int] = set()  # slots whose latest request uses a feature
        self._no_masks: dict[int, jax.Array] = {}

    @property
    def num_programs(self) -> int:
        """Compiled programs."""
        return len(self.full) + len(self.plain)

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that both kinds are compiled for."""
        return sorted(self.full.keys() & self.plain.keys())

    def programs(self, sizes: Sequence[int]) -> list[Callable[[], Any]]:
        """What compiles each program for such numbers of rows; the slowest first."""
        full = [lambda n=n: self.full_program(n) for n in reversed(sizes)]
        return [*full, *(lambda n=n: self.plain_program(n) for n in reversed(sizes))]

    def admit(self, slot: int, features: Feature) -> None:
        """A request that uses these features has taken a slot."""
        (self._featured.add if features else self._featured.discard)(slot)

    def sample(
        self, slots: Slots, wide: Options, used: Sequence[int], forwarded: Forwarded, masks: Any = None
    ) -> tuple[Slots, jax.Array, Sampled | None]:
        """Starts sampling.

        Args:
          used: the slots of the step.
          masks: i32[R, W]; None: nothing is masked.

        Returns:
          The slots, which are updated in place; the tokens i32[R]; and with them all else, if a row uses a feature.
        """
        logits, rows, _ = forwarded
        num_rows = len(logits)
        if masks is None and (not self._featured or self._featured.isdisjoint(used)):
            slots, tokens = self.plain_program(num_rows)(slots, logits, rows)
            return slots, tokens, None
        masks = self.no_masks(num_rows) if masks is None else masks
        slots, sampled = self.full_program(num_rows)(slots, wide, logits, rows, masks)
        return slots, sampled.tokens, sampled

    def no_masks(self, num_rows: int) -> jax.Array:
        """Masks that forbid nothing, uploaded once."""
        if num_rows not in self._no_masks:
            words = mask_words(self._vocab_rows)
            self._no_masks[num_rows] = jax.device_put(np.full((num_rows, words), -1, np.int32))
        return self._no_masks[num_rows]

    def full_program(self, num_rows: int) -> jax.stages.Compiled:
        """The program with all features, compiled once."""
        if num_rows not in self.full:
            arguments = sample_arguments(self._slots, self._wide, num_rows, self._vocab_rows)
            function = jax.jit(make_sample(self._options), donate_argnums=SAMPLE_DONATED)
            self.full[num_rows] = self._store.program(
                "sample", arguments, lambda: function.lower(*arguments), step_compiler_options()
            )
        return self.full[num_rows]

    def plain_program(self, num_rows: int) -> jax.stages.Compiled:
        """The program without any, compiled once."""
        if num_rows not in self.plain:
            arguments = sample_plain_arguments(self._slots, num_rows, self._vocab_rows)
            function = jax.jit(make_sample_plain(self._options), donate_argnums=SAMPLE_DONATED)
            self.plain[num_rows] = self._store.program(
                "sample_plain", arguments, lambda: function.lower(*arguments), step_compiler_options()
            )
        return self.plain[num_rows]
