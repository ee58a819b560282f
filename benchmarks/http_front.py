"""All that the API process does for a stream but the system's part: the app and its HTTP server, without sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, cast

import uvicorn
import uvloop
from uvicorn.server import ServerState

from benchmarks.scripted_engine import ScriptedEngine
from jaxpaged.config import EngineConfig
from jaxpaged.core.step import RequestUpdate
from jaxpaged.engine import messages
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import OnDeath, OnMessage
from jaxpaged.engine.engine_facts import EngineFacts
from jaxpaged.engine.stats import EngineStats
from jaxpaged.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.connection import uvicorn_options

BODIES = {
    "/v1/completions": {"prompt": [1, 2, 3]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "001"}]},
}

_SECONDS_TO_START = 30.0


def seconds_a_token(tokenizer: Tokenizer, steps: Sequence[Sequence[int]], endpoint: str) -> float:
    """CPU time of this process for a token from the core's message to the write, streamed as a chunk of its own.

    Args:
      steps: for each step, a token for each stream.
    """
    return uvloop.run(_run(tokenizer, steps, endpoint))


async def _run(tokenizer: Tokenizer, steps: Sequence[Sequence[int]], endpoint: str) -> float:
    client, options = _Core(), ServerConfig()
    llm = AsyncLLM(cast(Any, client), tokenizer)
    config = uvicorn.Config(create_app(llm, options), access_log=False, log_config=None, **uvicorn_options(options))
    config.load()
    state, loop, streams = ServerState(), asyncio.get_running_loop(), len(steps[0])
    sinks = [_Sink() for _ in range(streams)]
    make = cast(Any, config.http_protocol_class)
    protocols = [make(config=config, server_state=state, app_state={}, _loop=loop) for _ in sinks]
    for protocol, sink in zip(protocols, sinks, strict=True):
        protocol.connection_made(sink)
        protocol.data_received(_request(endpoint, len(steps) + 1))
    async with asyncio.timeout(_SECONDS_TO_START):
        while len(client.names) < streams:
            await asyncio.sleep(0.001)
    frames = [client.frame(step) for step in steps]
    await _deliver(client, frames[0], sinks, 1)  # with the heads
    start, before = time.process_time(), sum(sink.writes for sink in sinks)
    for number, frame in enumerate(frames[1:]):
        await _deliver(client, frame, sinks, before // streams + number + 1)
    spent = time.process_time() - start
    for protocol in protocols:
        protocol.connection_lost(None)
    await asyncio.wait(state.tasks)
    await llm.shutdown(0.0)
    return spent / (streams * (len(steps) - 1))


async def _deliver(client: _Core, frame: bytes, sinks: list[_Sink], writes: int) -> None:
    client.on_message(0, messages.decode_from_core(frame))
    while sinks[-1].writes < writes:
        await asyncio.sleep(0)


def _request(endpoint: str, max_tokens: int) -> bytes:
    body = json.dumps({**BODIES[endpoint], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    head = (
        f"POST {endpoint} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Core:
    """Stands for the client of a core: takes requests, and is told what came of them."""

    num_cores, is_alive, grammars = 1, True, None

    def __init__(self) -> None:
        options = EngineConfig("0", max_model_len=4096, max_num_seqs=1024, num_kv_blocks=10**6)
        self.facts = EngineFacts.of(ScriptedEngine(options))
        self.names: list[str] = []
        self.on_message: OnMessage = lambda core, message: None

    def start(self, on_message: OnMessage, on_death: OnDeath) -> None:
        self.on_message = on_message

    def add(self, request: messages.AddRequest) -> int:
        self.names.append(request.request_id)
        return 0

    def frame(self, tokens: Sequence[int]) -> bytes:
        """What a step would send."""
        updates = [RequestUpdate(name, [token]) for name, token in zip(self.names, tokens, strict=True)]
        return messages.encode(messages.Updates(updates, EngineStats(num_running=len(updates)), time.monotonic()))

    def ended(self, core: int) -> None: ...
    def abort(self, core: int, abort: messages.Abort) -> None: ...
    def close(self) -> None: ...


class _Sink:
    """A transport that takes everything.

    Attributes:
      writes: how often something was written.
    """

    def __init__(self) -> None:
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
