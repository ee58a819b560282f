"""An HTTP/1.1 client that costs its machine little: it shares the cores with the server that it loads.

What arrives is stored with its time and looked at when the run is over: microseconds a chunk while the run lasts, and
as much memory as the answers have bytes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from typing import cast
from urllib.parse import urlsplit

_CHUNKED = re.compile(rb"^transfer-encoding:[ \t]*chunked[ \t]*\r$", re.IGNORECASE | re.MULTILINE)
_LENGTH = re.compile(rb"^content-length:[ \t]*(\d+)[ \t]*\r$", re.IGNORECASE | re.MULTILINE)
_CLOSE = re.compile(rb"^connection:[ \t]*close[ \t]*\r$", re.IGNORECASE | re.MULTILINE)
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Reply:
    """The answer to one request, as it arrived. Times are of `time.monotonic`, which all processes share.

    Attributes:
      sent: when the request was written.
      status: the HTTP status; 0 if none came.
      error: why the answer is not whole; "" if it is.
    """

    def __init__(self) -> None:
        self.sent = 0.0
        self.status = 0
        self.error = ""
        self.chunked = False
        self._times: list[float] = []
        self._parts: list[bytes] = []  # of the body, still chunked

    def add(self, part: bytes, now: float) -> None:
        """Stores what has arrived of the body."""
        self._times.append(now)
        self._parts.append(part)

    @property
    def num_bytes(self) -> int:
        """Size of the body as transferred."""
        return sum(map(len, self._parts))

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(part for _, part in self.parts())

    def parts(self) -> Iterator[tuple[float, bytes]]:
        """The body as the server wrote it, piece by piece, each with the time at which its last byte had arrived."""
        if not self.chunked:
            yield from zip(self._times, self._parts, strict=True)
            return
        buffer = b""
        for now, part in zip(self._times, self._parts, strict=True):
            buffer += part
            while (end := buffer.find(b"\r\n")) >= 0:
                start, size = end + 2, int(buffer[:end].partition(b";")[0], 16)
                if size == 0 or len(buffer) < start + size + 2:
                    break
                yield now, buffer[start : start + size]
                buffer = buffer[start + size + 2 :]

    def events(self) -> Iterator[tuple[float, bytes]]:
        """The data of the server-sent events in it, each with the time at which it was complete."""
        buffer = b""
        for now, part in self.parts():
            *events, buffer = (buffer + part).split(b"\n\n")
            for event in events:
                if not event.startswith(b":"):  # a comment, which keeps the connection alive
                    yield now, event.removeprefix(b"data: ")


class _Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self) -> None:
        self.usable = False
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None
        self._head, self._tail, self._missing = b"", b"", 0

    def start(self, request: bytes) -> tuple[Reply, asyncio.Future[None]]:
        """Writes a request. Returns what will be its reply, and a future of when that is whole or has failed."""
        assert self._transport is not None and self._reply is None
        self._reply, self._done = Reply(), asyncio.get_running_loop().create_future()
        self._head, self._tail = b"", b""
        self._reply.sent = time.monotonic()
        self._transport.write(request)
        return self._reply, self._done

    def close(self, error: str = "") -> None:
        """Closes at once; a request that waits fails with `error`."""
        self.usable = False
        self._end(error)
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.usable = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        now, reply = time.monotonic(), self._reply
        if reply is None:
            self.close()  # nobody has asked
            return
        if not reply.status:
            self._head += data
            data = self._take_head(reply)
        if reply.status and (data or not self._missing):
            reply.add(data, now)
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
            if reply.chunked:
                # No body has this in the middle: JSON has no bare line ends.
                if self._tail == _LAST_CHUNK:
                    self._end("")
            else:
                self._missing -= len(data)
                if self._missing <= 0:
                    self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._end(f"the connection was closed too early{f': {exc}' if exc else ''}")

    def _take_head(self, reply: Reply) -> bytes:
        """Reads status and headers, if they are all there; returns what follows them."""
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            return b""
        head += b"\r\n"
        reply.status = int(head[9:12])
        reply.chunked = _CHUNKED.search(head) is not None
        length = _LENGTH.search(head)
        self._missing = int(length[1]) if length else 0
        if _CLOSE.search(head):
            self.usable = False
        self._tail = b"\r\n"  # an empty body is the last chunk only
        return rest

    def _end(self, error: str) -> None:
        if self._reply is not None and self._done is not None:
            self._reply.error = error
            if not self._done.done():
                self._done.set_result(None)
        self._reply = None


class Client:
    """Keeps as many connections as there are requests at a time."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None):
        """Args: base_url: http://HOST:PORT, with a path prefix if there is one."""
        url = urlsplit(base_url)
        if url.scheme != "http" or not url.hostname:
            raise ValueError(f"base_url={base_url!r} must be http://HOST:PORT")
        self._address, self._prefix = (url.hostname, url.port or 80), url.path.rstrip("/")
        lines = {"Host": url.netloc, "Content-Type": "application/json", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Reply:
        """GETs."""
        return await self._ask(self._request("GET", path))

    async def post(self, path: str, body: bytes, *, timeout: float | None = None) -> Reply:
        """POSTs JSON; what goes wrong is in the reply.

        Args:
          timeout: seconds after which the connection is given up.
        """
        return await self._ask(self._request("POST", path, body), timeout)

    def close(self) -> None:
        """Closes the connections that no request uses."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode() + body

    async def _ask(self, request: bytes, timeout: float | None = None) -> Reply:
        while True:
            connection = self._kept()
            reused = connection is not None
            if connection is None:
                try:
                    _, connection = await asyncio.get_running_loop().create_connection(_Connection, *self._address)
                except OSError as e:
                    reply = Reply()
                    reply.error = str(e)
                    return reply
            reply = await self._ask_on(connection, request, timeout)
            if not (reused and reply.error and not reply.status):  # else the server had just closed it
                return reply

    async def _ask_on(self, connection: _Connection, request: bytes, timeout: float | None) -> Reply:
        reply, done = connection.start(request)
        try:
            await (done if timeout is None else asyncio.wait_for(done, timeout))
        except TimeoutError:
            connection.close(f"not answered within {timeout:g} s")
        except asyncio.CancelledError:
            connection.close()
            raise
        if connection.usable and not reply.error:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None
