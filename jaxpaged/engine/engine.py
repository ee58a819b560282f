"""The engine: scheduler and runner joined by a pipeline of one step. Tokens in, tokens out; never text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from numbers import Integral

from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import NotYetSupported, SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step import RequestUpdate
from jaxpaged.device.runner import Launched, Runner
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError

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
        arrival_time: float | None = None,
    ) -> Request:
        """Checks a request against the model and this engine.

        Raises:
          InvalidRequestError: empty prompt, an id outside the vocabulary, a parameter out of this engine's range.
          RequestTooLargeError: no room for one token after the prompt.
        """
        limit = self.config.max_model_len
        assert limit is not None
        check_token_ids(prompt_token_ids, self.vocab_size)
        if len(prompt_token_ids) >= limit:
            raise RequestTooLargeError(
                f"the prompt has {len(prompt_token_ids)} tokens, but the context holds {limit} including at least one "
                f"generated token",
                param="prompt",
            )
        for name in _NOT_BUILT:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                raise NotYetSupported(name, getattr(params, name))
        for token in params.stop_token_ids or ():
            if token >= self.vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids holds {token}, outside the vocabulary of {self.vocab_size}", param="stop_token_ids"
                )
        if params.logprobs is not None and params.logprobs > self.config.max_logprobs:
            raise InvalidRequestError(
                f"logprobs={params.logprobs} exceeds max_logprobs={self.config.max_logprobs}", param="logprobs"
            )
        return Request(
            request_id,
            prompt_token_ids,
            params,
            max_model_len=limit,
            eos_token_ids=self.eos_token_ids,
            seed=self._seeds.getrandbits(63),
            cache_salt=cache_salt,
            arrival_time=arrival_time,
        )

    def add_request(self, request: Request) -> None:
        """Queues a request made by `make_request`.

        Raises:
          InvalidRequestError: its id is in use, or it can never fit.
        """
        self.scheduler.add(request)

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Ends a request at once and frees its blocks; None if there is no such request (any more)."""
        return self.scheduler.abort(request_id)

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


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequestError naming the first value that is not a token id.

    On the device an id out of range would be clamped or wrapped silently.
    """
    if len(token_ids) == 0:
        raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"the prompt holds {token!r}, which is not a token id from 0 to {vocab_size - 1}", param="prompt"
            )
