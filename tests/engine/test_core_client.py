"""An AsyncLLM over a core in this process, and over cores in processes of their own: nobody can tell which."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.engine.messages import Abort, AddRequest, Call
from jaxpaged.engine.preparation import PreparedRequest
from jaxpaged.engine.process_client import ProcessClient
from jaxpaged.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestTooLargeError, UnsupportedError
from tests.scripted_core import LOAD, TOKENIZER, load

MODEL = "echo delay=0.001 num_blocks=40 queue_limit=30"


class Front:
    """An AsyncLLM in an event loop of its own, so that it outlives a test."""

    def __init__(self, client: EngineCoreClient):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.llm = AsyncLLM(client, TOKENIZER)

    def play(self, test: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
        """Runs a test, and checks that it leaves nothing behind."""
        asyncio.run_coroutine_threadsafe(self._play(test), self.loop).result(150)

    async def _play(self, test: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
        await asyncio.wait_for(test(self.llm), 120)
        while any(snapshot.requests for snapshot in await self.llm.snapshot()):
            await asyncio.sleep(0.005)
        assert self.llm.is_healthy and self.llm.num_unfinished == 0
        assert all(stats.num_running == stats.num_used_blocks == 0 for stats in self.llm.stats)
        if isinstance(self.llm._client, ProcessClient):
            assert not any(self.llm._client._router.loads)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.llm.shutdown(5), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


@pytest.fixture(scope="module", params=["in process", "one process", "two processes"])
def front(request) -> Iterator[Front]:
    config = EngineConfig(model=MODEL)
    client: EngineCoreClient
    if request.param == "in process":
        client = InProcessClient(*load(config, lambda *_: None))
    else:
        client = ProcessClient(config, num_cores=1 if request.param == "one process" else 2, engine=LOAD)
        client.wait_until_ready()
    front = Front(client)
    yield front
    front.close()


async def collect(llm: AsyncLLM, prompt, params=None, **options) -> str:
    params = msgspec.structs.replace(params or SamplingParams(max_tokens=100), output_kind="delta")
    return "".join([output.text async for output in llm.generate(prompt, params, **options)])


def test_what_the_front_knows_of_the_engine(front) -> None:
    async def test(llm: AsyncLLM) -> None:
        assert (llm.config.max_model_len, llm.config.num_kv_blocks) == (512, 40)
        assert llm.vocab_size == TOKENIZER.vocab_size
        assert llm._client.facts.eos_token_ids == (2,)

    front.play(test)


def test_many_requests_keep_their_own_text(front) -> None:
    async def test(llm: AsyncLLM) -> None:
        prompts = [f"prompt {i} " + "🔥" * (i % 3) for i in range(25)]
        assert await asyncio.gather(*(collect(llm, p) for p in prompts)) == prompts

    front.play(test)


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"prompt": []}, InvalidRequestError, "prompt"),
        ({"prompt": [10**6]}, InvalidRequestError, "prompt"),
        ({"prompt": None}, InvalidRequestError, "prompt"),
        ({"prompt": 5}, InvalidRequestError, "prompt"),
        ({"prompt": b"abc"}, InvalidRequestError, "prompt"),
        ({"prompt": np.zeros((1, 2), int)}, InvalidRequestError, "prompt"),
        ({"prompt": "x" * 1000}, RequestTooLargeError, "prompt"),
        ({"prompt": "x", "cache_salt": ""}, InvalidRequestError, "cache_salt"),
        ({"prompt": "x", "priority": 1}, InvalidRequestError, "priority"),
        ({"prompt": "x", "params": SamplingParams(logprobs=21)}, InvalidRequestError, "logprobs"),
        (
            {"prompt": "x", "params": SamplingParams(structured_outputs=StructuredOutputs(regex="("))},
            InvalidRequestError,
            "structured_outputs",
        ),
    ],
)  # fmt: skip
def test_wrong_requests_fail_alone_and_say_why(front, options, kind, param) -> None:
    async def test(llm: AsyncLLM) -> None:
        neighbour = asyncio.ensure_future(collect(llm, "neighbour"))
        with pytest.raises(kind) as error:
            await collect(llm, **options)
        assert type(error.value) is kind and error.value.param == param
        assert await neighbour == "neighbour"

    front.play(test)


def test_what_the_core_refuses_reaches_the_reader_before_any_output(front) -> None:
    async def test(llm: AsyncLLM) -> None:
        async def read(prepared: PreparedRequest) -> str:
            return [output.text async for output in llm.stream(prepared)][-1]

        params = SamplingParams(max_tokens=100, output_kind="final")
        prepared = [await llm.prepare("long", params) for _ in range(90)]  # then all of them are sent at once
        results = await asyncio.gather(*map(read, prepared), return_exceptions=True)
        refused = [r for r in results if isinstance(r, QueueFullError)]
        assert refused and "wait already" in str(refused[0])
        assert all(isinstance(r, QueueFullError) or len(r) == len(TOKENIZER.decode([5])) * 100 for r in results)

    front.play(test)


def test_grammars_are_followed_in_the_core(front) -> None:
    async def test(llm: AsyncLLM) -> None:
        def matching(regex: str) -> SamplingParams:
            return SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex=regex))

        assert await asyncio.gather(*(collect(llm, "abc", matching(f"a(b|{i})c")) for i in range(8))) == ["abc"] * 8
        outputs = [o async for o in llm.generate("abc", matching("abd"))]
        assert outputs[-1].finish_reason == "error" and outputs[-1].text == "ab"

    front.play(test)


def test_leaving_aborts_in_the_core(front) -> None:
    async def test(llm: AsyncLLM) -> None:
        async with aclosing(llm.generate("long", SamplingParams(max_tokens=400))) as outputs:
            async for _ in outputs:
                break
        both = await asyncio.gather(collect(llm, "one", request_id="id"), collect(llm, "two", request_id="id"))
        assert both == ["one", "two"]
        first = asyncio.ensure_future(collect(llm, "long", SamplingParams(max_tokens=400), request_id="id"))
        while not llm.num_unfinished:
            await asyncio.sleep(0)
        assert llm.abort("id") == 1
        assert await collect(llm, "again", request_id="id") == "again"
        await first

    front.play(test)


def test_embeddings_come_as_arrays(front) -> None:
    async def test(llm: AsyncLLM) -> None:
        prepared = await llm.prepare("hello", SamplingParams(output_kind="final"), pooling=PoolingParams(dimensions=3))
        (output,) = [o async for o in llm.stream(prepared)]
        assert output.embedding is not None and output.embedding.shape == (3,)
        assert abs(float((output.embedding**2).sum()) - 1) < 1e-5
        with pytest.raises(InvalidRequestError) as error:
            await llm.prepare("hello", SamplingParams(), pooling=PoolingParams(dimensions=10**6))
        assert error.value.param == "dimensions"

    front.play(test)


def test_methods_of_the_engine_are_called_by_name(front) -> None:
    async def test(llm: AsyncLLM) -> None:
        told = await llm.snapshot()
        assert len(told) == len(llm.stats) == llm._client.num_cores and told[0].num_blocks == 40
        with pytest.raises(InvalidRequestError, match="start one first"):
            await llm.stop_profile()
        for name in ("fail_with", "step", "__init__"):
            with pytest.raises(UnsupportedError, match=name):
                await llm._calls.one(0, name)

    front.play(test)


def test_all_cores_take_a_profile_or_none(front, tmp_path) -> None:
    async def test(llm: AsyncLLM) -> None:
        cores = range(llm._client.num_cores)
        for core in cores:
            (tmp_path / f"core-{core}").mkdir()
        last = cores[-1]
        await llm._calls.one(last, "start_profile", str(tmp_path / f"core-{last}"))
        with pytest.raises(InvalidRequestError, match="is being taken already"):
            await llm.start_profile(str(tmp_path))
        for core in cores[:-1]:
            with pytest.raises(InvalidRequestError, match="start one first"):
                await llm._calls.one(core, "stop_profile")
        await llm._calls.one(last, "stop_profile")  # whoever began that one may end it

    front.play(test)


@pytest.mark.parametrize(("prompt", "reason"), [("x", "shutting down"), ("fail", "device lost")])
def test_nothing_is_sent_to_a_core_in_this_process_that_is_gone(prompt, reason) -> None:
    client, died = InProcessClient(*load(EngineConfig(model="echo"), lambda *_: None)), threading.Event()
    client.start(lambda *_: None, lambda *_: died.set())
    request = AddRequest("r", TOKENIZER.encode(prompt), SamplingParams(max_tokens=100), 0.0)
    client.add(request)
    if prompt == "fail":
        assert died.wait(60) and not client.is_alive
    client.close()
    with pytest.raises(EngineDeadError, match=reason):
        client.add(request)
    with pytest.raises(EngineDeadError, match=reason):
        client.call(0, Call(1, "snapshot"))
    client.abort(0, Abort("r"))  # of what it does not hold any more
    assert not client.is_alive


def test_text_is_made_and_read_off_the_loop(front) -> None:
    async def test(llm: AsyncLLM) -> None:
        ids = await llm.encode("hello 🔥")
        assert await llm.decode(ids) == "hello 🔥" and await llm.decode([]) == ""
        with pytest.raises(InvalidRequestError) as error:
            await llm.decode([5, llm.vocab_size])
        assert error.value.param == "tokens"

    front.play(test)
