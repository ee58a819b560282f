"""The engine: scheduler and runner joined by a pipeline of one step. Tokens in, tokens out; never text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.sampling_params import NotYetSupported, SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import RequestUpdate
from jaxpaged.device.runner import Launched, Runner
from jaxpaged.engine.checks import check_scheduling, checked_params, checked_prompt

_DEFAULTS = SamplingParams()
_NOT_BUILT = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "bad_words", "timeout", "prompt_logprobs", "logprob_token_ids", "logprobs_mode", "structured_outputs",
    "logits_processors", "use_beam_search", "spaces_between_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip


class Engine:
    """Runs requests to their end, a step at a time. Not thread-safe: one thread drives it.

    Attributes:
      config: resolved options.
      eos_token_ids: ids that end a sequence unless a request ignores them.
      vocab_size: prompts may hold ids below it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
    ):
        self.scheduler, self.runner, self.config = scheduler, runner, config
        self.vocab_size, self.eos_token_ids = vocab_size, tuple(eos_token_ids)
        self._in_flight: Launched | None = None
        self._seeds = random.Random(config.seed)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._in_flight is not None or self.scheduler.has_work

    @property
    def num_programs(self) -> int:
        """Compiled step programs."""
        return len(self.runner.programs)

    @property
    def num_compilations(self) -> int:
        """Compilations since warm-up; stays 0."""
        return self.runner.recompilations

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
        arrival_time: float | None = None,
    ) -> Request:
        """Checks a request against the model and this engine.

        Args:
          cache_salt: shares cached blocks only with requests of the same salt.
          priority: smaller goes first, under the "priority" policy.
          bad_word_ids: what `params.bad_words` are in tokens; the engine knows no text.
          grammar: what `params.structured_outputs` was compiled to.

        Raises:
          InvalidRequestError: empty prompt, an id outside the vocabulary, a parameter out of this engine's range.
          RequestTooLargeError: no room for one token after the prompt.
        """
        for name in _NOT_BUILT:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                raise NotYetSupported(name, getattr(params, name))
        assert bool(params.bad_words) == bool(bad_word_ids), "bad words come with their tokens"
        assert (params.structured_outputs is None) == (grammar is None), "structured outputs come with their grammar"
        check_scheduling(priority, cache_salt)
        params = checked_params(params, self.config, self.vocab_size, bad_word_ids)
        assert self.config.max_model_len is not None
        return Request(
            request_id,
            checked_prompt(prompt_token_ids, params, self.config, self.vocab_size),
            params,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self.eos_token_ids,
            seed=self._seeds.getrandbits(63),
            cache_salt=cache_salt,
            priority=priority,
            bad_word_ids=bad_word_ids,
            grammar=grammar,
            arrival_time=arrival_time,
        )

    def add_request(self, request: Request) -> None:
        """Queues a request made by `make_request`.

        Raises:
          InvalidRequestError: its id is in use, or it can never fit.
        """
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[RequestUpdate]:
        """Ends a request, or one sample of it, at once and frees its blocks.

        Returns: the last update of each sample that it ended; none if there was none (any more).
        """
        update = self.scheduler.abort(request_id)
        return [] if update is None else [update]

    def step(self) -> list[RequestUpdate]:
        """Launches the next step, then collects the one before it: the host works while the device does.

        If it raises (the device failed, the user interrupted), every request is aborted and the prefix cache is
        forgotten: what was scheduled may not have been written.
        """
        try:
            return self._step()
        except BaseException:
            self._in_flight = None
            self.scheduler.abort_all()
            self.scheduler.reset_prefix_cache()
            raise

    def _step(self) -> list[RequestUpdate]:
        scheduled = self.scheduler.schedule()
        launched = self.runner.launch(scheduled) if scheduled else None
        ready = self._in_flight if self.config.overlap else launched
        self._in_flight = launched if self.config.overlap else None
        return self.scheduler.update(ready.step, self.runner.collect(ready)) if ready else []
