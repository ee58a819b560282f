"""What takes long is done beside the event loop: others are answered meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from jaxpaged.engine import preparation
from jaxpaged.engine.preparation import Preparation
from server import body
from server.answers import LONG
from server.chat.plan import ChatPlan
from server.routes import chat, completions, embeddings, metrics, tokenize
from tests.fake_engine import HIDDEN_SIZE
from tests.server.conftest import LiveServer


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Iterator[threading.Event]:
    """A function of a module that waits until this ends; the event is set once it has been called."""
    called, go_on, work = threading.Event(), threading.Event(), getattr(module, name)

    def waiting(*args: Any) -> Any:
        called.set()
        assert go_on.wait(60)
        return work(*args)

    monkeypatch.setattr(module, name, waiting)
    try:
        yield called
    finally:
        go_on.set()


def ask_for_metrics(server: LiveServer) -> Any:
    return server.http.get("/metrics")


def ask_for_embeddings(server: LiveServer) -> Any:
    return server.post("/v1/embeddings", input=[[5]] * (LONG * embeddings.NUMBERS_A_TOKEN // HIDDEN_SIZE + 1))


@pytest.mark.parametrize(
    ("module", "name", "ask"),
    [(metrics, "generate_latest", ask_for_metrics), (embeddings, "_encoded", ask_for_embeddings)],
)
def test_others_are_answered_meanwhile(
    live: LiveServer, monkeypatch, module: Any, name: str, ask: Callable[[LiveServer], Any]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(monkeypatch, module, name) as called:
            long = pool.submit(ask, live)
            assert called.wait(60)
            assert live.http.get("/health", timeout=20).status_code == 200
            assert not long.done()
        assert long.result(60).status_code == 200


CHECK, HELLO = (body, "_checked"), [{"role": "user", "content": "x"}]
PLAN = [(ChatPlan, "messages"), (ChatPlan, "of_answers")]
LONG_WORK: list[tuple[str, dict[str, Any], list[tuple[Any, str]]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}, [CHECK, (completions, "sampling_params")]),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}, [CHECK, (chat, "_planned"), *PLAN]),
    ("/v1/embeddings", {"input": "x"}, [CHECK]),
    ("/tokenize", {"prompt": "x"}, [CHECK]),
    ("/tokenize", {"messages": HELLO}, [CHECK, (tokenize, "ChatPlan"), PLAN[0]]),
    ("/detokenize", {"tokens": [5]}, [CHECK]),
]


def told_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, threads: list[threading.Thread]) -> None:
    """Notes the threads in which a function, method or property runs."""
    work = getattr(owner, name)

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return (work.fget if isinstance(work, property) else work)(*args)

    monkeypatch.setattr(owner, name, property(noted) if isinstance(work, property) else noted)


@pytest.mark.parametrize(("path", "asked", "works"), LONG_WORK)
@pytest.mark.parametrize("long", [True, False])
def test_what_grows_with_a_body_is_done_beside_if_it_is_long(
    live: LiveServer, monkeypatch, path: str, asked: dict[str, Any], works: list[tuple[Any, str]], long: bool
) -> None:
    """S17. A short one is not worth a thread."""
    seen: dict[str, list[threading.Thread]] = {name: [] for _, name in works}
    for owner, name in works:
        told_of(monkeypatch, owner, name, seen[name])
    content = json.dumps(asked).encode()
    content += b" " * (body.LONG_BODY - len(content) - (not long))
    assert live.http.post(path, content=content).status_code == 200
    for name, threads in seen.items():
        assert threads, name
        assert all((thread is live.thread) != long for thread in threads), name


MANY = 40
MANY_TEXTS = {
    "/v1/completions": {"prompt": [f"text {i}" for i in range(MANY)], "max_tokens": 1},
    "/v1/embeddings": {"input": [f"text {i}" for i in range(MANY)]},
}


@pytest.mark.parametrize("path", MANY_TEXTS)
def test_requests_with_many_texts_let_others_in(live: LiveServer, monkeypatch, path: str) -> None:
    """One text thread serves all: whoever has one text waits for one of theirs, and not for all."""
    encoded: list[str] = []
    begun, encode = threading.Event(), live.tokenizer.encode

    def slow(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        begun.set()
        time.sleep(0.02)
        return encode(text, **options)

    monkeypatch.setattr(live.tokenizer, "encode", slow)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(live.post, path, **MANY_TEXTS[path])
        assert begun.wait(60)
        assert live.post("/tokenize", prompt="short").status_code == 200
        assert long.result(60).status_code == 200
    assert len(encoded) == MANY + 1 and encoded.index("short") < MANY, encoded


FORM = {"max_tokens": 1, "bad_words": ["x"], "allowed_token_ids": [5, 6], "structured_outputs": {"regex": "a*"}}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": ["a"] * 10, **FORM}),
        ("/v1/embeddings", {"input": ["a"] * 10, "truncate_prompt_tokens": 4}),
    ],
)
def test_prompts_of_a_request_share_what_its_parameters_cost(start, monkeypatch, path: str, asked: dict) -> None:
    """Also where the server makes them others; and the next request has its own."""
    server = start(request_timeout=60)
    costs: list[str] = []

    def count(owner: Any, name: str) -> None:
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: costs.append(name) or work(*args))

    for owner, name in ((preparation, "bad_word_ids"), (preparation, "check_params"), (Preparation, "_check_grammar")):
        count(owner, name)
    for times in (1, 2):
        assert server.post(path, **asked).status_code == 200
        assert costs == ["_check_grammar", "bad_word_ids", "check_params"] * times


def test_parameters_that_all_prompts_of_a_request_share_are_checked(start) -> None:
    server = start(request_timeout=60)
    wrong = server.post("/v1/completions", prompt=["a"] * 10, max_tokens=1, allowed_token_ids=[10**6])
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize("path", MANY_TEXTS)
def test_a_text_that_is_refused_ends_the_work_on_the_others(live: LiveServer, monkeypatch, path: str) -> None:
    """Nobody waits for it any more."""
    encoded: list[str] = []
    encode = live.tokenizer.encode
    monkeypatch.setattr(live.tokenizer, "encode", lambda text, **o: encoded.append(text) or encode(text, **o))
    (name, texts), *_ = MANY_TEXTS[path].items()
    assert live.post(path, **{**MANY_TEXTS[path], name: ["x" * 10_000, *texts]}).status_code == 400
    assert live.post("/tokenize", prompt="short").status_code == 200
    assert len(encoded) <= 2
