"""An AsyncLLM whose readers are in several event loops."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from tests.engine.playing import LONG, TOKENIZER, collect, echo, fake
from tests.waiting import until


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
