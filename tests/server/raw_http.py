"""HTTP by hand: what no client library would send."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

from tests.server.conftest import RunningServer


def connect(server: RunningServer, receive_buffer: int | None = None) -> socket.socket:
    """A connection to the server."""
    url = urlsplit(server.url)
    sock = socket.socket()
    if receive_buffer is not None:  # before the handshake, else the window is large already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect((url.hostname, url.port))
    return sock


def head(method: str, path: str, *fields: str) -> bytes:
    """The head of a request."""
    return "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", "Host: x", *fields, "")).encode("latin-1")


def posted(path: str, body: dict, *fields: str) -> bytes:
    """A whole POST."""
    content = json.dumps(body).encode()
    length = f"Content-Length: {len(content)}"
    return head("POST", path, "Content-Type: application/json", length, *fields) + content


def answer(sock: socket.socket) -> tuple[int, bytes]:
    """Status and rest of what comes until the server closes; 0 if it is nothing."""
    received = b""
    try:
        while chunk := sock.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    status = int(received.split(b" ", 2)[1]) if received else 0
    return status, received


def ask(server: RunningServer, method: str, path: str, *fields: str) -> tuple[int, bytes]:
    """Sends a request without a body on a connection of its own."""
    with connect(server) as sock:
        sock.sendall(head(method, path, "Connection: close", *fields))
        return answer(sock)
