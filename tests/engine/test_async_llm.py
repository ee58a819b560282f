"""AsyncLLM on a scripted engine: streams, aborts, failures, shutdown. Cases B50, B51, B54 at engine level."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.engine import preparation
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestTooLargeError
from jaxpaged.text.bad_words import bad_word_ids
from jaxpaged.text.grammar import GrammarCompiler
from tests import tiny_tokenizers
from tests.fake_engine import FakeEngine
from tests.text.test_grammar import multiples
from tests.waiting import until

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


def test_a_request_streams_deltas() -> None:
    def kind(output_kind: str) -> SamplingParams:
        return SamplingParams(max_tokens=9, output_kind=output_kind)

    async def test(llm: AsyncLLM) -> None:
        outputs = [o async for o in llm.generate("hello", kind("delta"), "mine")]
        assert "".join(o.text for o in outputs) == "hello"
        assert {o.request_id for o in outputs} == {"mine"} and outputs[0].prompt == "hello"
        assert outputs[-1].finish_reason == "stop"
        ids = TOKENIZER.encode("x🔥")
        cumulative = [o.text async for o in llm.generate(ids, kind("cumulative"))]
        assert cumulative[-1] == "x🔥" and all("x🔥".startswith(t) for t in cumulative)
        final = [o async for o in llm.generate(ids, kind("final"))]
        assert [o.text for o in final] == ["x🔥"]

    play(fake(), test)


def test_many_requests_at_once_keep_their_own_text() -> None:
    async def test(llm: AsyncLLM) -> None:
        prompts = [f"prompt {i} " + "🔥" * (i % 3) for i in range(60)]
        assert await asyncio.gather(*(collect(llm, p) for p in prompts)) == prompts

    play(fake(), test)


def test_samples_of_a_slow_reader_are_kept_apart() -> None:
    """B35."""
    texts = ["a" * 90, "b" * 60, "c" * 30]
    engine = fake(lambda request: [*TOKENIZER.byte_ids(texts[request.index]), EOS])

    async def test(llm: AsyncLLM) -> None:
        told, ends, count = ["", "", ""], [], 0
        async for output in llm.generate("x", SamplingParams(n=3, max_tokens=100, output_kind="delta")):
            count += 1
            for completion in output.outputs:
                told[completion.index] += completion.text
                ends += [completion.index] if completion.finish_reason else []
            await asyncio.sleep(0.02)
        assert (told, sorted(ends)) == (texts, [0, 1, 2]) and count < 60

    play(engine, test)


def test_a_stop_string_ends_one_sample_in_the_engine_too() -> None:
    endless, short = TOKENIZER.byte_ids("aa."), [*TOKENIZER.byte_ids("a" * 50), EOS]
    engine = fake(lambda request: short if request.index else endless, delay=0.001, max_model_len=20_000)

    async def test(llm: AsyncLLM) -> None:
        params = SamplingParams(n=2, stop=".", max_tokens=10_000, output_kind="final")
        (output,) = [o async for o in llm.generate("x", params)]
        assert [c.text for c in output.outputs] == ["aa", "a" * 50]
        await until(lambda: engine.num_free == engine.num_blocks)
        assert len(engine.aborted) == 1

    play(engine, test)


def test_what_a_request_brings_besides_its_parameters() -> None:
    engine = fake(scheduling_policy="priority")

    async def test(llm: AsyncLLM) -> None:
        params = SamplingParams(bad_words=["fox"], max_tokens=50)
        assert await collect(llm, "hello", params, cache_salt="mine", priority=-3) == "hello"
        (request,) = engine.requests
        assert (request.cache_salt, request.priority) == ("mine", -3)
        assert request.bad_word_ids == bad_word_ids(TOKENIZER, ["fox"])
        for options in ({"cache_salt": ""}, {"priority": 2**31}):
            with pytest.raises(InvalidRequestError):
                await collect(llm, "hello", **options)

    play(engine, test)


def test_a_full_queue_is_told_to_the_reader() -> None:
    engine = fake([5], delay=0.002)
    engine.queue_limit = 1

    async def test(llm: AsyncLLM) -> None:
        first = asyncio.ensure_future(collect(llm, "x", SamplingParams(max_tokens=50)))
        await until(lambda: bool(engine.live))
        with pytest.raises(QueueFullError):
            await collect(llm, "y")
        await first

    play(engine, test)


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


def test_readers_in_other_event_loops_are_told_there() -> None:
    """By a shutdown in this one."""
    llm, told = AsyncLLM(InProcessClient(fake([5], delay=0.002), TOKENIZER), TOKENIZER), []

    async def read() -> None:
        told.extend([output.finish_reason async for output in llm.generate("x", LONG)])

    async def main() -> None:
        thread = threading.Thread(target=lambda: asyncio.run(read()))
        thread.start()
        await until(lambda: bool(llm._delivery.streams))
        (stream,) = llm._delivery.streams.values()
        put, threads = stream.put, []
        stream.put = lambda output: (threads.append(threading.current_thread()), put(output))
        await llm.shutdown(timeout=0)
        await asyncio.get_running_loop().run_in_executor(None, thread.join, 60)
        assert set(threads) == {thread} and told[-1] == "abort"

    asyncio.run(main())


def test_scores_of_long_prompts_delay_no_other_reader() -> None:
    """Two prompts' log-probabilities come in one step; the event loop goes on meanwhile."""
    engine = fake([5], max_model_len=20_000, num_blocks=4000, max_logprobs=20)
    engine.tops = list(range(5, 25))
    params = SamplingParams(prompt_logprobs=20, max_tokens=2, output_kind="delta")

    async def score(llm: AsyncLLM) -> list[int]:
        return [len(o.prompt_logprobs or ()) async for o in llm.generate([5] * 8000, params)]

    async def test(llm: AsyncLLM) -> None:
        tasks, turns = [asyncio.ensure_future(score(llm)) for _ in range(2)], 0
        await until(lambda: bool(llm._delivery._behind))
        while llm._delivery._behind:
            turns += 1
            await asyncio.sleep(0)
        assert turns > 30
        for sizes in await asyncio.gather(*tasks):
            assert sizes[0] == 8000 and not any(sizes[1:])

    play(engine, test)


def test_a_slow_reader_gets_merged_deltas_and_loses_nothing() -> None:
    async def test(llm: AsyncLLM) -> None:
        text, count = "", 0
        async for output in llm.generate("a" * 200, SamplingParams(max_tokens=400, output_kind="delta")):
            text, count = text + output.text, count + 1
            await asyncio.sleep(0.05)
        assert text == "a" * 200
        assert count < 100

    play(fake(), test)


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    engine = fake(TOKENIZER.ids("Ġha"), delay=0.002)

    async def test(llm: AsyncLLM) -> None:
        assert await collect(llm, "x", SamplingParams(stop=" ha ha", max_tokens=400)) == ""
        await until(lambda: engine.num_free == engine.num_blocks)
        assert len(engine.aborted) == 1

    play(engine, test)


def test_wrong_requests_fail_alone() -> None:
    engine = fake(max_model_len=2000, num_blocks=10)

    async def test(llm: AsyncLLM) -> None:
        neighbour = asyncio.ensure_future(collect(llm, "neighbour"))
        for prompt in ([], [-1], [10**6], [True]):
            with pytest.raises(InvalidRequestError):
                await collect(llm, prompt)
        with pytest.raises(RequestTooLargeError, match="11 blocks"):  # refused by add_request, in the engine thread
            await collect(llm, [5] * 170)
        assert await neighbour == "neighbour"
        assert llm.is_healthy

    play(engine, test)


def test_leaving_the_loop_aborts() -> None:
    """B51: the reader breaks off, or its task is cancelled, before or after the first token."""
    engine = fake([5], delay=0.002)

    async def test(llm: AsyncLLM) -> None:
        async with aclosing(llm.generate("x", LONG)) as outputs:
            async for _ in outputs:
                break
        await until(lambda: engine.num_free == engine.num_blocks)
        task = asyncio.ensure_future(collect(llm, "x", LONG))
        await until(lambda: len(engine.added) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.num_free == engine.num_blocks)
        assert engine.aborted == engine.added
        assert llm.num_unfinished == 0

    play(engine, test)


def test_random_cancellations_leak_nothing_and_disturb_nobody() -> None:
    """B51, many times."""
    engine = fake(delay=0.0005, max_model_len=1000)
    rng = random.Random(0)

    async def test(llm: AsyncLLM) -> None:
        async def leave(after: float) -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(collect(llm, "b" * 300, SamplingParams(max_tokens=400)), after)

        for _ in range(10):
            stay = [collect(llm, f"stay {i}") for i in range(3)]
            gone = [leave(rng.random() * 0.03) for _ in range(20)]
            results = await asyncio.gather(*stay, *gone)
            assert results[:3] == ["stay 0", "stay 1", "stay 2"]
        await until(lambda: engine.num_free == engine.num_blocks and not engine.live)

    play(engine, test)


def test_the_same_id_twice_and_again_after_an_abort() -> None:
    """B50."""
    engine = fake(delay=0.001)

    async def test(llm: AsyncLLM) -> None:
        both = await asyncio.gather(collect(llm, "one", request_id="id"), collect(llm, "two", request_id="id"))
        assert both == ["one", "two"]
        first = asyncio.ensure_future(collect(llm, "a" * 300, LONG, request_id="id"))
        await until(lambda: bool(engine.live))
        assert llm.abort("id") == 1
        assert await collect(llm, "again", request_id="id") == "again"
        assert len(await first) < 300
        assert llm.abort("id") == 0
        await until(lambda: engine.num_free == engine.num_blocks)

    play(engine, test)


def test_an_abort_ends_the_stream_with_its_reason() -> None:
    engine = fake([5], delay=0.002)

    async def test(llm: AsyncLLM) -> None:
        reasons = []
        async for output in llm.generate("x", LONG, "id"):
            llm.abort("id")
            reasons.append(output.finish_reason)
        assert reasons[-1] == "abort"

    play(engine, test)


def test_a_failing_engine_fails_every_request_at_once() -> None:
    """B54."""
    engine = fake([5], delay=0.002)
    deaths: list[BaseException] = []

    async def test(llm: AsyncLLM) -> None:
        tasks = [asyncio.ensure_future(collect(llm, "x", LONG)) for _ in range(5)]
        await until(lambda: len(engine.live) == 5)
        engine.fail_with = RuntimeError("out of memory")
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert all(isinstance(r, EngineDeadError) and "out of memory" in str(r) for r in results)
        assert not llm.is_healthy and llm.error is engine.fail_with
        with pytest.raises(EngineDeadError, match="out of memory"):
            await collect(llm, "x")

    play(engine, test, on_death=deaths.append)
    assert deaths == [engine.fail_with]


def test_the_loop_sleeps_when_there_is_nothing_to_do() -> None:
    async def test(llm: AsyncLLM) -> None:
        await collect(llm, "x")
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.1

    play(fake(), test)


def test_tokenizing_is_off_the_event_loop() -> None:
    threads = []

    class Watched(tiny_tokenizers.TinyTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text, add_special_tokens=add_special_tokens)

    async def main() -> None:
        tokenizer = Watched(TOKENIZER.hf, byte_level=True, chat_template=TOKENIZER.chat_template)
        llm = AsyncLLM(InProcessClient(fake(), tokenizer), tokenizer)
        await collect(llm, "x")
        ids = await llm.render_chat([{"role": "user", "content": "hi"}])
        assert "hi" in TOKENIZER.decode(ids)
        await llm.shutdown()

    asyncio.run(main())
    assert len(threads) >= 2 and threading.main_thread() not in threads


def test_shutdown_drains_then_refuses() -> None:
    async def main() -> None:
        llm = AsyncLLM(InProcessClient(fake(delay=0.001), TOKENIZER), TOKENIZER)
        task = asyncio.ensure_future(collect(llm, "drain me"))
        await until(lambda: llm.num_unfinished == 1)
        await llm.shutdown(timeout=5)
        assert await task == "drain me"
        assert not llm.is_healthy
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(llm, "x")

    asyncio.run(main())


def test_shutdown_aborts_what_takes_too_long() -> None:
    engine = fake([5], delay=0.2)  # all the tokens would take 80 seconds

    async def main() -> None:
        llm = AsyncLLM(InProcessClient(engine, TOKENIZER), TOKENIZER)
        outputs = []

        async def read() -> None:
            outputs.extend([o async for o in llm.generate("x", LONG)])

        task = asyncio.ensure_future(read())
        await until(lambda: bool(engine.live))
        start = time.monotonic()
        await llm.shutdown(timeout=0.1)
        await asyncio.wait_for(task, 60)
        assert time.monotonic() - start < 30
        assert outputs[-1].finish_reason == "abort"
        assert engine.num_free == engine.num_blocks

    asyncio.run(main())


def test_requests_of_two_event_loops_are_not_live_at_once() -> None:
    llm = AsyncLLM(InProcessClient(fake([5], delay=0.002), TOKENIZER), TOKENIZER)

    async def main() -> None:
        async with aclosing(llm.generate("x", LONG)) as outputs:
            await anext(outputs)
            with pytest.raises(RuntimeError, match="serves one at a time"):
                await asyncio.to_thread(lambda: asyncio.run(collect(llm, "y")))
            assert (await anext(outputs)).finish_reason is None
        await asyncio.to_thread(lambda: asyncio.run(collect(llm, "y")))

    asyncio.run(main())
    llm.close()


def test_requests_of_a_closed_event_loop_end() -> None:
    """The engine stops computing them, and the next loop tells the observers, in itself."""
    told: list[Any] = []

    class Notes:
        def on_added(self, request: Any) -> None: ...
        def on_step(self, *_: Any) -> None: ...
        def on_finished(self, request: Any, end: Any) -> None:
            told.append((request.request_id, end.reason, asyncio.get_running_loop()))

    engine = fake(lambda request: [5] if request.num_prompt_tokens == 1 else echo(request), delay=0.002)
    llm = AsyncLLM(InProcessClient(engine, TOKENIZER), TOKENIZER, observer=Notes())
    first = asyncio.new_event_loop()
    outputs = llm.generate("x", LONG, "orphan")
    first.run_until_complete(anext(outputs))
    first.close()

    async def main() -> None:
        await until(lambda: not engine.live)
        assert await collect(llm, "two", request_id="next") == "two"
        loop = asyncio.get_running_loop()
        assert told == [("orphan", "abort", loop), ("next", "stop", loop)]
        await llm.shutdown(5)

    asyncio.run(main())


def test_two_event_loops_one_after_the_other() -> None:
    llm = AsyncLLM(InProcessClient(fake(), TOKENIZER), TOKENIZER)
    for prompt in ("one", "two"):
        assert asyncio.run(collect(llm, prompt)) == prompt
    llm.close()


def test_a_fault_in_one_requests_text_is_that_requests_alone() -> None:
    class Broken(tiny_tokenizers.TinyTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == 7:
                raise KeyError("no such token")
            return super().token_bytes(token_id)

    engine = fake(delay=0.001)

    async def main() -> None:
        tokenizer = Broken(TOKENIZER.hf, byte_level=True)
        llm = AsyncLLM(InProcessClient(engine, tokenizer), tokenizer)
        broken, fine = [o async for o in llm.generate([5, 7, 8], SamplingParams())], await collect(llm, "fine")
        assert (broken[-1].finish_reason, broken[-1].token_ids) == ("error", [5])
        assert "no such token" in str(broken[-1].stop_reason) and fine == "fine"
        await until(lambda: engine.num_free == engine.num_blocks)
        await llm.shutdown()

    asyncio.run(main())
