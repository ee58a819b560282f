"""Forms of text and templates that are meant to do harm, over HTTP. Cases S09, S10, S11, S12."""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxpaged.text.grammar import GrammarCache
from tests.memory import resident
from tests.server.conftest import LiveServer
from tests.text.test_grammar import HOSTILE
from tests.waiting import wait_for

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
HELLO = [{"role": "user", "content": "x"}]
# Of each kind some; all of them are tested where grammars are compiled.
CASES = ["(a+)+b", "(.*a){30}", "repeat", "a megabyte", "deep schema text", "enum of 100 000", "10 000 properties",
         "chain of references", "EBNF parentheses", "doubling rules"]  # fmt: skip


def ask_hostile(server: LiveServer, name: str) -> None:
    wanted = HOSTILE[name]
    form = {wanted.kind: getattr(wanted, wanted.kind)}
    begin = time.process_time()
    response = server.post(COMPLETIONS, prompt="x", max_tokens=20, structured_outputs=form)
    assert time.process_time() - begin < 4, name
    if response.status_code != 200:
        error = response.json()["error"]
        assert len(error["message"]) < 1000
        assert (response.status_code, error["param"]) == (400, "structured_outputs"), (name, error)


def test_hostile_grammars_hold_nobody_up(start) -> None:
    """S09, S10: answered soon, while a stream goes on. Seconds are this process's: other work does not count."""
    server: LiveServer = start(engine_options={"max_model_len": 200_000})
    server.play([5], delay=0.01, follow_grammars=True)
    gaps, stop = [], threading.Event()

    def read_a_stream() -> None:
        body = {"prompt": "x", "max_tokens": 100_000, "stream": True}
        with server.http.stream("POST", COMPLETIONS, json=body) as response:
            last = time.process_time()
            for _ in response.iter_raw():
                now = time.process_time()
                gaps.append(now - last)
                last = now
                if stop.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_a_stream)
        wait_for(lambda: gaps)
        try:
            for name in CASES:
                ask_hostile(server, name)
        finally:
            stop.set()
        reading.result()
    assert max(gaps) < 0.5, sorted(gaps)[-5:]
    server.check()


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
