"""Forms of text and templates that are meant to do harm, over HTTP. Cases S09, S10, S11, S12."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxpaged.text import grammar
from jaxpaged.text.grammar import GrammarCache
from jaxpaged.text.grammar_check import GrammarChecker, Verdict
from jaxpaged.text.tokenizer import Tokenizer
from tests.memory import resident
from tests.server.conftest import LiveServer
from tests.text.hostile_grammars import HOSTILE

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
HELLO = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def real_words() -> Iterator[LiveServer]:
    """A server whose vocabulary is a real model's."""
    words: Any = Tokenizer.from_name("demo")
    server = LiveServer(words, engine_options={"max_model_len": 200_000})
    yield server
    server.stop()


# Of the hostile ones, those that are refused before anything is generated; of the others some end when a limit is met.
REFUSED = {
    "a megabyte", "deep regex", "deep schema text", "enum of 100 000", "10 000 properties", "multiples", "multiple",
    "chain of intersections", "tree of intersections", "choices", "long choices", "a choice of control characters",
    "parentheses", "open parentheses", "EBNF parentheses", "a literal times 30 000", "doubling terminals", "parametric",
    "multiples in a grammar",
}  # fmt: skip
WRITABLE = [case for case in HOSTILE if case != "deep schema"]  # no client can write that one


def test_the_cases_that_are_refused_are_cases() -> None:
    assert set(WRITABLE) >= REFUSED


@pytest.mark.parametrize("case", WRITABLE)
def test_hostile_grammars_are_the_clients_fault(real_words, case) -> None:
    """S09, S10: refused at once, or where a limit is reached as they run; in a stream too. Never 5xx."""
    wanted, rng = HOSTILE[case], random.Random(0)
    form = {wanted.kind: getattr(wanted, wanted.kind)}
    real_words.play(lambda request: [rng.randrange(100, 49_000) for _ in range(41)], follow_grammars=True)
    body = {"prompt": "x", "max_tokens": 40, "structured_outputs": form}
    begin = time.process_time()
    response = real_words.post(COMPLETIONS, **body)
    streamed = real_words.post(COMPLETIONS, **body, stream=True)
    assert time.process_time() - begin < 8
    for answer in (response, streamed):
        assert answer.status_code in ((400,) if case in REFUSED else (200, 400)), answer.text
    if response.status_code == 400:
        is_the_clients(response.json()["error"])
    if streamed.status_code == 400:
        is_the_clients(streamed.json()["error"])
    else:
        *events, done, rest = streamed.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        if "error" in (last := json.loads(events[-1].removeprefix("data: "))):
            is_the_clients(last["error"])
    real_words.settle()


def is_the_clients(error: dict[str, Any]) -> None:
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs"), error
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_limit_reached_within_a_text_is_the_clients_fault(live, path) -> None:
    """With the limit after some tokens, so that a stream has begun."""
    live.play([*live.tokenizer.byte_ids("a" * 100)], follow_grammars=True, delay=0.001)
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO}
    body = {**prompt, "max_tokens": 300, "guided_regex": "((a{1,100}){1,100}){1,100}"}
    response = live.post(path, **body)
    assert response.status_code == 400
    is_the_clients(response.json()["error"])
    assert "too many" in response.json()["error"]["message"]
    events = live.events(path, **body)
    assert len(events) > 1 and events[0]["choices"]
    is_the_clients(events[-1]["error"])
    choices = live.post(path, **{**body, "n": 2}).json()
    assert "error" in choices


def test_grammars_are_compiled_beside_the_event_loop(live, monkeypatch) -> None:
    """S09, S10: however long it takes, others are served meanwhile; those of known grammars too."""
    known, new = {"guided_regex": "ab(c|d)"}, {"guided_regex": "ab(x|y|z)"}
    live.play(live.tokenizer.byte_ids("abcx"), follow_grammars=True)
    assert live.post(COMPLETIONS, prompt="x", max_tokens=3, **known).json()["choices"][0]["text"] == "abc"
    checking, go_on, threads = threading.Event(), threading.Event(), []
    check = GrammarChecker.check

    def slow(self: GrammarChecker, source: str) -> Verdict:
        threads.append(threading.current_thread())
        checking.set()
        assert go_on.wait(60)
        return check(self, source)

    monkeypatch.setattr(GrammarChecker, "check", slow)
    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(live.post, COMPLETIONS, prompt="x", max_tokens=3, **new)
            assert checking.wait(60)
            assert live.http.get("/health", timeout=30).status_code == 200
            assert live.http.post(TOKENIZE, json={"prompt": "x"}, timeout=30).status_code == 200
            for options in ({}, known):
                body = {"prompt": "x", "max_tokens": 3, **options}
                assert live.http.post(COMPLETIONS, json=body, timeout=30).json()["choices"][0]["text"] == "abc"
            assert not waiting.done()
        finally:
            go_on.set()
        assert waiting.result(60).json()["choices"][0]["text"][:2] == "ab"
    assert len(threads) == 1 and threads[0] is not live.thread


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/schema", "file:///etc/passwd", "https://evil.example/x.json"])
def test_a_schema_elsewhere_is_not_fetched(live, url) -> None:
    """S10."""
    for schema in ({"$ref": url}, {"properties": {"a": {"$ref": url}}}, {"allOf": [{"$ref": f"{url}#/x"}]}):
        response = live.post(CHAT, messages=HELLO, guided_json=schema)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_json")


def test_new_grammars_take_no_more_memory_and_no_disk(start, tmp_path, monkeypatch) -> None:
    """S11: the least recently used make room, by bytes; a cache for a dozen is full soon."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server: LiveServer = start()
    server.play([5], follow_grammars=True)
    compiler = server.llm._client.grammars
    cache = compiler._cache = GrammarCache(1 << 20)

    def ask(numbers: range) -> None:
        for i in numbers:
            answer = server.post(COMPLETIONS, prompt="x", max_tokens=9, guided_regex=f"ab(x{{{i}}})?")
            assert answer.json()["choices"][0]["text"] == "ab", answer.text

    ask(range(1, 100))
    before = resident()
    ask(range(100, 400))
    assert len(cache) < 50 and cache.num_bytes <= 1 << 20
    assert resident() - before < 20  # the allocator keeps some
    assert not list(tmp_path.iterdir())
    server.check()


def no_process(*args: Any, **options: Any) -> None:
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def no_file(*args: Any, **options: Any) -> None:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/SECRET']")


def no_thread(*args: Any, **options: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("owner", "name", "fails"),
    [
        (subprocess, "Popen", no_process),
        (tempfile, "TemporaryFile", no_file),
        (threading, "Timer", no_thread),
        (grammar, "on_deep_stack", no_thread),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_machine_without_room_to_try_out_grammars(start, monkeypatch, caplog, owner, name, fails, stream) -> None:
    """A later try may succeed: 503, and the log says why. What needs no new grammar is served."""
    server: LiveServer = start()
    server.play([*b"ab", 2], follow_grammars=True)
    compiler = server.llm._client.grammars
    compiler.prepare()
    compiler._shared().checker._bury()
    asked = {"prompt": "x", "max_tokens": 9, "guided_regex": f"ab|{name}{stream}", "stream": stream}
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fails)
        response = server.post(COMPLETIONS, **asked)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable"), response.text
        assert response.headers["retry-after"] and "SECRET" not in response.text
        assert server.post(COMPLETIONS, prompt="x", max_tokens=2).status_code == 200
    assert any("grammars cannot be tried out now: " in record.getMessage() for record in caplog.records)
    assert server.post(COMPLETIONS, **asked).status_code == 200
    server.check()


BOMB = "{% for i in range(10**9) %}x{% endfor %}"


@pytest.mark.parametrize("template", [BOMB, "{{ ''.__class__.__mro__ }}", "{{ messages }}", "", 3, ["x"]])
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
def test_templates_of_clients_are_not_run(live, path, template) -> None:
    """S12."""
    begin = time.process_time()
    for name in ("chat_template", "chat_template_kwargs"):
        value = template if name == "chat_template" else {"chat_template": template}
        response = live.post(path, messages=HELLO, **{name: value})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"].startswith(name), error
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(
    "options",
    [{"tokenize": True}, {"messages": []}, {"tools": [{}]}, {"add_generation_prompt": False}, {"conversation": []},
     {"continue_final_message": True}, {"documents": []}, {"return_tensors": "pt"}, {"max_length": 1},
     {"padding": True}, {"tokenizer_kwargs": {}}, {"return_dict": True}, {"self": 1}, {"truncation": True}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
def test_template_options_replace_nothing_of_ours(live, path, options) -> None:
    """S12."""
    response = live.post(path, messages=HELLO, chat_template_kwargs=options)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("text", ["<tool_call>" * 10_000, "(" * 100_000, "{" * 100_000, "<think>" * 10_000])
def test_messages_of_markers_are_text(start, text) -> None:
    """S09: in time that grows with their length."""
    server = start(engine_options={"max_model_len": 200_000, "num_blocks": 20_000})
    server.play([2])
    begin = time.process_time()
    response = server.post(CHAT, messages=[{"role": "user", "content": text}], max_tokens=1)
    assert response.status_code == 200
    assert time.process_time() - begin < 2
    server.check()
