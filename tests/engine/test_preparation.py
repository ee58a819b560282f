"""What is done with requests before they start delays no other one."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.engine import preparation
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.errors import EngineDeadError, InvalidRequestError, RequestTooLargeError
from jaxpaged.text.grammar import GrammarCompiler
from tests import tiny_tokenizers
from tests.engine.playing import EOS, TOKENIZER, collect, fake, play
from tests.text.hostile_grammars import multiples


def test_truncation_lets_long_texts_in() -> None:
    engine = fake(max_model_len=20)

    async def test(llm: AsyncLLM) -> None:
        text, last = "ab" * 1000, SamplingParams(truncate_prompt_tokens=4, max_tokens=9)
        with pytest.raises(RequestTooLargeError):
            await collect(llm, text)
        assert await collect(llm, text, last) == "abab"
        messages = [{"role": "user", "content": text}]
        with pytest.raises(RequestTooLargeError):
            await llm.render_chat(messages)
        assert len(await llm.render_chat(messages, cut=True)) > 2000
        for tokenized in (
            collect(llm, "ab" * 40_000, last),
            llm.render_chat([{**messages[0], "content": "a" * 80_000}], cut=True),
        ):
            with pytest.raises(RequestTooLargeError, match="65536"):
                await tokenized

    play(engine, test)


class SlowGrammars:
    """Compiles when it is let."""

    def __init__(self):
        self.go, self.closed = threading.Event(), False

    def find(self, wanted: StructuredOutputs, **_: Any) -> Any:
        return GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [EOS]).compile(wanted) if wanted.choice else None

    def compile(self, wanted: StructuredOutputs, **_: Any) -> Any:
        assert self.go.wait(120)
        if wanted.regex == "bad":
            raise InvalidRequestError("regex: bad", param="structured_outputs")
        return GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [EOS]).compile(wanted)

    def close(self) -> None:
        self.closed = True


def test_compiling_grammars_delays_no_other_request() -> None:
    engine, grammars = fake(TOKENIZER.byte_ids("abc")), SlowGrammars()

    async def test(llm: AsyncLLM) -> None:
        llm._preparation._grammars = grammars
        wanted = [SamplingParams(structured_outputs=StructuredOutputs(regex=r)) for r in ["abc", "bad", "abd"]]
        slow = [asyncio.ensure_future(collect(llm, "x", params)) for params in wanted]
        known = SamplingParams(structured_outputs=StructuredOutputs(choice=["abc"]))
        assert await collect(llm, "x", known) == "abc"
        assert await collect(llm, "x", SamplingParams(max_tokens=3)) == "abc"
        ids = await llm.render_chat([{"role": "user", "content": "hi"}])
        assert ids and not any(task.done() for task in slow)
        grammars.go.set()
        good, bad, failed = await asyncio.gather(*slow, return_exceptions=True)
        assert good == "abc" and isinstance(bad, InvalidRequestError) and failed == "ab"

    play(engine, test)
    assert grammars.closed


def test_slow_chat_templates_delay_no_text(monkeypatch) -> None:
    go = threading.Event()

    def slow(*_: Any, **__: Any) -> list[int]:
        assert go.wait(120)
        return [5]

    async def test(llm: AsyncLLM) -> None:
        chat = asyncio.ensure_future(llm.render_chat([{"role": "user", "content": "hi"}]))
        assert await collect(llm, "x") == "x"
        assert await llm.decode(await llm.encode("text")) == "text"
        assert not chat.done()
        go.set()
        assert await chat == [5]

    monkeypatch.setattr(preparation, "render_chat", slow)
    play(fake(), test)


def test_shutdown_does_not_wait_for_grammars() -> None:
    hard = [
        SamplingParams(structured_outputs=StructuredOutputs(json=multiples(123_456_001 + i))) for i in range(2, 18, 2)
    ]

    async def main() -> None:
        llm = AsyncLLM(InProcessClient(fake(), TOKENIZER), TOKENIZER)
        await collect(llm, "a", SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
        tasks = [asyncio.ensure_future(collect(llm, "a", params)) for params in hard]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await llm.shutdown()
        assert time.monotonic() - start < 10
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [EngineDeadError] * 8
        child = llm._preparation._grammars._vocabulary.checker._child
        assert child is None or child.poll() is not None

    asyncio.run(main())


def test_tokenizing_is_off_the_event_loop() -> None:
    threads = []

    class Watched(tiny_tokenizers.TinyTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text, add_special_tokens=add_special_tokens)

    async def main() -> None:
        tokenizer = Watched(TOKENIZER.hf, byte_level=True)
        llm = AsyncLLM(InProcessClient(fake(), tokenizer), tokenizer)
        await collect(llm, "x")
        ids = await llm.render_chat([{"role": "user", "content": "hi"}])
        assert "hi" in TOKENIZER.decode(ids)
        await llm.shutdown()

    asyncio.run(main())
    assert len(threads) >= 2 and threading.main_thread() not in threads
