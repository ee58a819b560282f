"""An engine without a model: it plays scripted tokens through the interface of `jaxpaged.engine.engine.Engine`."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.snapshot import EngineSnapshot, block_map, describe
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.engine.checks import checked_request
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.stats import EngineStats
from jaxpaged.errors import InvalidRequestError, QueueFullError, RequestTooLargeError

HIDDEN_SIZE = 16

Script = Sequence[int] | Callable[[Request], Sequence[int]]


def hidden_state(token_ids: Sequence[int]) -> np.ndarray:
    """What stands for the hidden states of a prompt."""
    return np.random.default_rng(list(token_ids)).standard_normal(HIDDEN_SIZE)


class FakeEngine:
    """Token t of a sample is `script[t]`; when the script is over it starts again.

    What a request may ask for is checked as in the real engine. A beam search gives its n sequences in one step.

    Attributes:
      script: the tokens, or a function that gives them for a sample (`Request.index` tells which); may be replaced at
        any time.
      tops: the most likely tokens of every position, when logprobs are asked for; -1.0, -2.0, ... apart.
      sampled_logprob: the logprob of every sampled or prompt token.
      delay: seconds a step takes.
      clock: gives the time; may be replaced.
      tokens_per_step: tokens a sample gets in one step, or in its first step, its second one, and so on; then one.
      follow_grammars: whether a token that a request's grammar does not allow is replaced by one that it allows: the
        end if it may be, else the lowest; otherwise such a token fails the request.
      fail_with: raised by the next step.
      queue_limit: live requests from which on `add_request` raises QueueFullError.
      num_free: blocks that nobody holds; a request holds one block for every 16 tokens of its prompt.
      live: samples that run, by request id and index.
      requests: all that were added, in order.
      added, aborted: request ids, in order.
      pooling: how "the model" pools; every embedding is `hidden_state` of the prompt, cut and scaled.
      num_resets: how often the prefix cache was to be forgotten.
      profile: the folder of the trace that is being taken.
      counts: what `stats` tells that does not follow from the above, by name; may be set.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int = 512,
        num_blocks: int = 64,
        delay: float = 0.0,
        tokens_per_step: int | Sequence[int] = 1,
        **config_options,
    ):
        self.script, self.vocab_size, self.eos_token_ids = script, vocab_size, tuple(eos_token_ids)
        self.config = EngineConfig(
            model="fake", max_model_len=max_model_len, max_num_seqs=64, num_kv_blocks=num_blocks, **config_options
        )
        self.delay, self.tokens_per_step = delay, tokens_per_step
        self.clock = time.monotonic
        self.num_blocks = self.num_free = num_blocks
        self.tops: list[int] = []
        self.sampled_logprob = -0.5
        self.follow_grammars = False
        self.fail_with: BaseException | None = None
        self.queue_limit: int | None = None
        self.live: dict[tuple[str, int], Request] = {}
        self.requests: list[Request] = []
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.num_programs, self.num_compilations = 3, 0
        self.warm_programs, self.cold_programs = {"forward, by tokens": [1, 8]}, {"pooling, by tokens": [8]}
        self.hidden_size, self.pooling = HIDDEN_SIZE, "last"
        self.num_resets = 0
        self.idle_work = 0
        self.idle_times: list[float] = []
        self.last_step = 0.0
        self.profile: str | None = None
        self.counts = {"num_steps": 0, "num_prompt_tokens": 0, "num_generated_tokens": 0, "schedule_seconds": 0.0}

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.live),
            num_used_blocks=self.num_blocks - self.num_free,
            num_blocks=self.num_blocks,
            num_programs=self.num_programs,
            num_compilations=self.num_compilations,
            **self.counts,  # type: ignore[arg-type]
        )

    def use_idle_time(self) -> bool:
        assert not self.live
        self.idle_times.append(time.monotonic())
        return len(self.idle_times) < self.idle_work

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def start_profile(self, folder: str) -> None:
        if self.profile is not None:
            raise InvalidRequestError("a profile is being taken already: stop it first")
        self.profile = folder

    def stop_profile(self) -> None:
        if self.profile is None:
            raise InvalidRequestError("no profile is being taken: start one first")
        (Path(self.profile) / "trace").touch()
        self.profile = None

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
        return checked_request(
            request_id,
            prompt_token_ids,
            params,
            EngineFacts.of(self),
            bad_word_ids=bad_word_ids,
            cache_salt=cache_salt,
            priority=priority,
            pooling=pooling,
            grammar=grammar,
            arrival_time=arrival_time,
        )

    def add_request(self, request: Request) -> None:
        if self.queue_limit is not None and len({request_id for request_id, _ in self.live}) >= self.queue_limit:
            raise QueueFullError(f"{self.queue_limit} requests wait already")
        needed = self._blocks(request)
        if needed > self.num_blocks:
            raise RequestTooLargeError(f"the prompt needs {needed} blocks, but there are {self.num_blocks}")
        assert (request.request_id, 0) not in self.live
        params, request.queued_time = request.params, self.clock()
        for index in range(params.n if params.use_beam_search else params.num_samples):
            sample = copy.copy(request)
            sample.index, sample.all_token_ids = index, list(request.all_token_ids)
            sample.grammar = request.grammar.copy() if request.grammar is not None else None
            self.live[request.request_id, index] = sample
        self.counts["num_prompt_tokens"] += request.num_prompt_tokens
        self.requests.append(request)
        self.added.append(request.request_id)
        self.num_free -= needed

    def abort(self, request_id: str, index: int | None = None) -> list[RequestUpdate]:
        samples = [s for (i, k), s in self.live.items() if i == request_id and index in (None, k)]
        if samples:
            self.aborted.append(request_id)
        return [self._end(sample, RequestUpdate(request_id, [], index=sample.index), "abort") for sample in samples]

    def snapshot(self) -> EngineSnapshot:
        """Its blocks are numbered as if each request had taken the first free ones; samples of one share theirs."""
        samples, now = list(self.live.values()), time.monotonic()
        tables: list[list[int]] = []
        first: dict[str, list[int]] = {}
        for sample in samples:
            begin = 1 + sum(map(len, first.values()))
            tables.append(first.setdefault(sample.request_id, list(range(begin, begin + self._blocks(sample)))))
        owners, blocks = block_map(self.num_blocks, tables)
        told = [
            msgspec.structs.replace(describe(sample, now), status="running", num_blocks=len(table))
            for sample, table in zip(samples, tables, strict=True)
        ]
        return EngineSnapshot(
            block_size=self.config.block_size,
            num_blocks=self.num_blocks,
            num_used_blocks=self.num_blocks - self.num_free,
            num_cached_blocks=0,
            num_running=len(told),
            num_waiting=0,
            requests=told,
            owners=owners,
            blocks=blocks,
        )

    def step(self) -> list[RequestUpdate]:
        if self.delay:
            time.sleep(self.delay)
        if self.fail_with is not None:
            raise self.fail_with
        updates = [self._advance(sample) for sample in list(self.live.values())]
        self.counts["num_steps"] += 1
        self.counts["num_generated_tokens"] += sum(len(update.new_token_ids) for update in updates)
        self.counts["schedule_seconds"] = 1e-5
        self.last_step = time.monotonic()
        return updates

    def _end(self, sample: Request, update: RequestUpdate, reason: str, what: int | str | None = None) -> RequestUpdate:
        update.finish_reason, update.stop_reason = reason, what
        del self.live[sample.request_id, sample.index]
        if all(request_id != sample.request_id for request_id, _ in self.live):
            self.num_free += self._blocks(sample)
        return update

    @staticmethod
    def _blocks(request: Request) -> int:
        return math.ceil(request.num_prompt_tokens / 16)

    def _advance(self, sample: Request) -> RequestUpdate:
        params, cached = sample.params, min(4, sample.num_prompt_tokens - 1)
        if sample.scheduled_time is None:
            sample.scheduled_time = self.clock()
        update = RequestUpdate(
            sample.request_id,
            [],
            num_cached_tokens=cached,
            index=sample.index,
            queued_time=sample.queued_time,
            scheduled_time=sample.scheduled_time,
        )
        if params.timeout is not None and self.clock() - sample.arrival_time >= params.timeout:
            return self._end(sample, update, "abort", "timeout")
        if params.prompt_logprobs is not None and sample.index == 0 and not sample.num_output_tokens:
            prompt = sample.prompt_token_ids[1:]
            update.prompt_logprobs = [self._logprobs(token, params.prompt_logprobs) for token in prompt]
        if sample.pooling is not None:
            update.embedding = sample.pooling.vector(hidden_state(sample.prompt_token_ids), 1).tobytes()
            return self._end(sample, update, "stop")
        if params.max_tokens == 0:
            return self._end(sample, update, "length")
        update.logprobs = None if params.logprobs is None and params.num_samples == params.n else []
        count = 10**9 if params.use_beam_search else self._step_size(sample)
        while len(update.new_token_ids) < count:
            end = self._add_token(sample, update)
            if end is not None:
                return self._end(sample, update, *end)
        return update

    def _add_token(self, sample: Request, update: RequestUpdate) -> tuple[str, int | str | None] | None:
        script = self.script(sample) if callable(self.script) else self.script
        token = script[sample.num_output_tokens % len(script)]
        if self.follow_grammars and sample.grammar is not None:
            token = self._allowed(sample.grammar, token)
        if sample.grammar is not None and not sample.grammar.accept(token):
            return "error", sample.grammar.error
        sample.all_token_ids.append(token)
        update.new_token_ids.append(token)
        if update.logprobs is not None:
            update.logprobs.append(self._logprobs(token, sample.params.logprobs or 0, sample.params.logprob_token_ids))
        ending = sample.ending()
        if ending is None and sample.grammar is not None and sample.grammar.finished:
            return "stop", None
        return ending

    def _step_size(self, sample: Request) -> int:
        sizes, before = self.tokens_per_step, sample.num_output_tokens
        if isinstance(sizes, int):
            return sizes
        return next((end - before for end in itertools.accumulate(sizes) if end > before), 1)

    def _allowed(self, grammar: Grammar, token: int) -> int:
        mask = np.zeros(math.ceil(self.vocab_size / 32), np.int32)
        grammar.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return next((wanted for wanted in (token, *self.eos_token_ids) if wanted in allowed), int(allowed[0]))

    def _logprobs(self, token: int, k: int, ids: list[int] | None = None) -> TokenLogprobs:
        tops = list(range(self.vocab_size)) if k < 0 else self.tops[:k]
        if ids is not None:
            return TokenLogprobs(token, self.sampled_logprob, self._rank(token), ids, [-1.0] * len(ids), [7] * len(ids))
        return TokenLogprobs(token, self.sampled_logprob, self._rank(token), tops, [-1.0 - i for i in range(len(tops))])

    def _rank(self, token: int) -> int:
        return self.tops.index(token) + 1 if token in self.tops else len(self.tops) + 1
