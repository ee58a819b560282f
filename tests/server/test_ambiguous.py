"""Requests that a proxy may understand otherwise than the server does."""

from __future__ import annotations

import json

import pytest

from tests.server.raw_http import answer, connect, posted

KEY = "key-of-a-tenant"
BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
POST = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"


def chunked(server, head: str, trailers: str) -> tuple[int, bytes]:
    """Sends BODY in one chunk with fields behind it."""
    with connect(server) as sock:
        head = f"{POST}{head}Transfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head.encode() + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY) + trailers.encode() + b"\r\n")
        return answer(sock)


def test_fields_behind_a_body_are_no_headers(start) -> None:
    server = start(api_key=(KEY,))
    own = f"Authorization: Bearer {KEY}\r\n"
    assert chunked(server, "Host: x\r\n", own)[0] == 401
    status, told = chunked(server, f"Host: x\r\n{own}", "X-Request-Id: injected\r\nHost: y\r\nContent-Encoding: br\r\n")
    assert status == 200 and b"injected" not in told
    long = "".join(f"X-{i}: {'v' * 1000}\r\n" for i in range(100))
    assert chunked(server, f"Host: x\r\n{own}", long)[0] in (0, 200, 431)  # whichever comes first
    server.settle()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("", 400),
        ("Host: a\r\nHost: b\r\n", 400),
        ("Host: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n", 400),
        ("Host: a\r\nContent-Type: text/plain\r\nContent-Type: application/json\r\n", 400),
        ("Host: a\r\nTransfer-Encoding: gzip, chunked\r\n", 501),
        ("Host: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 400),
        ("Host:\r\n", 200),
    ],
)
def test_headers_that_are_missing_or_twice(live, head, status) -> None:
    with connect(live) as sock:
        sock.sendall(f"GET /health HTTP/1.1\r\nConnection: close\r\n{head}\r\n".encode())
        told, content = answer(sock)
    assert told == status
    if status != 200:
        assert json.loads(content.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_http_1_0_needs_no_host(live) -> None:
    with connect(live) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert answer(sock)[0] == 200


def test_a_request_that_says_all_once_is_served(live) -> None:
    with connect(live) as sock:
        sock.sendall(posted("/v1/completions", {"prompt": "hi", "max_tokens": 2}, "Connection: close"))
        assert answer(sock)[0] == 200
