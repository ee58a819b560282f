"""Clients that speak HTTP/1.0: no chunks, and an answer ends when its connection does."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.connection import _send_unchunked
from tests.server.raw_http import connect, posted

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]


def ask(server, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer, which must end by itself."""
    with connect(server) as sock:
        sock.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        received = b""
        while chunk := sock.recv(65536):
            received += chunk
    top, _, body = received.partition(b"\r\n\r\n")
    return top.lower(), body


@pytest.mark.parametrize(
    ("path", "asked"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})], ids=["completions", "chat"]
)
@pytest.mark.parametrize("fields", [(), ("Connection: keep-alive",)])
def test_a_stream_comes_as_it_is(live, path, asked, fields) -> None:
    top, body = ask(live, posted(path, {**asked, "stream": True, "max_tokens": 5}, *fields))
    assert b" 200 " in top and b"transfer-encoding" not in top and b"connection: close" in top
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert events and all(json.loads(event.removeprefix(b"data: "))["choices"] for event in events)


def test_several_streams_wait_for_a_slow_reader_together() -> None:
    """Each prompt has a sender of its own: what one writes is no length of the others'."""
    written: list[bytes] = []
    transport: Any = SimpleNamespace(write=written.append, close=lambda: None, pause_reading=lambda: None)

    async def test() -> None:
        flow, log = FlowControl(transport), logging.getLogger()
        cycle = RequestResponseCycle(
            scope={"method": "POST"},  # type: ignore[typeddict-item]
            transport=transport,
            flow=flow,
            logger=log,
            access_logger=log,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=lambda: None,
        )
        await _send_unchunked(cycle, {"type": "http.response.start", "status": 200, "headers": []})
        flow.pause_writing()
        parts = [{"type": "http.response.body", "body": body, "more_body": True} for body in (b"long", b"x", b"longer")]
        senders = [asyncio.ensure_future(_send_unchunked(cycle, part)) for part in parts]
        await asyncio.sleep(0)
        flow.resume_writing()
        await asyncio.gather(*senders)
        await _send_unchunked(cycle, {"type": "http.response.body", "body": b"end", "more_body": False})

    asyncio.run(test())
    head, *body = written
    assert b"chunked" not in head and body == [b"long", b"x", b"longer", b"end"]


def test_a_whole_answer_keeps_its_length(live) -> None:
    top, body = ask(live, posted(COMPLETIONS, {"prompt": "a", "max_tokens": 5}))
    assert b"content-length: %d\r\n" % len(body) in top + b"\r\n" and json.loads(body)["choices"]


def test_other_methods_and_refusals(live) -> None:
    for request, status in (
        (b"GET /metrics HTTP/1.1\r\n\r\n", b" 200 "),
        (b"HEAD /health HTTP/1.1\r\n\r\n", b" 200 "),
        (posted(COMPLETIONS, {"prompt": 1.5}), b" 400 "),
    ):
        top, body = ask(live, request)
        assert status in top and b"transfer-encoding" not in top
        assert bool(body) == (not request.startswith(b"HEAD"))
