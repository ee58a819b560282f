"""Offers of another protocol, such as HTTP/2 in plain text: none is taken, and the request is served."""

from __future__ import annotations

from typing import Any, Protocol

import httptools


class Connection(Protocol):
    """What is told of the messages that come."""

    def take_head_again(self) -> bytes | None:
        """The head at which the parser has stopped for its `Upgrade`, without that; once."""
        ...


class UpgradeIgnoringParser:
    """A parser to which an offer of another protocol is but a header (RFC 9110, 7.8).

    llhttp ends a request at such a head, whatever its length says. So another one parses the head once more without the
    offer, and what came behind it behind that.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._parser = self._begun()

    def _begun(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._connection)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: that data answers nothing
        return parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: Any) -> None:
        rest = memoryview(data)  # many requests may come at once: none of them copies those behind it
        while True:
            try:
                return self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                head = self._connection.take_head_again()
                if head is None:
                    raise
                self._parser = self._begun()  # what said `Connection: close` takes no more
                self._parser.feed_data(head)
                rest = rest[offer.args[0] :]
