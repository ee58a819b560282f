"""An engine without a model: it plays scripted tokens through the interface of `jaxpaged.engine.engine.Engine`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from numbers import Integral

from jaxpaged.config import EngineConfig
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError

Script = Sequence[int] | Callable[[Request], Sequence[int]]


class FakeEngine:
    """Token t of a request is `script[t]`; when the script is over it starts again.

    Attributes:
      script: the tokens, or a function that gives them for a request; may be replaced at any time.
      tops: the most likely tokens of every position, when logprobs are asked for; -1.0, -2.0, ... apart.
      sampled_logprob: the logprob of every sampled token.
      delay: seconds a step takes.
      tokens_per_step: tokens a request gets in one step.
      fail_with: raised by the next step.
      num_free: blocks that nobody holds; a request holds one block for every 16 tokens it may reach.
      added, aborted: request ids, in order.
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
        tokens_per_step: int = 1,
    ):
        self.script, self.vocab_size, self.eos_token_ids = script, vocab_size, tuple(eos_token_ids)
        self.config = EngineConfig(model="fake", max_model_len=max_model_len, max_num_seqs=64, num_kv_blocks=num_blocks)
        self.delay, self.tokens_per_step = delay, tokens_per_step
        self.num_blocks = self.num_free = num_blocks
        self.tops: list[int] = []
        self.sampled_logprob = -0.5
        self.fail_with: BaseException | None = None
        self.live: dict[str, Request] = {}
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.num_programs, self.num_compilations = 3, 0

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def make_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        assert self.config.max_model_len is not None
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
        for token in prompt_token_ids:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < self.vocab_size:
                raise InvalidRequestError(f"the prompt holds {token!r}, which is not a token id", param="prompt")
        if len(prompt_token_ids) >= self.config.max_model_len:
            raise RequestTooLargeError(f"the prompt has {len(prompt_token_ids)} tokens", param="prompt")
        if params.logprobs is not None and params.logprobs > self.config.max_logprobs:
            raise InvalidRequestError(f"logprobs={params.logprobs} exceeds max_logprobs", param="logprobs")
        return Request(
            request_id,
            prompt_token_ids,
            params,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self.eos_token_ids,
        )

    def add_request(self, request: Request) -> None:
        needed = math.ceil(request.num_prompt_tokens / 16)
        if needed > self.num_blocks:
            raise RequestTooLargeError(f"the prompt needs {needed} blocks, but there are {self.num_blocks}")
        assert request.request_id not in self.live
        self.live[request.request_id] = request
        self.added.append(request.request_id)
        self.num_free -= needed

    def abort(self, request_id: str) -> RequestUpdate | None:
        request = self.live.get(request_id)
        if request is None:
            return None
        self._free(request)
        self.aborted.append(request_id)
        return RequestUpdate(request_id, [], finish_reason="abort")

    def step(self) -> list[RequestUpdate]:
        if self.delay:
            time.sleep(self.delay)
        if self.fail_with is not None:
            raise self.fail_with
        return [self._advance(request) for request in list(self.live.values())]

    def _free(self, request: Request) -> None:
        del self.live[request.request_id]
        self.num_free += math.ceil(request.num_prompt_tokens / 16)

    def _advance(self, request: Request) -> RequestUpdate:
        update = RequestUpdate(request.request_id, [], num_cached_tokens=min(4, request.num_prompt_tokens - 1))
        if request.params.logprobs is not None:
            update.logprobs = []
        while len(update.new_token_ids) < self.tokens_per_step and update.finish_reason is None:
            script = self.script(request) if callable(self.script) else self.script
            token = script[request.num_output_tokens % len(script)]
            request.all_token_ids.append(token)
            update.new_token_ids.append(token)
            if update.logprobs is not None:
                update.logprobs.append(self._logprobs(token, request.params.logprobs or 0))
            self._check_end(request, token, update)
        if update.finish_reason is not None:
            self._free(request)
        return update

    def _logprobs(self, token: int, k: int) -> TokenLogprobs:
        tops = self.tops[:k]
        rank = self.tops.index(token) + 1 if token in self.tops else len(self.tops) + 1
        return TokenLogprobs(token, self.sampled_logprob, rank, tops, [-1.0 - i for i in range(len(tops))])

    def _check_end(self, request: Request, token: int, update: RequestUpdate) -> None:
        if request.num_output_tokens >= request.params.min_tokens:
            if token in request.eos_token_ids:
                update.finish_reason = "stop"
            elif token in request.stop_token_ids:
                update.finish_reason, update.stop_reason = "stop", token
        if update.finish_reason is None and request.num_tokens >= request.max_total_tokens:
            update.finish_reason = "length"
