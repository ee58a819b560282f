"""Cores that live and do nothing are noticed; those that are only slow, or idle, are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.process_client import ProcessClient
from jaxpaged.engine.watchdog import _LOOKS, Watchdog
from jaxpaged.errors import EngineDeadError
from tests.engine.test_process_client import collect, is_alive
from tests.scripted_core import LOAD, TOKENIZER
from tests.waiting import wait_for

SECONDS = 2.0


@pytest.mark.parametrize("how", ["stopped", "hangs", "stopped and idle"])
def test_a_core_that_stands_still_ends_its_requests(how) -> None:
    deaths = []

    async def test(client: ProcessClient) -> None:
        llm = AsyncLLM(client, TOKENIZER, on_death=deaths.append)
        try:
            if how == "stopped and idle":
                os.kill(client.pids[0], signal.SIGSTOP)
                while llm.is_healthy:
                    await asyncio.sleep(0.02)
            running = asyncio.ensure_future(collect(llm, "hang" if how == "hangs" else "long"))
            if how == "stopped":
                while not any(stats.num_running for stats in llm.stats):
                    await asyncio.sleep(0.02)
                os.kill(client.pids[0], signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="stands still"):
                await asyncio.wait_for(running, 60)
            assert not llm.is_healthy
            while not deaths:
                await asyncio.sleep(0.02)
        finally:
            await llm.shutdown(0)

    client = ProcessClient(EngineConfig(model="echo delay=0.01"), engine=LOAD, timeout=SECONDS)
    with contextlib.closing(client):
        client.wait_until_ready()
        asyncio.run(test(client))
    wait_for(lambda: not any(map(is_alive, client.pids)))
    assert len(deaths) == 1


def test_slow_steps_and_silence_without_work_are_no_death() -> None:
    async def test(client: ProcessClient) -> None:
        llm = AsyncLLM(client, TOKENIZER)
        await asyncio.sleep(2 * SECONDS)
        assert await collect(llm, "four", SamplingParams(max_tokens=100)) == "four"  # of longer steps than looks
        assert llm.is_healthy
        await llm.shutdown(0)

    client = ProcessClient(EngineConfig(model=f"echo delay={SECONDS / 3}"), engine=LOAD, timeout=SECONDS)
    with contextlib.closing(client):
        client.wait_until_ready()
        asyncio.run(test(client))


def test_looks_are_counted_and_not_time() -> None:
    """The pauses between them last no time here; elsewhere a machine may sleep for hours in one."""
    events: list[str] = []
    pauses: list[float] = []

    class Stopped:
        def wait(self, pause: float) -> bool:
            pauses.append(pause)
            return "core 0 is silent" in events

    def ask(core: int) -> None:
        events.append(f"core {core} is asked")
        if core == 1:
            watchdog.heard(1)

    watchdog = Watchdog(2, 3600.0, ask, lambda core: events.append(f"core {core} is silent"))
    watchdog._stopped = Stopped()  # type: ignore[assignment]
    watchdog.run()
    assert set(pauses) == {3600.0 / _LOOKS}
    before = events[: events.index("core 0 is silent")]
    assert before.count("core 0 is asked") == before.count("core 1 is asked") == _LOOKS
    assert "core 1 is silent" not in events
