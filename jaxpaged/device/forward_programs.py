"""The compiled forward passes of an engine: what each bucket needs, made from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpaged.config import EngineConfig
from jaxpaged.device.buckets import Bucket, BucketTable
from jaxpaged.device.decode_program import decode_arguments, lower_decode
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.device.step_program import (
    StepOptions,
    forward_arguments,
    lower_forward,
    program_bytes,
    step_compiler_options,
)
from jaxpaged.models.decoder import Decoder


class ForwardPrograms:
    """For each bucket a forward pass; for decode buckets also one that goes on for several steps, if the engine does.

    Attributes:
      programs, decode_programs: those that are compiled, by their buckets.
    """

    def __init__(
        self,
        module: Decoder,
        options: StepOptions,
        config: EngineConfig,
        buckets: BucketTable,
        state: tuple[Any, Any, Any],
        store: ProgramStore,
    ):
        """Compiles nothing.

        Args:
          state: shapes and dtypes of params, slots and options.
        """
        self._module, self._options, self._config, self._buckets = module, options, config, buckets
        self._params, self._slots, self._wide = state
        self._store = store
        self.programs: dict[Bucket, jax.stages.Compiled] = {}
        self.decode_programs: dict[Bucket, jax.stages.Compiled] = {}

    def loops(self, bucket: Bucket, num_steps: int) -> bool:
        """Whether so many steps take the bucket's loop. A GPU makes the host wait for each turn: one step has none."""
        on_cpu = jax.default_backend() == "cpu"
        return bucket.decode_only and self._config.max_decode_steps > 1 and (num_steps > 1 or on_cpu)

    def needed(self, buckets: Sequence[Bucket], pool: jax.ShapeDtypeStruct) -> list[Callable[[], Any]]:
        """What compiles each program that steps of these buckets need; those of one step first, the largest first."""
        single = [b for b in reversed(buckets) if not self.loops(b, 1)]
        looping = [b for b in reversed(buckets) if self.loops(b, 2)]
        needed: list[Callable[[], Any]] = [lambda b=b: self.program(b, pool) for b in single]
        return needed + [lambda b=b: self.decode_program(b, pool) for b in looping]

    def program(self, bucket: Bucket, pool: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
        """One step, compiled once."""
        if bucket not in self.programs:
            self.programs[bucket] = self._compile(bucket, pool)
        return self.programs[bucket]

    def decode_program(self, bucket: Bucket, pool: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
        """Up to `max_decode_steps` steps, compiled once."""
        if bucket not in self.decode_programs:
            self.decode_programs[bucket] = self._compile_decode(bucket, pool)
        return self.decode_programs[bucket]

    def step_bytes(self, pool: jax.ShapeDtypeStruct) -> int:
        """Temporaries and results of the largest bucket's program, or of the largest loop if these are more."""
        steps = sum(program_bytes(self._compile(self._buckets.mixed[-1], pool)))
        decode = self._buckets.decode[-1]
        return max(steps, sum(program_bytes(self._compile_decode(decode, pool)))) if self.loops(decode, 2) else steps

    def _compile(self, bucket: Bucket, pool: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
        arguments = forward_arguments(self._params, pool, self._slots, bucket, self._config.block_size)
        sizes = self._buckets.result_sizes(bucket)
        return self._store.program(
            f"forward {bucket} {sizes}",
            arguments,
            lambda: lower_forward(self._module, self._options, bucket, sizes, arguments),
            step_compiler_options(),
        )

    def _compile_decode(self, bucket: Bucket, pool: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
        arguments = decode_arguments(self._params, pool, self._slots, self._wide, bucket, self._config.block_size)
        sizes = self._buckets.result_sizes(bucket), self._config.max_decode_steps
        return self._store.program(
            f"decode {bucket} {sizes}",
            arguments,
            lambda: lower_decode(self._module, self._options, bucket, *sizes, arguments),
            step_compiler_options(),
        )
