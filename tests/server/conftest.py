"""A real HTTP server on loopback over a scripted engine, and clients for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from server.app import create_app
from server.config import ServerConfig
from server.connection import uvicorn_options
from tests import tiny_tokenizers
from tests.fake_engine import FakeEngine
from tests.tiny_tokenizers import TinyTokenizer
from tests.waiting import wait_for

EOS = 2
MODEL = "tiny"
USUAL = {"tops": [], "sampled_logprob": -0.5, "delay": 0.0, "tokens_per_step": 1, "follow_grammars": False}


def echo(request: Any) -> list[int]:
    """A script: the prompt again, then EOS."""
    return [*request.prompt_token_ids, EOS]


class RunningServer:
    """A server in a thread.

    Attributes:
      llm: what it serves.
      app: the application.
      url: where it listens.
      http, openai: clients.
    """

    def __init__(self, llm: AsyncLLM, **server_options: Any):
        self.llm = llm
        options = {"served_model_name": (MODEL, "alias"), "shutdown_timeout": 5.0, **server_options}
        server_config = ServerConfig(**options)
        self.app = create_app(self.llm, server_config)
        config = uvicorn.Config(
            self.app, port=0, log_level="critical", timeout_graceful_shutdown=5, **uvicorn_options(server_config)
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POSTs JSON; the model need not be named."""
        return self.http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The JSON objects of a streamed answer; checks that it ends as it must."""
        import json

        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(e.removeprefix("data: "), parse_constant=_not_json) for e in events]

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


class LiveServer(RunningServer):
    """One over a scripted engine.

    Attributes:
      engine: that engine.
      tokenizer: its tokenizer.
    """

    def __init__(self, tokenizer: TinyTokenizer, engine_options: dict[str, Any] | None = None, **server_options: Any):
        self.tokenizer = tokenizer
        self.engine = FakeEngine(echo, vocab_size=tokenizer.vocab_size, eos_token_ids=[EOS], **(engine_options or {}))
        super().__init__(AsyncLLM(InProcessClient(self.engine, tokenizer), tokenizer), **server_options)

    def play(self, script: Sequence[int] | Callable[[Any], Sequence[int]], **options: Any) -> FakeEngine:
        """Sets what the engine plays, and options of it."""
        self.engine.script = script
        for name, value in options.items():
            setattr(self.engine, name, value)
        return self.engine

    def settle(self) -> None:
        """Waits until nothing runs and every block is free."""
        wait_for(lambda: not self.engine.live and self.llm.num_unfinished == 0)
        assert self.engine.num_free == self.engine.num_blocks

    def check(self) -> None:
        """Settles; then a fixed request must get its fixed answer."""
        self.settle()
        self.play(echo, **USUAL)
        answer = self.http.post("/v1/completions", json={"prompt": "as ever", "max_tokens": 20, "temperature": 0})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "as ever"
        self.settle()


def _not_json(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LiveServer]:
    server = LiveServer(tiny_tokenizers.byte_level())
    yield server
    server.stop()


@pytest.fixture
def live(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The module's server, quiet and whole before and after each test."""
    shared_server.play(echo, **USUAL)
    yield shared_server
    shared_server.check()
    assert shared_server.http.get("/health").status_code == 200


@pytest.fixture
def says(live: LiveServer) -> Callable[..., None]:
    """Makes the engine answer with a text and EOS."""

    def script(text: str, tokens_per_step: int = 1) -> None:
        live.play([*live.tokenizer.byte_ids(text), EOS], tokens_per_step=tokens_per_step)

    return script


@pytest.fixture
def start() -> Iterator[Callable[..., LiveServer]]:
    """Starts servers with options of their own."""
    servers: list[LiveServer] = []

    def make(tokenizer: TinyTokenizer | None = None, **options: Any) -> LiveServer:
        servers.append(LiveServer(tokenizer or tiny_tokenizers.byte_level(), **options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
