"""Weights, device state and compiled programs; launches steps and collects their results."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core.step import Step, StepResult, TokenLogprobs
from jaxpaged.device import batch, kv_cache
from jaxpaged.device.buckets import Bucket, BucketTable
from jaxpaged.device.compilation import compilations
from jaxpaged.device.sampling import Sampled
from jaxpaged.device.slots import admit, empty_slots, pack_admission
from jaxpaged.device.step_program import DONATED, StepOptions, compile_step, compiler_options, make_step, step_arguments
from jaxpaged.errors import RecompilationError
from jaxpaged.models.decoder import Decoder

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(slots=True)
class Launched:
    """A step that is running on the device, and where its results will appear."""

    step: Step
    sampled: Sampled


class Runner:
    """The device half of an engine: owns the params, the page pool and the slots.

    `launch` returns at once; results are read with `collect`, one step later when the engine overlaps.

    Attributes:
      params: the model's weights, a pytree; may be replaced by one of the same shapes and dtypes.
      kv_pages: the page pool.
      programs: the compiled step of each bucket.
      recompilations: compilations by `launch` since warm-up; stays 0.
    """

    def __init__(
        self,
        module: Decoder,
        params: dict,
        config: EngineConfig,
        *,
        vocab_size: int,
        buckets: BucketTable,
    ):
        """Allocates the device state; compiles nothing but what sizing the pool needs.

        Args:
          config: resolved options.
          vocab_size: tokens that may be produced.
          buckets: padded shapes.
        """
        assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
        self.module, self.params, self.config = module, params, config
        on_cpu = jax.default_backend() == "cpu"
        self.buckets = buckets
        self.options = StepOptions(
            page_size=config.block_size,
            vocab_size=vocab_size,
            max_logprobs=config.max_logprobs,
            implementation=config.attention_implementation,
            debug=config.debug_kernels,
            small_head=8 if on_cpu else 0,
        )
        self._max_pages = -(-config.max_model_len // config.block_size)
        self.slots = empty_slots(config.max_num_seqs, config.max_model_len, self._max_pages)
        self.programs: dict[Bucket, jax.stages.Compiled] = {}
        self._admit: jax.stages.Compiled | None = None
        self.recompilations = 0
        model = module.config
        given = config.num_kv_blocks is not None or config.kv_cache_bytes is not None
        step_bytes = 0 if on_cpu or given else self._largest_step_bytes()  # a compilation: only where it matters
        num_pages = kv_cache.num_pages(config, model, step_bytes=step_bytes)
        self.kv_pages = kv_cache.empty_pages(model, num_pages, config.block_size, config.kv_cache_dtype)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, scratch included."""
        return self.kv_pages.shape[1]

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every program and runs each once on padding."""
        buckets = self.buckets.all
        if progress:
            progress(0, len(buckets))
        # XLA compiles outside the GIL: two at a time halve the wait, more would only contend for memory.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pending = [pool.submit(self._program, bucket) for bucket in reversed(buckets)]
            for done, _ in enumerate(concurrent.futures.as_completed(pending), 1):
                if progress:
                    progress(done, len(buckets))
        self._compile_admit()
        for future in pending:
            future.result()
        for bucket in buckets:
            self.collect(self._run(Step(), bucket))

    def launch(self, step: Step) -> Launched:
        """Starts a step on the device. Steps run in the order of their launches.

        Raises:
          RecompilationError: strict mode, and the step needed a compilation.
        """
        assert step.slots
        before = compilations.count
        for admission in step.admissions:
            packed = pack_admission(admission, self.slots.history.shape[1], self._max_pages)
            self.slots = self._compile_admit()(self.slots, packed)
        launched = self._run(step, self.buckets.pick(len(step.slots), step.total_tokens))
        self.recompilations += compilations.count - before
        if self.config.strict and self.recompilations:
            raise RecompilationError(f"{self.recompilations} programs were compiled after warm-up")
        return launched

    def collect(self, launched: Launched) -> StepResult:
        """Waits for a step and returns its tokens."""
        step, sampled = launched.step, launched.sampled
        tokens = iter(np.asarray(sampled.tokens).tolist())
        token_ids = [[next(tokens)] if samples else [] for samples in step.samples]
        return StepResult(token_ids, _logprob_rows(step, sampled) if step.wants_logprobs else None)

    def _run(self, step: Step, bucket: Bucket) -> Launched:
        packed = batch.pack(step, bucket, scratch_slot=len(self.slots.history) - 1, block_size=self.config.block_size)
        program = self._program(bucket)
        self.kv_pages, self.slots, sampled = program(self.params, self.kv_pages, self.slots, packed)
        sampled.tokens.copy_to_host_async()
        if step.wants_logprobs:
            jax.tree.map(lambda x: x.copy_to_host_async(), sampled)
        return Launched(step, sampled)

    def _program(self, bucket: Bucket) -> jax.stages.Compiled:
        if bucket not in self.programs:
            self.programs[bucket] = self._compile(bucket, _abstract(self.kv_pages))
        return self.programs[bucket]

    def _compile(self, bucket: Bucket, kv_pages: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
        step = make_step(self.module, self.options, bucket)
        arguments = step_arguments(self.params, kv_pages, self.slots, bucket, self.config.block_size)
        order = kv_cache.pages_format()
        orders = (
            {} if order is None else {"in_shardings": (None, order, None, None), "out_shardings": (order, None, None)}
        )
        lowered = jax.jit(step, donate_argnums=DONATED, **orders).lower(*arguments)
        return compile_step(lowered, compiler_options(jax.default_backend()))

    def _compile_admit(self) -> jax.stages.Compiled:
        if self._admit is None:
            shapes = (self.slots.history, self.slots.block_table, self.slots.ints, self.slots.stop_ids)
            size = 1 + sum(a.shape[1] for a in (*shapes, self.slots.floats))
            packed = jax.ShapeDtypeStruct((size,), jnp.int32)
            self._admit = jax.jit(admit, donate_argnums=0).lower(_abstract(self.slots), packed).compile()
        return self._admit

    def _largest_step_bytes(self) -> int:
        """Temporaries of the largest step, from a compilation against a pool of two pages."""
        model = self.module.config
        pool = kv_cache.abstract_pages(model, 2, self.config.block_size, self.config.kv_cache_dtype)
        compiled = self._compile(self.buckets.all[-1], pool)
        analysis = compiled.memory_analysis()
        assert analysis is not None, "every backend that has memory to measure can analyse it"
        return analysis.temp_size_in_bytes


def _abstract(tree):
    """Shapes and dtypes of a pytree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _logprob_rows(step: Step, sampled: Sampled) -> list[list[TokenLogprobs]]:
    """The log-probabilities of the rows that want them, cut to what each asked for."""
    tokens, logprobs, ranks = (x.tolist() for x in jax.device_get((sampled.tokens, sampled.logprobs, sampled.ranks)))
    top_ids, top_logprobs = (np.asarray(x) for x in (sampled.top_ids, sampled.top_logprobs))
    rows: list[list[TokenLogprobs]] = []
    sample_index = 0
    for request, samples in zip(step.requests, step.samples, strict=True):
        i, wanted = sample_index, request.params.logprobs
        sample_index += samples
        if not samples or wanted is None:
            rows.append([])
            continue
        rows.append(
            [
                TokenLogprobs(
                    tokens[i], logprobs[i], ranks[i], top_ids[i, :wanted].tolist(), top_logprobs[i, :wanted].tolist()
                )
            ]
        )
    return rows
