"""Clients that go away, and slow ones. Case B51 over HTTP."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import LiveServer
from tests.waiting import wait_for

LONG = {"prompt": "x", "max_tokens": 400}


def open_request(server: LiveServer, **body) -> socket.socket:
    """Sends a request and returns its socket."""
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    sock = connection.sock
    connection.sock = None  # so that the connection does not close it
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted(live, stream) -> None:
    """While it waits for the first token or in the middle."""
    for delay, wait in ((0.3, 0.0), (0.05, 0.3)):
        engine = live.play([5], delay=delay)
        aborted = len(engine.aborted)
        client = open_request(live, **LONG, stream=stream)
        wait_for(lambda: live.engine.live)
        time.sleep(wait)
        client.close()
        live.settle()
        assert len(engine.aborted) == aborted + 1


def test_all_prompts_of_a_batch_are_aborted(live) -> None:
    engine = live.play([5], delay=0.05)
    for stream in (False, True):
        aborted = len(engine.aborted)
        client = open_request(live, prompt=["x", "y", "z"], max_tokens=400, stream=stream)
        wait_for(lambda: len(live.engine.live) == 3)
        client.close()
        live.settle()
        assert len(engine.aborted) == aborted + 3


def test_a_client_that_leaves_after_its_answer_changes_nothing(live) -> None:
    aborted = len(live.engine.aborted)
    client = open_request(live, prompt="hello", stream=True)
    received = b""
    while b"[DONE]" not in received:
        received += client.recv(65536)
    client.close()
    live.settle()
    assert len(live.engine.aborted) == aborted


def test_a_client_that_leaves_while_it_sends(live) -> None:
    url = urlsplit(live.url)
    with socket.create_connection((url.hostname, url.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert live.post("/v1/completions", prompt="x").status_code == 200


def test_random_disconnects_disturb_nobody(live) -> None:
    live.play(live.engine.script, delay=0.001)
    rng = random.Random(0)
    for _ in range(10):
        clients = [open_request(live, prompt="b" * 200, max_tokens=300, stream=rng.random() < 0.5) for _ in range(10)]
        for client in clients:
            time.sleep(rng.random() * 0.01)
            client.close()
        body = {"prompt": "undisturbed", "max_tokens": 50}
        assert live.post("/v1/completions", **body).json()["choices"][0]["text"] == "undisturbed"
    live.settle()


def test_a_slow_reader_loses_nothing(live) -> None:
    """Its deltas are merged; others are not held up."""
    text = "0123456789" * 20
    client = open_request(live, prompt=text, max_tokens=300, stream=True)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    received = b""
    while b"[DONE]" not in received:
        received += client.recv(500)
        time.sleep(0.001)
    client.close()
    events = [line for line in received.decode().splitlines() if line.startswith('data: {"')]
    assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events) == text


def test_shutdown_lets_running_requests_end(start) -> None:
    server = start()
    server.play(server.engine.script, delay=0.05)
    client = open_request(server, prompt="drain me, please", max_tokens=100, stream=True)
    wait_for(lambda: server.engine.live)
    server.server.should_exit = True
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    client.close()
    assert b"data: [DONE]" in received and b'"finish_reason":"stop"' in received
    server.thread.join(60)
    assert not server.thread.is_alive() and not server.llm.is_healthy


PROMPTS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_in_a_stream(live, path, n) -> None:
    """B44: on neither, on the last, or on every chunk; once, however many choices there are."""
    live.play([5], delay=0.005)
    body = {**PROMPTS[path], "n": n, "max_tokens": 4}
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        assert all("usage" not in event for event in live.events(path, **body, stream_options=options))
    whole = live.post(path, **body).json()["usage"]
    *chunks, last = live.events(path, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], whole)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = live.events(path, **body, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == whole["completion_tokens"] == 4 * n
    assert (last["choices"], last["usage"]) == ([], whole)


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_without_a_stream(live, path, stream) -> None:
    """B45."""
    for options in ({}, {"include_usage": True}, {"include_obfuscation": False}):
        response = live.post(path, **PROMPTS[path], **stream, stream_options=options)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "stream_options")
        assert "stream=true" in error["message"]
    assert live.post(path, **PROMPTS[path], **stream, stream_options=None).status_code == 200


def test_many_clients_share_one_tokenizer(live) -> None:
    """B28: long prompts, banned words, chats, from 64 threads at once: never "Already borrowed"."""
    live.play([5], tokens_per_step=8)

    def ask(number: int) -> int:
        path = list(PROMPTS)[number % 2]
        calls = number % 2 == 1 and number % 3 != 1  # two thirds of the chats: a third of all
        text = f"a long prompt {number} " * (2 if calls else 15)  # what tells of tools takes room, too
        prompt = {"prompt": text} if number % 2 == 0 else {"messages": [{"role": "user", "content": text}]}
        options = {"bad_words": [f"word {number}"]} if number % 3 else {"stop": ["###"], "truncate_prompt_tokens": 50}
        if calls:
            tool = {"type": "function", "function": {"name": f"f{number}", "description": "It looks."}}
            options |= {"tools": [tool]}
        return live.post(path, **prompt, **options, max_tokens=8, stream=calls or number % 5 == 0).status_code

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, range(500))) == [200] * 500
