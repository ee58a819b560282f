"""A server that is told to end while requests run longer than they may: everybody gets an answer."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest
import uvicorn

from server.draining import DrainingServer
from tests.server.test_processes import COMPLETIONS, Served
from tests.waiting import accepts, wait_for


@pytest.fixture(scope="module")
def all_served() -> Iterator[dict[str, Served]]:
    served = {
        "time is over": Served("echo delay=0.05", 1, "--shutdown-timeout", "0.3"),
        "ctrl-c twice": Served("echo delay=0.05", 1),
        "terminal closed": Served("echo delay=0.05", 1, "--shutdown-timeout", "0.3"),
        "client that does not read": Served("echo delay=0.0", 1, "--shutdown-timeout", "0.3"),
    }
    try:
        for server in served.values():
            wait_for(server.is_ready, 300)
        yield served
    finally:
        for server in served.values():
            server.stop()


def end(served: Served, how: str) -> None:
    number = {"ctrl-c twice": signal.SIGINT, "terminal closed": signal.SIGHUP}.get(how, signal.SIGTERM)
    served.child.send_signal(number)
    if how == "ctrl-c twice":
        wait_for(lambda: not accepts(served.port))
        served.child.send_signal(number)


@pytest.mark.parametrize("how", ["time is over", "ctrl-c twice", "terminal closed"])
def test_what_does_not_end_in_time_is_aborted_with_an_answer(all_served, how) -> None:
    served = all_served[how]
    answers: list[httpx.Response] = []
    body = {"prompt": "long", "max_tokens": 2000}
    threads = [
        threading.Thread(target=lambda more=more: answers.append(served.http.post(COMPLETIONS, json={**body, **more})))
        for more in ({}, {"stream": True}, {"n": 3})
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(len(core["requests"]) for core in served.http.get("/engine/state").json()["cores"]) == 5)
    end(served, how)
    for thread in threads:
        thread.join(60)
    assert served.child.wait(60) == 0
    assert [answer.status_code for answer in answers] == [200] * 3
    for answer in answers:
        if "event-stream" in answer.headers["content-type"]:
            *_, last, done, rest = answer.text.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            choices = [json.loads(last.removeprefix("data: "))["choices"][0]]
        else:
            choices = answer.json()["choices"]
            assert all(choice["text"] for choice in choices)
        assert {choice["finish_reason"] for choice in choices} == {"abort"}
    assert served.child.stderr is not None
    log = served.child.stderr.read()
    assert "Traceback" not in log and "Cancel" not in log


def test_a_client_that_does_not_read_is_not_waited_for(all_served) -> None:
    served = all_served["client that does not read"]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", served.port))
        body = json.dumps({"prompt": "long", "max_tokens": 100_000, "stream": True, "n": 8}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(100)
        end(served, "")
        assert served.child.wait(60) == 0
    assert served.child.stderr is not None and "Traceback" not in served.child.stderr.read()


def test_a_drain_that_fails_is_logged(monkeypatch, caplog) -> None:
    class Stuck:
        num_unfinished = 1

        def abort_all(self) -> None:
            raise RuntimeError("stuck")

    async def shutdown(*_: object) -> None:
        await asyncio.sleep(0.2)

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    server = DrainingServer(uvicorn.Config("none:app"), cast(Any, Stuck()), 0.0)
    asyncio.run(server.shutdown())
    assert "could not be ended" in caplog.text and "RuntimeError: stuck" in caplog.text
