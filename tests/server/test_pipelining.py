"""Requests that are sent on a connection before the last one is answered."""

from __future__ import annotations

import logging
import time

import pytest

from server import connection
from tests.server.raw_http import answer, connect, posted
from tests.waiting import wait_for

COMPLETIONS = "/v1/completions"


def test_a_body_behind_another_request_may_take_its_time(live, monkeypatch) -> None:
    """It is not one that nobody reads, for which a connection waits no longer than this."""
    monkeypatch.setattr(connection, "SECONDS_TO_LINGER", 0.2)
    first, second = posted(COMPLETIONS, {"prompt": "a"}), posted(COMPLETIONS, {"prompt": "b"}, "Connection: close")
    live.play(live.engine.script, delay=0.1)  # else the second is not behind the first
    with connect(live) as sock:
        sock.sendall(first + second[:-5])
        assert b"200 OK" in sock.recv(65536)
        time.sleep(2 * connection.SECONDS_TO_LINGER)
        sock.sendall(second[-5:])
        status, rest = answer(sock)
    assert status == 200 and b'"text":"b"' in rest


@pytest.mark.parametrize(("behind", "status"), [(b"GET /hea", b" 408 "), (b"no HTTP\r\n\r\n", b" 400 ")])
def test_what_is_wrong_behind_a_stream_is_told_after_it(start, behind, status) -> None:
    """Not in the middle of it, where its client would take it for a part of the answer."""
    server = start(request_header_timeout=0.2, keep_alive_timeout=60)
    server.play([*server.tokenizer.byte_ids("0123456789"), 2], delay=0.1)
    with connect(server) as sock:
        sock.sendall(posted(COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 10}))
        received = sock.recv(65536)
        sock.sendall(behind)
        while chunk := sock.recv(65536):
            received += chunk
    first, end, second = received.partition(b"0\r\n\r\n")
    assert end and first.count(b"HTTP/1.1") == 1 and first.endswith(b"data: [DONE]\n\n\r\n")
    assert status in second.partition(b"\r\n")[0]


def test_a_body_that_breaks_is_told_at_once(start) -> None:
    server = start(request_body_timeout=60)
    with connect(server) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert answer(sock)[0] == 400


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_client_that_leaves_with_requests_behind_is_noticed(start, caplog, stream, count) -> None:
    """The one that is answered is aborted, and no other begins."""
    server = start()
    server.play(server.tokenizer.byte_ids("0123456789"), delay=0.02)
    request = posted(COMPLETIONS, {"prompt": "a", "stream": stream, "max_tokens": 10_000, "ignore_eos": True})
    with connect(server) as sock:
        sock.sendall(request * count)
        wait_for(lambda: server.engine.live)
    with caplog.at_level(logging.ERROR):
        server.settle()
        time.sleep(0.2)
    assert len(server.engine.added) == 1 and not server.engine.live
    assert not [record for record in caplog.records if record.exc_info]
