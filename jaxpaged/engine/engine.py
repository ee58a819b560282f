"""The engine: scheduler and runner joined by a pipeline of one step. Tokens in, tokens out; never text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.request import Grammar, Request, Status
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.size_limits import check_size
from jaxpaged.core.snapshot import EngineSnapshot, snapshot
from jaxpaged.core.step import RequestUpdate
from jaxpaged.device.profiler import Profiler
from jaxpaged.device.runner import Launched, Runner
from jaxpaged.engine.checks import checked_request
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.interrupts import interrupts_held
from jaxpaged.engine.pace import Pace
from jaxpaged.engine.params_fit import check_fit
from jaxpaged.engine.stats import EngineStats
from jaxpaged.engine.step_meter import StepMeter


class Engine:
    """Runs requests to their end, a step at a time. Not thread-safe: one thread drives it.

    Attributes:
      config: resolved options.
      eos_token_ids: ids that end a sequence unless a request ignores them.
      vocab_size: prompts may hold ids below it.
      pooling: how the model makes embeddings of hidden states; see `checkpoint.pooling`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        pooling: str = "last",
    ):
        self.scheduler, self.runner, self.config = scheduler, runner, config
        self.vocab_size, self.eos_token_ids, self.pooling = vocab_size, tuple(eos_token_ids), pooling
        self._in_flight: Launched | None = None
        self._seeds = random.Random(config.seed)
        self._meter, self._profiler = StepMeter(), Profiler()
        self._pace = Pace(config.max_decode_steps, config.max_decode_seconds)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._in_flight is not None or self.scheduler.has_work

    @property
    def facts(self) -> EngineFacts:
        """What requests are checked against."""
        return EngineFacts.of(self)

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state, and so of a whole embedding."""
        return self.runner.module.config.hidden_size

    @property
    def num_programs(self) -> int:
        """Compiled programs."""
        return self.runner.num_programs

    @property
    def warm_programs(self) -> dict[str, list[int]]:
        """Which those are: kind -> sizes."""
        return self.runner.warm_programs

    @property
    def cold_programs(self) -> dict[str, list[int]]:
        """Which are compiled only when they are first needed."""
        return self.runner.cold_programs

    @property
    def num_compilations(self) -> int:
        """Compilations since warm-up; stays 0."""
        return self.runner.recompilations

    @property
    def stats(self) -> EngineStats:
        """Counts as of now, and the times of the last step."""
        scheduler, pool, meter = self.scheduler, self.scheduler.block_manager, self._meter
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            num_used_blocks=pool.num_used_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_blocks=pool.num_blocks,
            num_programs=self.num_programs,
            num_compilations=self.num_compilations,
            num_steps=meter.num_steps,
            num_prompt_tokens=meter.num_prompt_tokens,
            num_generated_tokens=meter.num_generated_tokens,
            num_padding_tokens=meter.num_padding_tokens,
            **{f"{stage}_seconds": seconds for stage, seconds in meter.seconds.items()},
        )

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        bad_word_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        pooling: PoolingParams | None = None,
        arrival_time: float | None = None,
    ) -> Request:
        """Checks a request against the model and this engine.

        Args:
          cache_salt: shares cached blocks only with requests of the same salt.
          priority: smaller goes first, under the "priority" policy.
          bad_word_ids: what `params.bad_words` are in tokens; the engine knows no text.
          grammar: what `params.structured_outputs` was compiled to.
          pooling: the vector that is wanted, in place of tokens.

        Raises:
          InvalidRequestError: empty prompt, an id outside the vocabulary, a parameter out of this engine's range.
          RequestTooLargeError: no room for one token after the prompt, in the context or in the KV cache.
          UnsupportedError: the model's own way of pooling is wanted, and it is none that we have.
        """
        assert bool(params.bad_words) == bool(bad_word_ids), "bad words come with their tokens"
        assert (params.structured_outputs is None) == (grammar is None), "structured outputs come with their grammar"
        request = checked_request(
            request_id,
            prompt_token_ids,
            params,
            self.facts,
            bad_word_ids=bad_word_ids,
            cache_salt=cache_salt,
            priority=priority,
            pooling=pooling,
            grammar=grammar,
            seed=self._seeds.getrandbits(63),
            arrival_time=arrival_time,
        )
        check_size(request, self.scheduler.block_manager, self.scheduler.max_model_len)
        request.device_options = self.runner.pack_options(request)
        return request

    def add_request(self, request: Request) -> None:
        """Queues a request made by `make_request`.

        Raises:
          InvalidRequestError: its id is in use, or it can never fit.
          QueueFullError: as many as `max_num_queued_requests` wait already.
        """
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[RequestUpdate]:
        """Ends a request, or one sample of it, at once and frees its blocks.

        Returns: the last update of each sample that it ended; none if there was none (any more).
        """
        return self.scheduler.abort(request_id, index)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix. Live requests go on."""
        self.scheduler.reset_prefix_cache()

    def snapshot(self) -> EngineSnapshot:
        """Who runs, who waits, and who owns which block, as of now."""
        return snapshot(self.scheduler)

    def start_profile(self, folder: str) -> None:
        """Starts a trace of this process, to be written into a folder.

        Raises:
          InvalidRequestError: one is being taken.
        """
        self._profiler.start(folder)

    def stop_profile(self) -> None:
        """Ends the trace and writes it. Nothing is computed meanwhile.

        Raises:
          InvalidRequestError: none is being taken.
        """
        self._profiler.stop()

    def update_params(self, params: Any) -> None:
        """Takes other weights, from the next step on; cached prefixes are forgotten.

        Nothing is copied or compiled: the arrays are used as they are, and must live as long as they are in use. Live
        requests go on with what the old weights have left in the cache.

        Args:
          params: a pytree of arrays with the structure, shapes and dtypes of `runner.params`.

        Raises:
          CheckpointError: it has not; every difference is listed, and nothing has changed.
        """
        check_fit(self.runner.params, params)
        self.runner.params = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), params, self.runner.params
        )
        self.reset_prefix_cache()

    def step(self) -> list[RequestUpdate]:
        """Launches the next step, then collects the one before it: the host works while the device does.

        If it raises (the device failed, the user interrupted), every request is aborted and the prefix cache is
        forgotten: what was scheduled may not have been written.
        """
        try:
            with interrupts_held():
                return self._step()
        except BaseException:
            self._in_flight = None
            self.scheduler.abort_all()
            self.scheduler.reset_prefix_cache()
            raise

    def use_idle_time(self) -> bool:
        """Does, while there is no request, a piece of what makes later steps quicker. It may take seconds.

        What it raises ends the engine as what a step raises does: arrays that were donated are gone.

        Returns: whether there is more to do, now or later.
        """
        assert not self.has_work
        with interrupts_held():
            return self.runner.use_idle_time()

    def _step(self) -> list[RequestUpdate]:
        ahead = self._in_flight
        if ahead is not None and ahead.step.num_steps > 1:  # where its rows go on is known only then
            self._in_flight = None
            self._meter.start()
            return self._collect(ahead)
        launched = self._launch()
        if not self.config.overlap:
            return [*self._sample_masked(launched), *self._collect(launched)]
        updates = self._collect(self._in_flight)  # moves on the grammars, on which the masks depend
        updates += self._sample_masked(launched)
        self._in_flight = launched
        return updates

    def _launch(self) -> Launched | None:
        """Schedules and starts a step, if there is anything to compute."""
        meter = self._meter
        meter.start()
        scheduled = self.scheduler.schedule(self._pace.num_steps)
        meter.lap("schedule")
        if scheduled is None:
            if left_over := self.scheduler.take_dropped():
                self.runner.drop(left_over)
            return None
        launched = self.runner.launch(scheduled)
        self._pace.launched(scheduled)
        meter.launched(scheduled)
        meter.lap("launch")
        return launched

    def _collect(self, launched: Launched | None) -> list[RequestUpdate]:
        if launched is None:
            return self.scheduler.drain()
        result = self.runner.collect(launched)
        self._meter.lap("collect")
        self._pace.collected(launched.step, result)
        updates = self.scheduler.update(launched.step, result)
        self._meter.collected(result, launched.num_padding_tokens)
        self._meter.lap("update")
        return updates

    def _sample_masked(self, launched: Launched | None) -> list[RequestUpdate]:
        """Starts the sampling of a step that waits for its grammars. One that fails ends only its own sample."""
        if launched is None or not launched.step.masked:
            return []
        step, failures = launched.step, []
        masks = np.full((len(step.masked), -(-self.vocab_size // 32)), -1, np.int32)
        for mask, row in zip(masks, step.masked, strict=True):
            request = step.requests[row]
            if request.status is Status.FINISHED:
                continue
            assert request.grammar is not None
            try:
                request.grammar.fill(mask)
            except Exception as error:
                mask.fill(-1)
                failures.append(self.scheduler.fail(request, f"the grammar failed: {error!r}"))
        self.runner.sample(launched, masks)
        self._meter.lap("sample")
        return failures
