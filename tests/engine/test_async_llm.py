"""AsyncLLM on a scripted engine: streams, aborts, failures, shutdown. Cases B50, B51, B54 at engine level."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing

import pytest

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestTooLargeError
from jaxpaged.text.bad_words import bad_word_ids
from tests import tiny_tokenizers
from tests.engine.playing import EOS, LONG, TOKENIZER, collect, fake, play
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken


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
