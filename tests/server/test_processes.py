"""`jaxpaged serve` as it runs in production: an API process and its engine cores. Cases B50, B51, B54, B56, S03."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server_process import free_port
from tests.engine.test_process_client import is_alive
from tests.waiting import accepts, until, wait_for

ROOT = Path(__file__).resolve().parents[2]
COMPLETIONS = "/v1/completions"
SERVE = textwrap.dedent(
    """
    import functools
    import signal
    import sys
    import server.commands
    import server.serve
    from server.cli import main
    from tests.scripted_core import LOAD, TOKENIZER

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    server.serve.ProcessClient = functools.partial(server.serve.ProcessClient, engine=LOAD)
    server.commands.announce = lambda config: None  # no model has such a name
    server.serve.open_front = lambda config: (TOKENIZER, {})
    sys.exit(main(["serve", *sys.argv[1:], "--served-model-name", "tiny", "--generation-config", "vllm"]))
    """
)


class Served:
    """A server with scripted cores, in a process of its own.

    Attributes:
      child: that process.
      http: a client of it.
    """

    def __init__(self, model: str, cores: int, *more: str):
        self.port = free_port()
        options = [
            "--port",
            str(self.port),
            "--data-parallel-size",
            str(cores),
            "--uvicorn-log-level",
            "warning",
            *more,
        ]
        self.child = subprocess.Popen(
            [sys.executable, "-c", SERVE, model, *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def is_ready(self) -> bool:
        assert self.child.poll() is None, self.child.stderr and self.child.stderr.read()
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def processes(self) -> dict[int, str]:
        """Command lines of its descendants."""
        found: dict[int, str] = {}
        parents = {self.child.pid}
        listing = subprocess.run(
            ["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        ).stdout
        rows = sorted((line.split(None, 2) for line in listing.splitlines()), key=lambda row: int(row[0]))
        for pid, parent, command in rows:
            if int(parent) in parents:
                parents.add(int(pid))
                found[int(pid)] = command
        return found

    def cores(self) -> list[int]:
        """Process ids of the cores."""
        return [pid for pid, command in self.processes().items() if "core_process" in command]

    def complete(self, prompt: str, **body: Any) -> httpx.Response:
        return self.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 100, **body})

    def is_idle(self) -> bool:
        """Whether no core runs anything or holds a block."""
        cores = self.http.get("/engine/state").json()["cores"]
        return all(not core["requests"] and not core["num_used_blocks"] for core in cores)

    def stop(self) -> None:
        self.http.close()
        self.child.kill()
        self.child.wait()
        assert self.child.stderr is not None
        self.child.stderr.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Served]]:
    """Started side by side: most of a start is importing."""
    models = {
        "lives": ("echo delay=0.01 max_model_len=20000 num_blocks=50000", 2),
        "is killed": ("echo delay=0.005", 1),
        "hangs": ("echo", 1),
    }
    servers = {name: Served(*how) for name, how in models.items()}
    try:
        for server in servers.values():
            wait_for(server.is_ready, 300)
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture
def served(servers) -> Iterator[Served]:
    """One that is quiet before and after each test."""
    yield servers["lives"]
    wait_for(servers["lives"].is_idle)


def test_one_socket_listens_and_the_others_are_private(served, tmp_path) -> None:
    """S03: pickles sent to the port make nothing happen."""
    listing = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    pids = [served.child.pid, *served.processes()]
    lines = [line for line in listing.splitlines() if any(f"pid={pid}," in line for pid in pids)]
    assert len(lines) == 1 and f"127.0.0.1:{served.port} " in lines[0]
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    with socket.create_connection(("127.0.0.1", served.port)) as stranger:
        stranger.sendall(pickle.dumps(Evil()))
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    assert served.http.post(COMPLETIONS, content=pickle.dumps(Evil())).status_code in (400, 415)
    assert served.complete("hello").json()["choices"][0]["text"] == "hello" and not marker.exists()


def test_the_same_id_twice(served) -> None:
    """B50."""

    async def test() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:

            async def ask(prompt: str) -> str:
                body = {"prompt": prompt, "max_tokens": 100, "request_id": "id"}
                response = await http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "id"})
                assert response.json()["id"].endswith("id")
                return response.json()["choices"][0]["text"]

            for _ in range(5):
                assert await asyncio.gather(ask("one"), ask("two"), ask("three")) == ["one", "two", "three"]
                task = asyncio.ensure_future(ask("long"))
                await asyncio.sleep(0.01)
                task.cancel()  # its abort is under way when the next one comes
                assert await ask("again") == "again"

    asyncio.run(test())


def num_aborted(served: Served) -> float:
    """Requests that were aborted, as the metrics tell."""
    found = re.findall(r'^jaxpaged:request_success_total\{.*finished_reason="abort".*\} (\S+)$',
                       served.http.get("/metrics").text, re.MULTILINE)  # fmt: skip
    return sum(map(float, found))


def test_200_random_disconnects_leak_nothing(served) -> None:
    """B51: 200 that leave while they run, each of which is counted as aborted, and one in ten that stays."""
    rng, before = random.Random(0), num_aborted(served)
    running: set[str] = set()  # ids, as the engine tells them
    num_left = 0

    async def test() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False, limits=limits) as http:

            async def look() -> None:
                while True:
                    state = (await http.get("/engine/state")).json()
                    running.update(r["request_id"] for core in state["cores"] for r in core["requests"])
                    await asyncio.sleep(0.05)

            async def leave_a_stream(body: dict[str, Any]) -> None:
                async with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
                    lines = response.aiter_lines()
                    for _ in range(rng.randrange(1, 12)):
                        assert "error" not in await anext(lines)

            async def leave_before_the_answer(body: dict[str, Any]) -> None:
                asking = asyncio.ensure_future(http.post(COMPLETIONS, json=body))
                await until(lambda: any(body["request_id"] in name for name in running))
                await asyncio.sleep(rng.random() * 0.1)
                assert not asking.done()
                asking.cancel()
                await asyncio.wait({asking})

            async def visitor(i: int) -> None:
                nonlocal num_left
                if i % 10 == 0:
                    response = await http.post(COMPLETIONS, json={"prompt": f"stay {i}", "max_tokens": 100})
                    assert response.json()["choices"][0]["text"] == f"stay {i}"
                body = {"prompt": "long" * rng.randrange(1, 30), "max_tokens": 19_000, "n": rng.choice([1, 1, 3]),
                        "request_id": f"visitor-{i}-"}  # fmt: skip
                await rng.choice([leave_a_stream, leave_before_the_answer])(body)
                num_left += 1

            looking, numbers = asyncio.ensure_future(look()), iter(range(200))

            async def visitors() -> None:
                for i in numbers:
                    await visitor(i)

            await asyncio.gather(*(visitors() for _ in range(20)))
            looking.cancel()

    asyncio.run(test())
    wait_for(served.is_idle)
    assert num_left == 200
    wait_for(lambda: num_aborted(served) - before >= 200)
    assert num_aborted(served) - before == 200
    for core in served.http.get("/engine/state").json()["cores"]:
        assert core["num_used_blocks"] == 0 and set(base64.b64decode(core["blocks"])) == {0}  # all of them are free


def test_both_cores_work(served) -> None:
    cores = served.http.get("/engine/state").json()["cores"]
    assert len(cores) == len(served.cores()) == 2


def test_a_killed_core_is_told_to_all_and_ends_the_server(servers) -> None:
    """B54: a stream ends with an error event, new requests and the probes get 503, the process exits with 1."""
    served = servers["is killed"]
    with served.http.stream(
        "POST", COMPLETIONS, json={"prompt": "long", "max_tokens": 400, "stream": True}
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(served.cores()[0], signal.SIGKILL)
        killed = time.monotonic()
        events = [line.removeprefix("data: ") for line in lines if line]
    assert time.monotonic() - killed < 10
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "engine_dead"
    assert served.http.get("/health").status_code == 503
    refused = served.complete("hello")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    assert served.child.wait(60) == 1
    assert served.child.stderr is not None and "killed by SIGKILL" in served.child.stderr.read()


def test_ctrl_c_twice_ends_it_at_once_whatever_runs(servers) -> None:
    """Even if the core hangs. The terminal sends the signal to every process that has not left its group."""
    served = servers["hangs"]
    core, children = served.cores(), served.processes()
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        body = json.dumps({"prompt": "hang", "max_tokens": 5}).encode()
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + b"Content-Length: %d\r\n\r\n" % len(body) + body
        )  # fmt: skip
        wait_for(lambda: served.http.get("/load").json()["server_load"])
        os.killpg(served.child.pid, signal.SIGINT)
        wait_for(lambda: not accepts(served.port))
        assert served.child.poll() is None and is_alive(core[0])  # it waits for the request
        os.killpg(served.child.pid, signal.SIGINT)
        begin = time.monotonic()
        served.child.wait(60)
    assert time.monotonic() - begin < 30
    wait_for(lambda: not any(is_alive(pid) for pid in children))


def test_nothing_outlives_a_killed_server(servers) -> None:
    """B56: neither the cores nor the processes that try out grammars. The last test: it takes the server away."""
    served = servers["lives"]
    wanted = {"structured_outputs": {"regex": "abc"}}
    assert served.complete("abc", **wanted).json()["choices"][0]["text"] == "abc"
    children = served.processes()
    assert sum("core_process" in c for c in children.values()) == 2
    assert sum("grammar_check" in c for c in children.values()) >= 2
    os.kill(served.child.pid, signal.SIGKILL)
    begin = time.monotonic()
    wait_for(lambda: not any(is_alive(pid) for pid in children))
    assert time.monotonic() - begin < 5
    served.child.wait()
