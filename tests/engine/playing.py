"""An AsyncLLM on a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from tests import tiny_tokenizers
from tests.fake_engine import FakeEngine

TOKENIZER = tiny_tokenizers.byte_level()
EOS = 2
LONG = SamplingParams(max_tokens=400)


def echo(request) -> list[int]:
    """A script: the prompt again, then EOS."""
    return [*request.prompt_token_ids, EOS]


def fake(script=echo, **options) -> FakeEngine:
    return FakeEngine(script, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[EOS], **options)


def play(engine: FakeEngine, test: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options) -> None:
    """Runs a coroutine against an AsyncLLM, and checks that nothing is left behind."""

    async def main() -> None:
        llm = AsyncLLM(InProcessClient(engine, TOKENIZER), TOKENIZER, **options)
        try:
            await asyncio.wait_for(test(llm), timeout=120)
        finally:
            await llm.shutdown(timeout=0)
        assert llm.num_unfinished == 0 and not llm._client._loop.is_alive()

    asyncio.run(main())


async def collect(llm: AsyncLLM, prompt, params=None, **options) -> str:
    text = ""
    params = msgspec.structs.replace(params or SamplingParams(max_tokens=100), output_kind="delta")
    async for output in llm.generate(prompt, params, **options):
        text += output.text
    return text
