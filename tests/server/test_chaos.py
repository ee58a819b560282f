"""Under load: 200 streams at once, a core that is killed, a server that is told to go, and what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.http_client import Client, Reply
from benchmarks.latencies import Outcome, outcome
from benchmarks.server_process import free_port
from tests import tiny_model
from tests.engine.test_process_client import is_alive
from tests.server.test_processes import COMPLETIONS, ROOT, Served
from tests.waiting import accepts, wait_for

MODELS = {
    "lives": "echo delay=0.002 num_blocks=100000",
    "is killed": "echo delay=0.02 num_blocks=100000",
    "is told to go": "echo delay=0.02 num_blocks=100000",
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Served, Path]]]:
    """Each with the folder where it makes its temporary ones."""
    servers: dict[str, tuple[Served, Path]] = {}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, model in MODELS.items():
                folder = tmp_path_factory.mktemp("tmp")
                patch.setenv("TMPDIR", str(folder))
                servers[name] = Served(model, 1), folder
        for served, _ in servers.values():
            wait_for(served.is_ready, 300)
        yield servers
    finally:
        for served, _ in servers.values():
            served.stop()


def body(prompt: str, max_tokens: int = 400) -> bytes:
    """The engine echoes the prompt."""
    options = {"include_usage": True}
    return json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True, "stream_options": options}).encode()


def text(number: int) -> str:
    """A token a character."""
    return f"stream {number} says that it is number {number} of many, and no other. "


def num_running(served: Served) -> int:
    """Requests that the core has."""
    return sum(len(core["requests"]) for core in served.http.get("/engine/state").json()["cores"])


async def send(served: Served, prompts: Sequence[str], meanwhile: Any = None) -> list[Reply]:
    """All prompts at once.

    Args:
      meanwhile: called in a thread when the core runs them all.
    """
    client = Client(served.url)
    tasks = [asyncio.ensure_future(client.post(COMPLETIONS, body(prompt), timeout=120)) for prompt in prompts]
    if meanwhile is not None:
        await asyncio.to_thread(wait_for, lambda: num_running(served) == len(prompts))
        await asyncio.to_thread(meanwhile)
    replies = await asyncio.gather(*tasks)
    client.close()
    return replies


def outcomes(replies: Sequence[Reply]) -> list[Outcome]:
    return [outcome(reply, 400, exactly=False) for reply in replies]


def descriptors(pids: Sequence[int]) -> int:
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


def nothing_is_left(served: Served, children: Sequence[int], folder: Path) -> None:
    wait_for(lambda: not any(is_alive(pid) for pid in children))
    assert not list(folder.iterdir())
    assert not accepts(served.port)


def test_200_streams_at_once_are_all_whole_and_right(servers) -> None:
    served, _ = servers["lives"]
    prompts = [text(i) for i in range(200)]
    results = outcomes(asyncio.run(send(served, prompts)))
    assert [result.fault for result in results] == [""] * 200
    assert [result.text for result in results] == prompts
    wait_for(served.is_idle)


TINY_LOAD = ["--check", "--random-input-len", "40", "--random-output-len", "30", "--random-range-ratio", "0.9",
             "--vocab-size", "256"]  # fmt: skip
DEMO_LOAD = ["--check", "10", "--random-input-len", "8", "--random-output-len", "8", "--vocab-size", "49152"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "load"), [("tiny", TINY_LOAD), ("demo", DEMO_LOAD)], ids=["tiny", "demo"])
def test_200_streams_of_a_real_model_at_once_are_whole_and_as_alone(tmp_path, model, load) -> None:
    """`benchmarks.online --check`: none is dropped, and each, or a sample, has the text that its prompt gets alone."""
    tiny_model.save(tmp_path)
    port = str(free_port())
    folder = str(tmp_path) if model == "tiny" else model
    serve = ["serve", folder, "--port", port, "--max-num-seqs", "64", "--num-kv-blocks", "500", "--dtype", "float32"]
    ask = ["--port", port, "--num-prompts", "200", "--ignore-eos", *load]
    child = subprocess.Popen([sys.executable, "-m", "server.cli", *serve], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: child.poll() is not None or accepts(int(port)), 300)
        command = [sys.executable, "-m", "benchmarks.online", *ask]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert told.returncode == 0, told.stdout + told.stderr
        assert re.search(r"^completed\s+200$", told.stdout, re.MULTILINE), told.stdout
    finally:
        child.terminate()
        assert child.wait(60) == 0


@pytest.mark.slow
def test_requests_leave_no_descriptors(servers) -> None:
    """500 of them, on connections of their own; every fifth client leaves in the middle."""
    served, _ = servers["lives"]
    pids = [served.child.pid, *served.processes()]

    async def visit(number: int) -> None:
        client = Client(served.url)
        ask = client.post(COMPLETIONS, body(text(number)), timeout=120)
        if number % 5 == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask, 0.01)
        else:
            assert outcomes([await ask])[0].text == text(number)
        client.close()

    async def visits(first: int, count: int) -> None:
        for batch in range(first, first + count, 25):
            await asyncio.gather(*map(visit, range(batch, batch + 25)))

    asyncio.run(visits(0, 100))  # whatever is opened once
    wait_for(served.is_idle)
    before = descriptors(pids)
    asyncio.run(visits(100, 500))
    wait_for(served.is_idle)
    wait_for(lambda: descriptors(pids) <= before)


def test_a_core_killed_under_load_is_told_to_every_client_at_once(servers) -> None:
    """B54: each stream that has begun ends with an error event and [DONE]; the process exits with 1."""
    served, folder = servers["is killed"]
    children = list(served.processes())
    killed: list[float] = []

    def kill() -> None:
        os.kill(served.cores()[0], signal.SIGKILL)
        killed.append(time.monotonic())

    replies = asyncio.run(send(served, [text(i) for i in range(50)], kill))
    assert time.monotonic() - killed[0] < 10
    for reply in replies:
        if reply.status == 200:
            *_, (_, error), (_, done) = reply.events()
            assert done == b"[DONE]" and json.loads(error)["error"]["code"] == "engine_dead"
        else:
            assert reply.status == 503 and json.loads(reply.body)["error"]["code"] == "engine_dead"
    assert any(reply.status == 200 for reply in replies)
    assert served.http.get("/health").status_code == 503
    assert served.child.wait(60) == 1
    nothing_is_left(served, children, folder)


def test_told_to_go_under_load_it_finishes_what_runs_and_takes_nothing_new(servers) -> None:
    served, folder = servers["is told to go"]
    children = list(served.processes())
    prompts = [text(i) for i in range(50)]

    def terminate() -> None:
        os.kill(served.child.pid, signal.SIGTERM)
        wait_for(lambda: not accepts(served.port))
        assert served.child.poll() is None  # it drains

    results = outcomes(asyncio.run(send(served, prompts, terminate)))
    assert [result.fault for result in results] == [""] * 50
    assert [result.text for result in results] == prompts
    assert served.child.wait(60) == 0
    nothing_is_left(served, children, folder)
