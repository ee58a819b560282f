"""Weights, device state and compiled programs; launches steps and collects their results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import logprob_columns
from jaxpaged.core.step import Admission, Step, StepResult
from jaxpaged.device import batch, kv_cache
from jaxpaged.device.block_store import BlockStore
from jaxpaged.device.buckets import Bucket, BucketTable
from jaxpaged.device.compilation import compilations
from jaxpaged.device.decode_program import Decoded
from jaxpaged.device.forward_programs import ForwardPrograms
from jaxpaged.device.hidden_rows import HiddenRows
from jaxpaged.device.logprobs import Logprobs
from jaxpaged.device.options import admit_options, empty_options, mask_words, options_size, pack_options
from jaxpaged.device.pooling import Pooling
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.device.prompt_logprobs import PromptLogprobs
from jaxpaged.device.records import sampled_logprobs
from jaxpaged.device.samplers import Samplers
from jaxpaged.device.sampling import Sampled
from jaxpaged.device.slots import admission_size, admit, empty_slots, features, pack_admission
from jaxpaged.device.step_program import (
    Forwarded,
    StepOptions,
    abstract,
    program_bytes,
)
from jaxpaged.device.warm_up import Progress, WarmUp, cold_programs
from jaxpaged.errors import RecompilationError
from jaxpaged.models.decoder import Decoder


@dataclass(slots=True)
class Launched:
    """A step that is running on the device, and where its results will appear.

    Attributes:
      forwarded: what sampling needs; None once it has been dispatched.
      tokens: i32[R], of the rows that sample; None until then.
      sampled: these and what else is known of them; None if no row uses a `Feature`.
      prompt_scores: of the step's prompt ranges.
      pooled: sums of the hidden states of its `pooled` ranges; None if it has none.
      num_padding_tokens: how many its program computes beside the step's, each time.
      decoded: how far a step of several went, and what it yielded before `tokens`; None of others.
    """

    step: Step
    forwarded: Forwarded | None
    tokens: jax.Array | None = None
    sampled: Sampled | None = None
    prompt_scores: list[Logprobs] = field(default_factory=list)
    pooled: jax.Array | None = None
    num_padding_tokens: int = 0
    decoded: Decoded | None = None


class Runner:
    """The device half of an engine: owns the params, the page pool and the slots.

    `launch` returns at once; results are read with `collect`, one step later when the engine overlaps.

    Attributes:
      params: the model's weights, a pytree; may be replaced by one of the same shapes and dtypes.
      kv_pages: the page pool; it is there when the weights are.
      slots, options: what the device keeps of running requests.
      programs: the compiled forward pass of each bucket; of those below as well where one step has its own.
      decode_programs: of decode buckets, what does several steps.
      samplers: those of sampling.
      recompilations: compilations by `launch` and `sample` since warm-up; stays 0.
    """

    def __init__(
        self,
        module: Decoder,
        params: dict,
        config: EngineConfig,
        *,
        vocab_size: int,
        buckets: BucketTable,
        cache: Path | None = None,
    ):
        """Allocates the device state; compiles nothing but what sizing the pool needs.

        Args:
          params: the weights; or their shapes and dtypes, which are enough to compile programs (where the pool's size
            does not depend on what the weights leave free): then `place` has to be called before the first step.
          config: resolved options.
          vocab_size: tokens that may be produced.
          buckets: padded shapes.
          cache: folder where compiled programs are kept; None: they are not.
        """
        assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
        self.module, self.params, self.config, self.buckets = module, params, config, buckets
        self.step_options = _step_options(config, vocab_size)
        self._vocab_rows = module.config.vocab_size
        self._max_pages = -(-config.max_model_len // config.block_size)
        self.slots = empty_slots(config.max_num_seqs, config.max_model_len, self._max_pages)
        self.options = empty_options(config.max_num_seqs, self._vocab_rows, config.logits_processors)
        self._store = _program_store(module, self.step_options, cache)
        self._forwards = ForwardPrograms(
            module, self.step_options, config, buckets, abstract((params, self.slots, self.options)), self._store
        )
        self.programs, self.decode_programs = self._forwards.programs, self._forwards.decode_programs
        self.samplers = Samplers(self.step_options, self.slots, self.options, self._vocab_rows, self._store)
        self._admissions: dict[str, jax.stages.Compiled] = {}
        self.recompilations = 0
        self._warm_up: WarmUp | None = None
        model = module.config
        self._hidden_rows = HiddenRows(model.hidden_size, module.dtype, self._store)
        self._prompts = PromptLogprobs(module, self.step_options, params, self._hidden_rows, self._store)
        self._pooling = Pooling(model.hidden_size, module.dtype, config.max_num_seqs, self._store)
        given = config.num_kv_blocks is not None or config.kv_cache_bytes is not None
        step_bytes = 0 if _on_cpu() or given else self._largest_step_bytes()  # compilations: only where it matters
        num_pages = kv_cache.num_pages(config, model, step_bytes=step_bytes)
        self._pool = kv_cache.abstract_pages(model, num_pages, config.block_size, config.kv_cache_dtype)
        self._blocks = BlockStore(self._pool, self._store)
        if not isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
            self.place(params)

    def place(self, params: dict) -> None:
        """Takes the weights, of the shapes and dtypes that were announced, and allocates the page pool."""
        assert abstract(params) == abstract(self.params), "programs are compiled for what was announced"
        self.params = params
        self.kv_pages = kv_cache.empty_pages(self._pool)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, scratch included."""
        return self._pool.shape[1]

    @property
    def num_host_blocks(self) -> int:
        """Blocks that the host memory for swapped requests holds."""
        page = kv_cache.page_bytes(self.module.config, self.config.block_size, self.config.kv_cache_dtype)
        return int(self.config.swap_space * (1 << 30)) // page

    @property
    def num_mask_words(self) -> int:
        """Words of a row of grammar masks."""
        return mask_words(self._vocab_rows)

    @property
    def num_programs(self) -> int:
        """Compiled programs of all kinds."""
        of_steps = len(self.programs) + len(self.decode_programs) + self.samplers.num_programs + len(self._admissions)
        parts = (self._blocks, self._hidden_rows, self._prompts, self._pooling)
        return of_steps + sum(part.num_programs for part in parts)

    @property
    def warm_programs(self) -> dict[str, list[int]]:
        """Which programs are compiled: kind -> sizes, smallest first."""
        compiled = (*tuple(self.programs), *tuple(self.decode_programs))  # at once: a thread may be adding to them
        return {
            "decoding, by requests": sorted({b.rows for b in compiled if b.decode_only}),
            "forward, by tokens": sorted(b.tokens for b in compiled if not b.decode_only),
            "sampling, by rows": self.samplers.sizes,
            "prompt logprobs, by tokens": self._hidden_rows.sizes if self._prompts.num_programs else [],
            "pooling, by tokens": self._pooling.sizes,
        }

    @property
    def cold_programs(self) -> dict[str, list[int]]:
        """Which of them are not: a thread is about to compile them, or could not, or a step that needs one does."""
        return cold_programs(self.buckets, self.warm_programs)

    def unready(self) -> tuple[Bucket, ...]:
        """Buckets that cannot be used as of now: a thread is about to compile their programs."""
        return self._warm_up.unready if self._warm_up else ()

    def pack_options(self, request: Request) -> np.ndarray | None:
        """What a request's `device_options` have to be.

        Raises:
          InvalidRequestError: its options do not fit, or name a logits processor that there is not.
        """
        return pack_options(request, self._vocab_rows, self.config.logits_processors)

    def warm_up(self, progress: Progress | None = None, *, gradually: bool = False) -> None:
        """Compiles every program, and runs each once on padding unless this is a CPU; `gradually`: see `WarmUp`."""
        self.start_warm_up(gradually=gradually).finish(progress)

    def start_warm_up(self, *, gradually: bool = False) -> WarmUp:
        """`warm_up`, but for the waiting: `finish` is to be called when the weights are there."""
        self._warm_up = WarmUp(self, gradually=gradually)
        return self._warm_up

    def use_idle_time(self) -> bool:
        """Runs a bucket for the first time, on padding, if there is one. Returns whether to ask again.

        See `WarmUp.use_one`.
        """
        return self._warm_up is not None and self._warm_up.use_one(self)

    def bucket_programs(self, buckets: Sequence[Bucket]) -> list[Callable[[], Any]]:
        """What compiles each program that steps of these buckets need; the slowest first."""
        needed = self._forwards.needed(buckets, self._pool)
        needed += self.samplers.programs(sorted({self.buckets.result_sizes(bucket).logits for bucket in buckets}))
        hidden = {self.buckets.result_sizes(bucket).hidden for bucket in buckets if not bucket.decode_only}
        return [*needed, *self._hidden_rows.programs(hidden), *self._pooling.programs(hidden)]

    def other_programs(self) -> list[Callable[[], Any]]:
        """What compiles each program that depends on no bucket."""
        blocks = self._blocks.programs(swaps=self.num_host_blocks > 0)
        return [self._admit_program, self._admit_options_program, *blocks, *self._prompts.programs()]

    def run_padding(self, buckets: Sequence[Bucket]) -> None:
        """Runs a step of each bucket that holds no request, both ways of sampling included."""
        for bucket in buckets:
            if bucket in self.decode_programs:
                self._forward(Step(num_steps=2), bucket)
            plain = self._forward(Step(), bucket)
            full = dataclasses.replace(plain)
            self._sample(plain)
            self._sample(full, self.samplers.no_masks(self.buckets.result_sizes(bucket).logits))
            self.collect(plain)
            self.collect(full)

    def launch(self, step: Step) -> Launched:
        """Starts a step on the device. Steps run in the order of their launches.

        A step with `masked` rows samples when `sample` is called; until then no other step may be launched.

        Raises:
          RecompilationError: strict mode, and the step needed a compilation.
        """
        assert step.slots
        with self._no_compilations():
            self.kv_pages = self._blocks.apply(self.kv_pages, step)
            for admission in step.admissions:
                self._take_in(admission)
            # What looks at prompts has programs for the hidden states of mixed buckets only.
            mixed = bool(step.prompt_ranges or step.pooled)
            bucket = self.buckets.pick(len(step.slots), step.total_tokens, self.unready(), mixed=mixed)
            if self._warm_up is not None:
                self._warm_up.unused.discard(bucket)
            launched = self._forward(step, bucket)
            if not step.masked:
                self._sample(launched)
        return launched

    def drop(self, keys: Sequence[int]) -> None:
        """Frees host copies of blocks, where no step is to be launched that would say so."""
        self._blocks.drop(keys)

    def sample(self, launched: Launched, masks: np.ndarray) -> None:
        """Starts the sampling of a launched step with `masked` rows.

        Args:
          masks: i32[len(step.masked), num_mask_words], a row for each of them: bit i of word w allows token 32 w + i.
            They are not to be changed afterwards.

        Raises:
          RecompilationError: as `launch`.
        """
        step, forwarded = launched.step, launched.forwarded
        assert forwarded is not None and len(masks) == len(step.masked)
        with self._no_compilations():
            shape = len(forwarded.logits), self.num_mask_words
            if masks.shape != shape:  # else all rows are masked, in their order
                given, masks = masks, np.full(shape, -1, np.int32)
                order = np.cumsum(step.samples) - 1
                masks[order[step.masked], : given.shape[1]] = given
            self._sample(launched, masks)

    def collect(self, launched: Launched) -> StepResult:
        """Waits for a step and returns its tokens."""
        step, sampled = launched.step, launched.sampled
        assert launched.tokens is not None, "a step with masked rows was not sampled"
        tokens, num_steps = np.asarray(launched.tokens)[None], 1
        if launched.decoded is not None:
            num_steps = int(np.asarray(launched.decoded.num_steps))
            tokens = np.concatenate([np.asarray(launched.decoded.tokens)[: num_steps - 1], tokens])
        rows = iter(tokens.T.tolist())
        token_ids = [next(rows) if samples else [] for samples in step.samples]
        logprobs = None
        if step.wants_logprobs:
            assert sampled is not None, "a row that wants them uses a feature"
            logprobs = sampled_logprobs(step, sampled, self.step_options.vocab_size)
        scores = self._prompts.collect(step, launched.prompt_scores)
        return StepResult(token_ids, logprobs, scores, self._pooling.collect(step, launched.pooled), num_steps)

    def _take_in(self, admission: Admission) -> None:
        """Tells the device about a request that takes a slot."""
        request, max_len = admission.request, self.slots.history.shape[1]
        used = features(request, self.config.logprobs_mode)
        packed = pack_admission(admission, used, max_len, self._max_pages)
        self.slots = self._admit_program()(self.slots, packed)
        self.samplers.admit(admission.slot, used)
        if request.device_options is not None:
            self.options = self._admit_options_program()(self.options, np.int32(admission.slot), request.device_options)

    def _forward(self, step: Step, bucket: Bucket) -> Launched:
        packed = batch.pack(step, bucket, scratch_slot=len(self.slots.history) - 1, block_size=self.config.block_size)
        state, decoded = (self.params, self.kv_pages, self.slots), None
        if self._forwards.loops(bucket, step.num_steps):
            decode = self._forwards.decode_program(bucket, self._pool)
            self.kv_pages, self.slots, forwarded, decoded = decode(*state, self.options, packed)
        else:
            self.kv_pages, self.slots, forwarded = self._forwards.program(bucket, self._pool)(*state, packed)
        launched = Launched(step, forwarded, num_padding_tokens=bucket.tokens - step.total_tokens)
        if step.num_steps > 1:
            launched.decoded = decoded
        if step.prompt_ranges:
            launched.prompt_scores = self._prompts.launch(self.params, forwarded.hidden, step)
        if step.pooled:
            launched.pooled = self._pooling.launch(forwarded.hidden, step)
        return launched

    def _sample(self, launched: Launched, masks: np.ndarray | jax.Array | None = None) -> None:
        forwarded, step = launched.forwarded, launched.step
        assert forwarded is not None, "sampled twice"
        launched.forwarded = None
        self.slots, launched.tokens, launched.sampled = self.samplers.sample(
            self.slots, self.options, step.slots, forwarded, masks
        )
        jax.tree.map(lambda x: x.copy_to_host_async(), (launched.tokens, launched.decoded))
        if step.wants_logprobs:
            jax.tree.map(lambda x: x.copy_to_host_async(), launched.sampled)

    @contextlib.contextmanager
    def _no_compilations(self) -> Iterator[None]:
        """Counts what compiles meanwhile; in strict mode that is an error."""
        before = compilations.count
        yield
        self.recompilations += compilations.count - before
        if self.config.strict and self.recompilations:
            raise RecompilationError(f"{self.recompilations} programs were compiled after warm-up")

    def _admit_program(self) -> jax.stages.Compiled:
        packed = jax.ShapeDtypeStruct((admission_size(self.slots),), jnp.int32)
        return self._admission("slots", admit, self.slots, packed)

    def _admit_options_program(self) -> jax.stages.Compiled:
        packed = jax.ShapeDtypeStruct((options_size(self.options),), jnp.int32)
        return self._admission("options", admit_options, self.options, jax.ShapeDtypeStruct((), jnp.int32), packed)

    def _admission(self, name: str, function: Callable[..., Any], state: Any, *arguments: Any) -> jax.stages.Compiled:
        if name not in self._admissions:
            shapes, jitted = (abstract(state), *arguments), jax.jit(function, donate_argnums=0)
            self._admissions[name] = self._store.program(f"admit_{name}", shapes, lambda: jitted.lower(*shapes))
        return self._admissions[name]

    def _largest_step_bytes(self) -> int:
        """What the largest step takes besides the pool, from compilations against a pool of two pages.

        That is the temporaries and results of the forward pass, or of the loop of decode steps if it takes more; the
        scores of as many prompt tokens, the sums of hidden states, and the most that sampling, scoring or summing
        takes besides.
        """
        model, bucket = self.module.config, self.buckets.mixed[-1]
        pool = kv_cache.abstract_pages(model, 2, self.config.block_size, self.config.kv_cache_dtype)
        forward = self._forwards.step_bytes(pool)
        sampler = program_bytes(self.samplers.full_program(self.buckets.sample_rows[-1]))
        scores, scoring = self._prompts.step_bytes(bucket.tokens)
        sums, summing = self._pooling.step_bytes(bucket.tokens)
        return forward + scores + sums + max(sum(sampler), scoring, summing)


def _program_store(module: Decoder, options: StepOptions, cache: Path | None) -> ProgramStore:
    """Of programs that our sources and these options tell all of; callbacks to this process cannot be kept."""
    model = type(module)
    ours = model.__module__.startswith("jaxpaged.models.") and not options.processors and not options.debug
    return ProgramStore(cache if ours else None, repr((model.__qualname__, module.config, module.dtype, options)))


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _step_options(config: EngineConfig, vocab_size: int) -> StepOptions:
    return StepOptions(
        page_size=config.block_size,
        vocab_size=vocab_size,
        max_logprobs=logprob_columns(config.max_logprobs, vocab_size),
        implementation=config.attention_implementation,
        debug=config.debug_kernels,
        small_head=8 if _on_cpu() else 0,
        processors=config.logits_processors,
    )
