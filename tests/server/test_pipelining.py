"""Requests that are sent on a connection before the last one is answered."""

from __future__ import annotations

import time

from server import connection
from tests.server.raw_http import answer, connect, posted

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
