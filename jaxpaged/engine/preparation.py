"""What a request needs before it can be submitted: tokens, checks, a grammar. None of it runs in the event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.size_limits import check_length
from jaxpaged.engine.checks import as_token_ids, check_params, checked_request
from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.messages import AddRequest
from jaxpaged.errors import EngineDeadError, InvalidRequestError
from jaxpaged.text.bad_words import bad_word_ids
from jaxpaged.text.chat import render_chat
from jaxpaged.text.detokenizer import prompt_text
from jaxpaged.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

T = TypeVar("T")
_MOST_SETTLED = 8


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request that has not been submitted.

    Attributes:
      request: as the front follows it, under an id of its own, whatever id the caller gave. The core makes its own.
      external_id: the caller's id, which outputs carry. It need not be unique.
      prompt: the text, if the prompt was given as text.
      prompt_offsets: where in its text each prompt token starts, if its log-probabilities are wanted.
    """

    request: Request
    external_id: str
    prompt: str | None
    prompt_offsets: list[int] | None = None

    @property
    def message(self) -> AddRequest:
        """What its core is sent."""
        request = self.request
        return AddRequest(
            request.request_id,
            request.prompt_token_ids,
            request.params,
            request.arrival_time,
            request.pooling,
            request.cache_salt,
            request.priority,
            [list(ids) for ids in request.bad_word_ids],
        )


class Preparation:
    """Prepares requests: text in one thread, chat templates in another, grammars that are not known yet in a third.

    Its coroutines raise EngineDeadError once it is closed.
    """

    def __init__(self, client: EngineCoreClient, tokenizer: Tokenizer):
        self._client, self._tokenizer = client, tokenizer
        self._counter = itertools.count()
        self._closed = False
        self._settled: tuple[tuple[SamplingParams, list[list[int]]], ...] = ()  # and their bad words
        self._text_pool = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged-text")
        self._chat_pool = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged-chat")  # slow ones delay no text
        facts = client.facts
        self._grammars = client.grammars or GrammarCompiler(tokenizer, facts.vocab_size, facts.eos_token_ids)
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged-grammar")  # nor do these
        self._grammar_pool.submit(self._grammars.prepare)  # if it fails, so does the first request with a grammar

    async def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        *,
        add_special_tokens: bool,
        cache_salt: str | None,
        priority: int,
        pooling: PoolingParams | None,
    ) -> PreparedRequest:
        """As `AsyncLLM.prepare`."""
        arrival_time = time.monotonic()
        number = next(self._counter)
        external_id = request_id if request_id is not None else f"request-{number}"
        internal_id = f"{external_id}#{number}"  # a client's id may come twice, or again while its abort is under way
        known_bad_words = next((words for known, words in self._settled if known is params), None)
        if known_bad_words is None:
            await self._check_grammar(params)
        text = prompt if isinstance(prompt, str) else None

        def make() -> PreparedRequest:
            bad_words = self._settle(params) if known_bad_words is None else known_bad_words
            token_ids = as_token_ids(prompt) if text is None else self._encode(text, params, add_special_tokens)
            request = checked_request(
                internal_id,
                token_ids,
                params,
                self._client.facts,
                params_are_checked=True,
                bad_word_ids=bad_words,
                cache_salt=cache_salt,
                priority=priority,
                pooling=pooling,
                end_ids=self._tokenizer.special_ids,
                arrival_time=arrival_time,
            )
            self._check_length(request)
            offsets = None
            if params.prompt_logprobs is not None:
                _, offsets = prompt_text(self._tokenizer, request.prompt_token_ids, text, params)
            return PreparedRequest(request, external_id, text, offsets)

        return await self._off_loop(self._text_pool, make)

    async def render_chat(self, messages: Sequence[Any], /, **options: Any) -> list[int]:
        """`text.chat.render_chat`, of what may fit the context."""
        return await self._off_loop(
            self._chat_pool,
            lambda: render_chat(self._tokenizer, messages, max_tokens=self._max_model_len, **options),
        )

    async def prompt_text(self, prepared: PreparedRequest, *, as_given: bool) -> tuple[str, list[int]]:
        """As `AsyncLLM.prompt_text`."""
        request, prompt = prepared.request, prepared.prompt if as_given else None
        return await self._off_loop(
            self._text_pool, lambda: prompt_text(self._tokenizer, request.prompt_token_ids, prompt, request.params)
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As `AsyncLLM.encode`."""

        def encode() -> list[int]:
            self._tokenizer.check_length(text, self._max_model_len, cut=True)
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self._off_loop(self._text_pool, encode)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """As `AsyncLLM.decode`."""

        def decode() -> str:
            size = self._client.facts.vocab_size
            for token in token_ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                    raise InvalidRequestError(
                        f"tokens hold {token!r:.80}, which is not a token id from 0 to {size - 1}", param="tokens"
                    )
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return await self._off_loop(self._text_pool, decode)

    def close(self) -> None:
        """Drops what waits, and lets nothing long go on."""
        self._closed = True
        self._grammars.close()
        for pool in (self._text_pool, self._chat_pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _check_grammar(self, params: SamplingParams) -> None:
        """Tries out what `structured_outputs` says. One that is known does not wait for those that are not."""
        wanted, grammars = params.structured_outputs, self._grammars
        if wanted is None:
            return
        known = await self._off_loop(self._text_pool, lambda: grammars.find(wanted, ignore_eos=params.ignore_eos))
        if known is None:
            await self._off_loop(self._grammar_pool, lambda: grammars.compile(wanted, ignore_eos=params.ignore_eos))

    def _settle(self, params: SamplingParams) -> list[list[int]]:
        """Checks parameters whose grammar is good; their bad words.

        A few are remembered: the prompts of one request share theirs, which may take longer than the prompts.
        """
        facts, bad_words = self._client.facts, bad_word_ids(self._tokenizer, params.bad_words)
        check_params(params, facts.config, facts.vocab_size, bad_words)
        self._settled = (*self._settled[-_MOST_SETTLED + 1 :], (params, bad_words))
        return bad_words

    def _encode(self, prompt: str, params: SamplingParams, add_special_tokens: bool) -> list[int]:
        cut = params.truncate_prompt_tokens is not None
        self._tokenizer.check_length(prompt, self._max_model_len, cut=cut)
        return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def _check_length(self, request: Request) -> None:
        config, new = self._client.facts.config, int(request.pooling is None)
        assert config.num_kv_blocks, "not resolved"
        check_length(request.num_prompt_tokens, self._max_model_len, config.num_kv_blocks, config.block_size, new=new)

    @property
    def _max_model_len(self) -> int:
        most = self._client.facts.config.max_model_len
        assert most
        return most

    async def _off_loop(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except (RuntimeError, asyncio.CancelledError) as e:
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):  # it was not the caller who cancelled
                raise EngineDeadError("the engine is shutting down") from e
            raise
