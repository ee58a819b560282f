"""A connection of uvicorn's with bounds: on the size and the time of a request's head, and on slow readers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.config import ServerConfig
from server.errors import APIError, error_object, shown
from server.slow_reader import SlowReaderWatch
from server.upgrades import UpgradeIgnoringParser

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
_ONCE = (b"host", b"authorization", b"transfer-encoding", b"content-length", b"content-type")
# For a body that nobody reads to come in: closing on it would lose the answer.
SECONDS_TO_LINGER = 2.0
BYTES_TO_LINGER = 64 << 20
_ENDLESS = 1 << 62


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Arguments of `uvicorn.Config`, wherever the app is served."""
    return {
        "http": functools.partial(BoundedConnection, options=config),
        "ws": "none",
        "timeout_keep_alive": config.keep_alive_timeout,
        "server_header": False,
    }


class BoundedConnection(HttpToolsProtocol):
    """Drops clients that send an endless head, send nothing for too long, or do not take their answers.

    A client that closes its half of the connection has left, as with nginx: nothing else tells of those that have left
    altogether before there is something to write to them, which may be minutes of work for nobody.
    """

    def __init__(self, *args: Any, options: ServerConfig, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser = UpgradeIgnoringParser(self)
        self._options = options
        self._in_head, self._in_body, self._refused = True, False, False
        self._received = self._parsed = 0  # bytes of the head
        self._begun = False  # there is a head
        self._head_again: bytes | None = None  # a head that comes once more, without its `Upgrade`
        self._answered: RequestResponseCycle | None = None  # what is answered now, or was last
        self._unread = 0  # bytes of a body that nobody waits for
        self._closing = False
        self._late_refusal: APIError | None = None  # of a request behind one that is being answered
        self._refusal = APIError(400, "this is no HTTP request")
        self._head_timer: asyncio.TimerHandle | None = None

    # The head.

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._slow_reader = SlowReaderWatch(transport, self._options.slow_reader_timeout)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._slow_reader.stop()
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:  # super knows but the last to come
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_body and self.cycle.response_complete:
            self._unread += len(data)
            if self._unread > BYTES_TO_LINGER:
                self.transport.close()
                return
        unfinished = self._in_head
        super().data_received(data)
        if unfinished and self._in_head:  # all of it belongs to the head, even if no header has ended yet
            self._received += len(data)
            if self._received > 2 * MAX_HEAD_BYTES:
                self._refuse(_too_large())
        elif not self._in_body and self.cycle is not None and self.cycle.response_complete:
            self._expect_head()  # empty lines keep no connection alive

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._begun, self._received, self._parsed = True, True, 0, 0
        if not self._is_answering:  # its client waits for that answer, and may take its time with the next request
            self._expect_head()
        if self.flow is not None and not self.flow.write_paused:
            self._slow_reader.stop()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # behind a body, where anybody on the way may have added them, they are not looked at
            super().on_header(name, value)
        self._count(len(name) + len(value))

    def _count(self, num_bytes: int) -> None:
        self._parsed += num_bytes
        if self._parsed > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refusal = _too_large()
            raise self._refusal  # the parser ends, and calls `send_400_response`

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._head_again = self._head_without_upgrade()
            return
        version = self.parser.get_http_version()
        fault = _fault(self.headers, version)
        if fault is not None:
            self._refusal = fault
            raise fault
        self._in_head, self._begun, self._in_body, self._unread = False, False, True, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()
        self.cycle.transport = _GentlyClosed(self.transport, self.close_gently)  # type: ignore[assignment]
        if version == "1.0":
            self.cycle.send = functools.partial(_send_unchunked, self.cycle)

    def _head_without_upgrade(self) -> bytes:
        line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"".join((line, *kept, b"\r\n"))

    def take_head_again(self) -> bytes | None:
        """The head at which the parser has stopped for its `Upgrade`, without that; once."""
        again, self._head_again = self._head_again, None
        return again

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._options.request_header_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._begun or self._received:
            self._refuse(APIError(408, f"no whole request within {self._options.request_header_timeout} seconds"))
        else:  # nothing was ever asked
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def _refuse(self, error: APIError) -> None:
        if self.transport.is_closing() or self._refused:
            return
        self._refused = True
        if self._is_answering:
            self._late_refusal = error
            return
        self._write_refusal(error)

    @property
    def _is_answering(self) -> bool:
        """Whether a response is pending. Not so if the only pending request's own body is malformed: the error response
        then replaces it."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return bool(self.pipeline or cycle.response_started or not self._in_body)

    def _write_refusal(self, error: APIError) -> None:
        status, answer = error_object(error)
        content = msgspec.json.encode(answer)
        fields = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        self.transport.write(STATUS_LINE[status] + fields + content)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(SECONDS_TO_LINGER, self.transport.close)

    # The body, if the answer does not wait for it.

    def on_message_complete(self) -> None:
        if self._head_again is not None:  # it has not begun
            return
        self._in_body = False
        super().on_message_complete()
        if self._closing:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:
            self._answer_what_is_behind()
        if self._in_body and self.cycle.response_complete:  # else it is the body of a request behind this one
            self.loop.call_later(SECONDS_TO_LINGER, self._close_unless_read, self.cycle)
            self.flow.resume_reading()
        if self.transport.get_write_buffer_size():
            self._slow_reader.start()

    def _answer_what_is_behind(self) -> None:
        """Looks after the part of a request that came while another one was answered."""
        if self._late_refusal is not None and not self.transport.is_closing():
            if self._in_body:  # it was about a request that has its answer
                self.transport.close()
            else:
                self._write_refusal(self._late_refusal)
        elif self._in_head and self._begun:
            self._expect_head()

    def close_gently(self) -> None:
        """Closes once the body has come in or cannot be waited for."""
        if self._in_body:
            self._closing = True
        else:
            self.transport.close()

    def _close_unless_read(self, cycle: Any) -> None:
        if self._in_body and self.cycle is cycle:
            self.transport.close()

    # A reader that does not read.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slow_reader.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._slow_reader.stop()


async def _send_unchunked(cycle: RequestResponseCycle, message: Any) -> None:
    """`RequestResponseCycle.send` to a client of HTTP/1.0, which knows no chunks: the answer ends as the connection."""
    if message["type"] == "http.response.start":
        cycle.chunked_encoding, cycle.expected_content_length = False, _ENDLESS
    elif not message.get("more_body", False):  # several parts may wait for a slow reader, but none beside the last
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


class _GentlyClosed:
    """A transport as one request sees it."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]):
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def _fault(headers: list[tuple[bytes, bytes]], version: str) -> APIError | None:
    """Rejects requests that a proxy could frame differently from us (request smuggling)."""
    names = [name for name, _ in headers]
    for name in _ONCE:
        if names.count(name) > 1:
            return APIError(400, f"the request has {names.count(name)} headers {name.decode()}")
    if version == "1.1" and b"host" not in names:
        return APIError(400, "the request has no header host")
    coding = next((value for name, value in headers if name == b"transfer-encoding"), b"chunked")
    if coding.strip().lower() != b"chunked":
        return APIError(501, f"Transfer-Encoding is {shown(coding.decode('latin-1'))}; only chunked is known")
    return None


def _too_large() -> APIError:
    return APIError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers")
