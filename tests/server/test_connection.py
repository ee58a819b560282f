"""Clients that send too much, or too slowly, or do not read. Cases S04, S17."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from server import connection
from server.connection import MAX_HEAD_BYTES, MAX_HEADERS
from tests.memory import resident, takes_at_most
from tests.server.conftest import LiveServer
from tests.server.raw_http import answer, ask, connect, head, posted
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken

COMPLETIONS = "/v1/completions"
CHUNKED = ("Content-Type: application/json", "Transfer-Encoding: chunked")


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(connection, "SECONDS_TO_LINGER", 0.5)


@contextlib.contextmanager
def probed(server: LiveServer, seconds: float = 0.5) -> Iterator[None]:
    """Asks for /health all the while; the event loop must never be held up for longer.

    In processor time of the process: other work on the machine does not count.
    """
    waits, stop = [], threading.Event()

    def probe() -> None:
        while not stop.is_set():
            begin = time.process_time()
            assert server.http.get("/health").status_code == 200
            waits.append(time.process_time() - begin)
            stop.wait(0.005)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert waits and max(waits) < seconds, sorted(waits)[-5:]


def send_until_refused(sock: socket.socket, piece: bytes, num_bytes: int) -> int:
    """Sends pieces until all is sent or the server has closed; returns how much it took."""
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < num_bytes:
            sock.sendall(piece)
            sent += len(piece)
    return sent


def error_of(received: bytes) -> dict:
    return json.loads(received.partition(b"\r\n\r\n")[2])["error"]


# Heads.


@pytest.mark.parametrize("name", ["X-Large: ", "Authorization: Bearer ", "Cookie: a="])
def test_a_header_of_ten_megabytes(live, name) -> None:
    with takes_at_most(5), probed(live), connect(live) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n" + name.encode())
        send_until_refused(sock, b"x" * 65536, 10 << 20)
        status, received = answer(sock)
    assert status in (431, 0)  # 0: the answer is lost when the client goes on all the same
    assert not status or error_of(received)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 10_000,
        b"GET /health HTTP/1.1\r\nX: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /" + b"y" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + (b"X: " + b"y" * 1000 + b"\r\n") * 66 + b"\r\n",
    ],
    ids=["headers", "endless", "value", "path", "sum"],
)
def test_a_head_that_is_too_large_at_once(live, sent) -> None:
    with connect(live) as sock:
        sock.sendall(sent)
        status, received = answer(sock)
    assert status == 431
    assert str(MAX_HEADERS) in error_of(received)["message"]


def test_a_large_head_is_fine_in_any_pieces(live) -> None:
    whole = head("GET", "/health", "Connection: close", *(f"X-{i}: {'y' * 1000}" for i in range(60)))
    for size in (len(whole), 7000, 999):
        with connect(live) as sock:
            for start in range(0, len(whole), size):
                sock.sendall(whole[start : start + size])
            assert answer(sock)[0] == 200


NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"nonsense\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    b"GET /health HTTP/1.1\r\nX\x00: y\r\n\r\n",
]


@pytest.mark.parametrize("sent", NO_HTTP)
def test_what_is_no_http(live, sent) -> None:
    with connect(live) as sock:
        sock.sendall(sent)
        status, received = answer(sock)
    assert status == 400 and error_of(received)["message"] == "this is no HTTP request"


def test_heads_that_do_not_end(start) -> None:
    """Slow-loris: a byte now and then, empty lines, or nothing at all; a second request on the connection too."""
    server = start(request_header_timeout=0.3, keep_alive_timeout=1)
    for begun, drop in ((b"", b""), (b"", b"\r\n"), (b"GET /", b"z"), (b"GET / HTTP/1.1\r\nX: y", b"z")):
        with connect(server) as sock, probed(server):
            begin = time.monotonic()
            sock.sendall(begun)
            with contextlib.suppress(ConnectionError):
                while drop and time.monotonic() - begin < 0.4:
                    sock.sendall(drop)
                    time.sleep(0.01)
            assert answer(sock)[0] == (408 if drop else 0)
            assert time.monotonic() - begin < 10
    with connect(server) as sock:
        sock.sendall(head("GET", "/health"))
        assert b"200 OK" in sock.recv(65536)
        sock.sendall(b"GET /health HT")
        assert answer(sock)[0] == 408


def test_an_idle_connection_is_closed(start) -> None:
    server = start(keep_alive_timeout=1, request_header_timeout=0.5)
    with connect(server) as sock:
        sock.sendall(head("GET", "/health"))
        assert answer(sock)[0] == 200
    with connect(server) as sock:
        sock.sendall(head("GET", "/health"))
        assert b"200 OK" in sock.recv(65536)
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                sock.sendall(b"\r\n")  # keeps nothing alive
                time.sleep(0.05)
        assert answer(sock)[0] == 0


# Bodies.


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a_body_of_two_gigabytes_is_refused_unread(live, path) -> None:
    with takes_at_most(10), connect(live) as sock:
        sock.sendall(head("POST", path, "Content-Type: application/json", f"Content-Length: {2 << 30}"))
        received = sock.recv(65536)
        assert b" 413 " in received.partition(b"\r\n")[0]
        send_until_refused(sock, b"x" * (1 << 20), 20 << 20)  # an honest client goes on for a while


@pytest.mark.parametrize("length", ["99999999999999999999", "18446744073709551615", str(33 << 20)])
def test_lengths_that_are_too_large(live, length) -> None:
    status, _ = ask(live, "POST", COMPLETIONS, "Content-Type: application/json", f"Content-Length: {length}")
    assert status in (400, 413)


def test_an_endless_body(start) -> None:
    """In chunks, of which nobody has said how many will come."""
    server = start(max_body_bytes=1 << 20)
    with takes_at_most(10), probed(server), connect(server) as sock:
        sock.sendall(head("POST", COMPLETIONS, *CHUNKED))
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        assert send_until_refused(sock, piece, 1 << 30) < 1 << 30
    assert server.post(COMPLETIONS, prompt="x").status_code == 200


def test_a_body_that_a_route_does_not_read(start) -> None:
    """The answer comes, and the connection ends, whatever a client may take its time for."""
    server = start(keep_alive_timeout=600, request_header_timeout=600, request_body_timeout=600)
    for fields in (CHUNKED, ("Content-Length: 1000000000",)):
        with connect(server) as sock:
            sock.sendall(head("GET", "/health", *fields))
            assert b"200 OK" in sock.recv(65536)
            assert answer(sock) == (0, b"")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, identity", "x"])
def test_no_coding_is_undone(live, coding) -> None:
    """A bomb of a thousand bytes could be a gigabyte."""
    response = live.http.post(COMPLETIONS, content=b"\x1f\x8b" + b"x" * 1000, headers={"Content-Encoding": coding})
    assert response.status_code == 415 and coding in response.json()["error"]["message"]
    same = {"Content-Encoding": "Identity"}
    assert live.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=same).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_drips(start, chunked) -> None:
    server = start(request_body_timeout=0.3)
    fields = CHUNKED if chunked else ("Content-Type: application/json", "Content-Length: 1000")
    with connect(server) as sock, probed(server):
        begin = time.monotonic()
        sock.sendall(head("POST", COMPLETIONS, *fields))
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begin < 0.6:
                sock.sendall(b"1\r\n \r\n" if chunked else b" ")
                time.sleep(0.02)
        status, received = answer(sock)
    assert status == 408 and b"connection: close" in received.lower()


def test_the_continuation_of_a_body_is_not_asked_for_in_vain(live) -> None:
    with connect(live) as sock:
        sock.sendall(head("POST", COMPLETIONS, "Expect: 100-continue", f"Content-Length: {2 << 30}"))
        assert b"413" in sock.recv(65536).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"prompt":"x","x":' + b"[" * 30_000_000 + b"]}", 413),
        (b'{"messages":[' + b"{}," * 10_000_000 + b"{}]}", 413),
        (b'{"prompt":[' + b"5," * 15_000_000 + b"5]}", 413),
        (b'{"prompt":[' + b"5," * 2_000_000 + b"5]}", 400),
        (b"{" + b",".join(b'"%d":1' % i for i in range(2_000_000)) + b"}", 413),
        (b"{" + b",".join(b'"%d":1' % i for i in range(250_000)) + b"}", 400),
        (b'{"prompt":"' + b"a" * (30 << 20) + b'"}', 400),
        (b'{"prompt":"' + b" " * (30 << 20) + b'"}', 400),
        (b'{"prompt":"' + "é".encode() * (15 << 20) + b'"}', 400),
        (b'{"prompt":"' + b"\\n" * (15 << 20) + b'"}', 400),
        (b'{"prompt":"' + b"a" * (50 << 20) + b'"}', 413),
        (b'{"messages":[{"role":"user","content":"' + b"a" * (30 << 20) + b'"}]}', 400),
        (b" " * (31 << 20), 400),
    ],
    ids=["deep", "deeper", "lists", "objects", "numbers", "ids", "keys", "fewer-keys", "a", "spaces", "utf-8",
         "escapes", "too-large", "chat", "nothing"],
)  # fmt: skip
def test_a_large_body_holds_nobody_up(live, monkeypatch, content, status) -> None:
    """S17: what is checked is checked beside the event loop; what would hold up every thread is refused unparsed."""
    monkeypatch.setattr(connection, "SECONDS_TO_LINGER", 60.0)  # all of it is sent before the answer is read
    path = "/v1/chat/completions" if b"messages" in content[:20] else COMPLETIONS
    before = resident()
    with connect(live) as sock:
        # Sent before the probes begin: client and server share a process here, as they do not elsewhere.
        sock.sendall(head("POST", path, "Connection: close", "Content-Type: application/json",
                          f"Content-Length: {len(content)}") + content[:-1])  # fmt: skip
        with probed(live):
            sock.sendall(content[-1:])
            assert answer(sock)[0] == status
    assert resident() - before < 50 + 6 * len(content) / 1e6


# Readers.


def test_readers_that_never_read(start) -> None:
    """S04: fifty of them. Memory stays, others are served as ever, and the engine gets its blocks back."""
    server = start(slow_reader_timeout=1.0, engine_options={"max_model_len": 100_000})
    server.play(list(server.tokenizer.byte_ids("0123456789" * 20)), delay=0.02, tokens_per_step=20)
    for listener in server.server.servers[0].sockets:  # else the kernel takes megabytes of each
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    before = resident()
    request = posted(COMPLETIONS, {"prompt": "x", "max_tokens": 99_000, "stream": True, "logprobs": 5})
    clients = []
    for _ in range(50):
        clients.append(connect(server, receive_buffer=2048))
        clients[-1].sendall(request)
    wait_for(lambda: len(server.engine.added) == 50)
    with probed(server, 3.0):
        for _ in range(5):
            assert server.post(COMPLETIONS, prompt="x", max_tokens=20).json()["choices"][0]["text"] == "0123456789" * 2
        wait_for(lambda: not server.engine.live)
    wait_for(lambda: not server.server.server_state.connections - resting(server))
    assert resident() - before < 100
    for client in clients:
        client.close()
    server.settle()


def resting(server: LiveServer) -> set:
    """Connections on which nothing is being answered."""
    return {c for c in server.server.server_state.connections if c.cycle is None or c.cycle.response_complete}


def test_a_slow_reader_that_goes_on_reading_is_kept(start) -> None:
    server = start(slow_reader_timeout=1.0)
    for listener in server.server.servers[0].sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server.play(list(server.tokenizer.byte_ids("0123456789")), tokens_per_step=50)
    body = {"prompt": "x", "max_tokens": 500, "n": 64, "logprobs": 0}
    with connect(server, receive_buffer=4096) as sock:
        sock.sendall(posted(COMPLETIONS, body, "Connection: close"))
        received = bytearray()
        while chunk := sock.recv(10_000):
            received += chunk
            time.sleep(0.005)
    assert len(json.loads(received.partition(b"\r\n\r\n")[2])["choices"]) == 64


@pytest.mark.parametrize("fields", [(), ("Connection: close",)])
def test_a_whole_answer_that_is_never_read(start, fields) -> None:
    """Nor does it stay when there is nothing more to write."""
    server = start(slow_reader_timeout=0.3)
    for listener in server.server.servers[0].sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server.play(list(server.tokenizer.byte_ids("0123456789")), tokens_per_step=50)
    with connect(server, receive_buffer=2048) as sock:
        sock.sendall(posted(COMPLETIONS, {"prompt": "x", "max_tokens": 500, "n": 64, "logprobs": 0}, *fields))
        connections = server.server.server_state.connections
        wait_for(lambda: any(c.cycle is not None for c in connections))
        wait_for(lambda: not any(c.cycle is not None and c.cycle.scope["method"] == "POST" for c in connections))
    server.settle()


def test_uvicorn_has_what_is_overridden() -> None:
    """Names of its own that another version might not call any more."""
    (base,) = connection.BoundedConnection.__bases__
    own = {name for name, value in vars(connection.BoundedConnection).items() if callable(value)}
    called_by_uvicorn = {
        name for name in own if name.startswith(("on_", "_start", "send_", "pause", "resume", "data_"))
    }
    assert {"_start_asgi_task", "send_400_response", "on_response_complete"} <= called_by_uvicorn
    assert all(hasattr(base, name) for name in called_by_uvicorn)
