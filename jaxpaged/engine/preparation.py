"""What a request needs before it can be submitted: tokens, checks, a grammar. None of it runs in the event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpaged.core.request import Grammar, Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.engine_like import EngineLike
from jaxpaged.errors import EngineDeadError
from jaxpaged.text.bad_words import bad_word_ids
from jaxpaged.text.chat import render_chat
from jaxpaged.text.detokenizer import prompt_text
from jaxpaged.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request that has not been submitted.

    Attributes:
      request: under an id of its own, whatever id the caller gave.
      external_id: the caller's id, which outputs carry. It need not be unique.
      prompt: the text, if the prompt was given as text.
      prompt_offsets: where in its text each prompt token starts, if its log-probabilities are wanted.
    """

    request: Request
    external_id: str
    prompt: str | None
    prompt_offsets: list[int] | None = None


class Preparation:
    """Prepares requests: text in one thread, grammars that have not been seen before in another.

    Its coroutines raise EngineDeadError once it is closed.
    """

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer):
        self._engine, self._tokenizer = engine, tokenizer
        self._counter = itertools.count()
        self._closed = False
        self._text_pool = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged-text")
        self._grammars = GrammarCompiler(tokenizer, engine.vocab_size, engine.eos_token_ids)
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged-grammar")  # slow ones delay no text
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
    ) -> PreparedRequest:
        """As `AsyncLLM.prepare`."""
        arrival_time = time.monotonic()
        number = next(self._counter)
        external_id = request_id if request_id is not None else f"request-{number}"
        internal_id = f"{external_id}#{number}"  # a client's id may come twice, or again while its abort is under way
        grammar = await self._grammar(params)
        text = prompt if isinstance(prompt, str) else None

        def make() -> PreparedRequest:
            request = self._engine.make_request(
                internal_id,
                self._encode(prompt, params, add_special_tokens) if isinstance(prompt, str) else prompt,
                params,
                cache_salt=cache_salt,
                priority=priority,
                bad_word_ids=bad_word_ids(self._tokenizer, params.bad_words),
                grammar=grammar,
                arrival_time=arrival_time,
            )
            offsets = None
            if params.prompt_logprobs is not None:
                _, offsets = prompt_text(self._tokenizer, request.prompt_token_ids, text, params)
            return PreparedRequest(request, external_id, text, offsets)

        return await self._off_loop(self._text_pool, make)

    async def render_chat(self, messages: Sequence[Any], /, **options: Any) -> list[int]:
        """`text.chat.render_chat`, of what may fit the context."""
        return await self._off_loop(
            self._text_pool,
            lambda: render_chat(self._tokenizer, messages, max_tokens=self._max_model_len, **options),
        )

    async def prompt_text(self, prepared: PreparedRequest, *, as_given: bool) -> tuple[str, list[int]]:
        """As `AsyncLLM.prompt_text`."""
        request, prompt = prepared.request, prepared.prompt if as_given else None
        return await self._off_loop(
            self._text_pool, lambda: prompt_text(self._tokenizer, request.prompt_token_ids, prompt, request.params)
        )

    def close(self) -> None:
        """Drops what waits, and lets nothing long go on."""
        self._closed = True
        self._grammars.close()
        for pool in (self._text_pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _grammar(self, params: SamplingParams) -> Grammar | None:
        """What `structured_outputs` is compiled to. One that is known does not wait for those that are not."""
        wanted, grammars = params.structured_outputs, self._grammars
        if wanted is None:
            return None
        known = await self._off_loop(self._text_pool, lambda: grammars.find(wanted, ignore_eos=params.ignore_eos))
        if known is not None:
            return known
        return await self._off_loop(self._grammar_pool, lambda: grammars.compile(wanted, ignore_eos=params.ignore_eos))

    def _encode(self, prompt: str, params: SamplingParams, add_special_tokens: bool) -> list[int]:
        cut = params.truncate_prompt_tokens is not None
        self._tokenizer.check_length(prompt, self._max_model_len, cut=cut)
        return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    @property
    def _max_model_len(self) -> int:
        assert self._engine.config.max_model_len
        return self._engine.config.max_model_len

    async def _off_loop(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except (RuntimeError, asyncio.CancelledError) as e:
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):  # it was not the caller who cancelled
                raise EngineDeadError("the engine is shutting down") from e
            raise
