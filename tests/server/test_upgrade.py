"""Offers of another protocol (`Upgrade`), which the server does not take: the request is served as any other."""

from __future__ import annotations

import json
import time

import pytest

from tests.server.raw_http import answer, connect, head, posted

COMPLETIONS = "/v1/completions"
OFFERS = [
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
    ("Connection: keep-alive, upgrade", "upgrade: websocket"),
    ("Connection: Upgrade", "Upgrade: a", "Upgrade: b"),
    ("Upgrade: h2c",),
]
CLOSE = "Connection: close"


def texts(received: bytes) -> list[str]:
    """Of all answers of a connection."""
    bodies = [part for part in received.split(b"\r\n") if part.startswith(b"{")]
    return [json.loads(body.removesuffix(b"HTTP/1.1 200 OK"))["choices"][0]["text"] for body in bodies]


@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_is_not_taken_and_the_requests_are_answered(live, offer) -> None:
    """In whatever pieces they come, and those behind it too."""
    sent = posted(COMPLETIONS, {"prompt": "first"}, *offer) + posted(COMPLETIONS, {"prompt": "second"}, *offer)
    sent += posted(COMPLETIONS, {"prompt": "third"}, CLOSE)
    first_body = sent.index(b"{")
    for cuts in ((), (first_body,), (40,), (first_body + 3,), (len(sent) // 2,), (10, first_body - 1, first_body + 1)):
        with connect(live) as sock:
            for begin, end in zip((0, *cuts), (*cuts, len(sent)), strict=True):
                sock.sendall(sent[begin:end])
                time.sleep(0.05 if cuts else 0)
            status, received = answer(sock)
        assert status == 200 and received.count(b"HTTP/1.1") == received.count(b"200 OK") == 3, received
        assert texts(received) == ["first", "second", "third"]


@pytest.mark.parametrize("fields", [(CLOSE, "Connection: Upgrade"), ("Connection: Upgrade, close",)])
def test_an_offer_by_who_wants_one_answer_only(live, fields) -> None:
    with connect(live) as sock:
        sock.sendall(posted(COMPLETIONS, {"prompt": "only"}, *fields, "Upgrade: websocket"))
        status, received = answer(sock)
    assert status == 200 and texts(received) == ["only"]


def test_an_offer_with_a_body_in_chunks(live) -> None:
    content = json.dumps({"prompt": "chunks"}).encode()
    fields = ("Content-Type: application/json", "Transfer-Encoding: chunked", *OFFERS[0])
    with connect(live) as sock:
        sock.sendall(head("POST", COMPLETIONS, *fields) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
        sock.sendall(head("GET", "/health", CLOSE))
        status, received = answer(sock)
    assert status == 200 and b'"text":"chunks"' in received and received.count(b"200 OK") == 2


@pytest.mark.parametrize(
    "fields",
    [("Host: y",), ("Transfer-Encoding: gzip",), ("Content-Length: 1", "Transfer-Encoding: chunked"), ("X\x00: y",)],
)
def test_an_offer_hides_no_fault(live, fields) -> None:
    with connect(live) as sock:
        sock.sendall(head("POST", COMPLETIONS, *OFFERS[0], *fields))
        assert answer(sock)[0] in (400, 501)


def test_no_tunnel_is_made(live) -> None:
    for target in ("example.com:443", "/health"):
        with connect(live) as sock:
            sock.sendall(head("CONNECT", target, CLOSE) + head("GET", "/health", CLOSE))
            status, received = answer(sock)
        assert status in (400, 404, 405) and b"200 OK" not in received
