"""Engine cores in processes of their own: how they start, die and end, and who may speak to them. Cases B56, S03."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from jaxpaged.config import EngineConfig
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputs
from jaxpaged.device.logits_processor import LogitsProcessor
from jaxpaged.engine import core_sockets, messages, sockets
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_devices import device_environment
from jaxpaged.engine.private_folder import PrivateFolder
from jaxpaged.engine.process_client import ProcessClient
from jaxpaged.engine.programs import Programs
from jaxpaged.engine.routing import BLOCK_TOKENS
from jaxpaged.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelError
from tests.scripted_core import HANGS, LOAD, TOKENIZER
from tests.waiting import wait_for

LONG = SamplingParams(max_tokens=400)


def is_alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def started(model: str = "echo", num_cores: int = 1) -> ProcessClient:
    return ProcessClient(EngineConfig(model=model), num_cores=num_cores, engine=LOAD)


@contextlib.contextmanager
def ready(model: str = "echo", num_cores: int = 1) -> Iterator[ProcessClient]:
    """Cores that are up; afterwards nothing is left of them."""
    with contextlib.closing(started(model, num_cores)) as client:
        client.wait_until_ready()
        pids, folder = client.pids, client._folder.path
        yield client
    assert not any(is_alive(pid) for pid in pids) and not folder.exists()


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams = LONG) -> str:
    outputs = [output async for output in llm.generate(prompt, params)]
    return outputs[-1].text


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("wrong", ModelError, "there is no such model"),
        ("bug", EngineDeadError, "the engine does not start: KeyError('a bug')"),
        ("exit", EngineDeadError, "engine core 0 exited with status 3"),
    ],
)
def test_a_core_that_does_not_start_says_why(model, kind, message) -> None:
    client = started(model)
    try:
        with pytest.raises(kind) as error:
            client.wait_until_ready()
        assert type(error.value) is kind and str(error.value) == message
    finally:
        client.close()
    assert not any(is_alive(pid) for pid in client.pids)


def test_a_core_that_cannot_listen_does_not_start() -> None:
    with contextlib.closing(started()) as client:
        in_the_way = sockets.core_socket(client._folder.path, 0)
        in_the_way.mkdir()
        with pytest.raises(EngineDeadError, match="the engine does not start: ZMQError"):
            client.wait_until_ready()
        wait_for(lambda: not is_alive(client.pids[0]), 10)
        in_the_way.rmdir()


def test_closing_while_it_loads_takes_no_time() -> None:
    client = started("slow")
    client.close()
    client.close()
    process = client._children[0]._process
    assert process is not None and process.returncode == 0  # it was not killed, as it would be after some seconds
    assert not client._folder.path.exists()


def test_what_cannot_be_sent_is_a_wrong_option() -> None:
    processor = LogitsProcessor("p", lambda logits, _: logits)
    for options in ({"scheduling_key": len}, {"logits_processors": (processor,)}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            ProcessClient(EngineConfig(model="echo", **options), engine=LOAD)
    with pytest.raises(ConfigError, match="seed"):
        ProcessClient(EngineConfig(model="echo", seed="x"), engine=LOAD)  # type: ignore[arg-type]
    for cores in (0, 257):
        with pytest.raises(ConfigError, match="data_parallel_size"):
            ProcessClient(EngineConfig(model="echo"), num_cores=cores, engine=LOAD)


def test_progress_and_options_come_from_the_core(monkeypatch) -> None:
    told = []
    config = EngineConfig(model="echo num_blocks=7", logits_processors=("some.module:NAME",))
    with contextlib.closing(ProcessClient(config, engine=LOAD)) as client:
        client.wait_until_ready(lambda *progress: told.append(progress))
        assert ("load", 10, 10) in told and told[-1] == ("warm-up", 3, 3)
        options = client.facts.config
        assert client.programs == Programs(3, {"forward, by tokens": [1, 8]}, {"pooling, by tokens": [8]})
        assert options.num_kv_blocks == 7 and options.logits_processors == ("some.module:NAME",)


def test_a_killed_core_fails_its_requests_at_once_and_no_others() -> None:
    """B54: `kill -9`."""
    deaths: list[BaseException] = []

    async def test(client: ProcessClient) -> None:
        llm = AsyncLLM(client, TOKENIZER, on_death=deaths.append)
        tasks = [asyncio.ensure_future(collect(llm, "long")) for _ in range(4)]
        while client._router.loads != [2, 2]:
            await asyncio.sleep(0.001)
        begin = time.monotonic()
        os.kill(client.pids[1], signal.SIGKILL)
        _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        assert time.monotonic() - begin < 10 and len(others) >= 2
        while not deaths:  # told after the requests
            await asyncio.sleep(0.001)
        assert not llm.is_healthy and len(deaths) == 1
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [r for r in results if isinstance(r, EngineDeadError)]
        assert len(failed) == 2 and "engine core 1 was killed by SIGKILL" in str(failed[0])
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await collect(llm, "more")
        with pytest.raises(EngineDeadError):
            await llm.snapshot()
        await llm.shutdown(5)

    with ready("echo delay=0.005", num_cores=2) as client:
        asyncio.run(test(client))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("fail", "RuntimeError: device lost"), ("exit", "engine core 0 exited with status 3")],
)
def test_a_core_that_fails_says_why(prompt, message) -> None:
    """B54: an exception in the busy loop, and an exit of the process."""

    async def test(client: ProcessClient) -> None:
        llm = AsyncLLM(client, TOKENIZER)
        other = asyncio.ensure_future(collect(llm, "long"))
        while not llm.stats[0].num_running:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineDeadError, match="the engine has failed") as error:
            await collect(llm, prompt)
        assert message in str(error.value)
        with pytest.raises(EngineDeadError):
            await other
        await llm.shutdown(5)

    with ready("echo delay=0.01") as client:
        asyncio.run(asyncio.wait_for(test(client), 120))


def test_a_core_that_hangs_is_ended_all_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(HANGS, str(tmp_path / "hangs"))

    async def test(client: ProcessClient) -> None:
        llm = AsyncLLM(client, TOKENIZER)
        task = asyncio.ensure_future(collect(llm, "hang"))
        while not (tmp_path / "hangs").exists():
            await asyncio.sleep(0.001)
        call = asyncio.ensure_future(llm.snapshot())
        await asyncio.sleep(0)  # it is on its way
        begin = time.monotonic()
        await llm.shutdown(timeout=0.1)
        assert time.monotonic() - begin < 30
        results = await asyncio.gather(task, call, return_exceptions=True)
        assert isinstance(results[1], EngineDeadError)

    with ready() as client:
        asyncio.run(asyncio.wait_for(test(client), 120))


def test_cores_keep_their_prefixes_and_share_the_rest() -> None:
    """By prompt and salt, as the router decides it."""
    prefix, length = "0123456789" * 20, 3 * BLOCK_TOKENS  # a token a character

    async def cores_of(llm: AsyncLLM, *prompts: str, salt: str | None = None) -> list[int]:
        """The cores that ran these prompts, one after the other."""
        chosen = []
        for prompt in prompts:
            before = [stats.num_prompt_tokens for stats in llm.stats]
            async for _ in llm.generate(prompt, SamplingParams(max_tokens=1), cache_salt=salt):
                pass
            after = [stats.num_prompt_tokens for stats in llm.stats]
            (core,) = (i for i, (b, a) in enumerate(zip(before, after, strict=True)) if a > b)
            chosen.append(core)
        return chosen

    async def test(client: ProcessClient) -> None:
        llm = AsyncLLM(client, TOKENIZER)
        assert len(TOKENIZER.encode(prefix)) > length
        (home,) = set(await cores_of(llm, *(f"{prefix}{i}" for i in range(9))))
        assert set(await cores_of(llm, *(f"{i} of many, all different" for i in range(8)))) == {0, 1}
        others = [await cores_of(llm, *[prefix] * 3, salt=f"salt {i}") for i in range(6)]
        assert all(len(set(cores)) == 1 for cores in others)  # a salt has a home of its own,
        assert {cores[0] for cores in others} == {0, 1}  # wherever there is room
        assert await cores_of(llm, f"{prefix} again") == [home]
        await llm.shutdown(5)

    with ready(num_cores=2) as client:
        asyncio.run(asyncio.wait_for(test(client), 120))


def test_stopped_cores_are_killed_together() -> None:
    with ready(num_cores=2) as client:
        for pid in client.pids:
            os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        client.close()
        assert time.monotonic() - begin < 9  # each has 5 seconds


def test_who_is_told_of_a_death_may_close() -> None:
    """In the thread of the client's that reads what the cores send."""
    with ready() as client:
        threads = []

        def close(*_) -> None:
            client.close()
            threads.append(threading.current_thread())

        client.start(lambda *_: None, close)
        with zmq.Context() as context, sockets.sending(context, sockets.front_socket(client._folder.path)) as core:
            core.linger = 1000
            core.send_multipart([b"\0", messages.encode(messages.Died("device lost"))])
        wait_for(lambda: client._context.closed and not client._folder.path.exists())
        assert threads == [client._reader] and not client._reader.is_alive()


def test_what_is_none_of_ours_is_dropped_and_logged(tmp_path, caplog) -> None:
    """S03: pickles and noise on both sockets, which only this user can reach."""
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    async def test(client: ProcessClient) -> None:
        llm, folder = AsyncLLM(client, TOKENIZER), client._folder.path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await asyncio.to_thread(wait_for, lambda: modes(folder) == {"front.sock": 0o600, "core-0.sock": 0o600})
        frames = [pickle.dumps(Evil()), b"", b"\xff" * 1000, messages.encode(messages.Died("not really"))]
        with zmq.Context() as context:
            for path in (sockets.front_socket(folder), sockets.core_socket(folder, 0)):
                with context.socket(zmq.PUSH) as stranger:
                    stranger.connect(f"ipc://{path}")
                    for frame in frames:
                        stranger.send(frame)
                        stranger.send_multipart([b"\7", frame])
                        stranger.send_multipart([b"\0", frame[:-1], b"x"])
        for _ in range(50):
            assert await collect(llm, "hello") == "hello"
        assert llm.is_healthy and not marker.exists()
        await llm.shutdown(5)

    with caplog.at_level(logging.ERROR), ready() as client:
        asyncio.run(asyncio.wait_for(test(client), 120))
    assert "none of ours" in caplog.text and "CRITICAL" not in caplog.text


def test_a_request_that_the_core_cannot_read_is_refused() -> None:
    """Its reader would wait for ever."""
    schema = {"type": "object", 1: True}  # JSON has no such keys, but Python's `json` makes them texts

    async def test(client: ProcessClient) -> None:
        llm = AsyncLLM(client, TOKENIZER)
        with pytest.raises(InvalidRequestError, match="cannot read the request"):
            await collect(llm, "x", SamplingParams(structured_outputs=StructuredOutputs(json=schema)))
        assert await collect(llm, "hello") == "hello" and not any(client._router.loads)
        await llm.shutdown(5)

    with ready() as client:
        asyncio.run(asyncio.wait_for(test(client), 120))


def test_a_core_whose_input_fails_ends(monkeypatch) -> None:
    ended = []

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        ended.append(status)
        raise Ended

    class Broken:
        def recv(self) -> bytes:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    monkeypatch.setattr(core_sockets.os, "_exit", end)
    monkeypatch.setattr(core_sockets.zmq, "Context", lambda: None)
    monkeypatch.setattr(core_sockets, "listening", lambda *_: Broken())
    with pytest.raises(Ended):
        core_sockets.Input(Path(), 0, None).run()
    assert ended == [1]


def test_cores_that_cannot_be_heard_are_lost() -> None:
    class Broken(contextlib.nullcontext):
        def recv_multipart(self) -> list[bytes]:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    told = []
    with ready() as client:
        client.start(lambda *_: None, lambda core, error: told.append((core, str(error))))
        client._read(Broken())
        assert not client.is_alive and [core for core, _ in told] == [0] and "cannot be heard" in told[0][1]


def test_text_that_is_no_text_is_refused_before_it_is_sent() -> None:
    async def test(client: ProcessClient) -> None:
        llm = AsyncLLM(client, TOKENIZER)
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            async for _ in llm.generate("x", SamplingParams(), cache_salt="\ud800"):
                pass
        assert not any(client._router.loads) and llm.num_unfinished == 0
        await llm.shutdown(5)

    with ready() as client:
        asyncio.run(test(client))


PARENT = textwrap.dedent(
    """
    import sys, time
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.process_client import ProcessClient

    client = ProcessClient(EngineConfig(model=sys.argv[1]), num_cores=2, engine="tests.scripted_core:load")
    print(*client.pids, client._folder.path, flush=True)
    if sys.argv[1] == "echo":
        client.wait_until_ready()
    print("ready", flush=True)
    time.sleep(600)
    """
)


@pytest.mark.parametrize("model", ["echo", "slow"])
def test_no_core_outlives_its_parent(model) -> None:
    """B56, whether the cores serve or still load."""
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, model], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout is not None
    with parent.stdout:
        *pids, folder = parent.stdout.readline().split()
        assert parent.stdout.readline() == "ready\n"
    parent.kill()
    begin = time.monotonic()
    wait_for(lambda: not any(is_alive(int(pid)) for pid in pids))
    assert time.monotonic() - begin < 5
    parent.wait()
    _is_removed_by_the_next(Path(folder))


def _is_removed_by_the_next(folder: Path) -> None:
    """Nobody was left to do it."""
    assert folder.exists()
    PrivateFolder().remove()
    assert folder.exists()  # it is so young that its owner may be about to lock it
    os.utime(folder, (0, 0))
    PrivateFolder().remove()
    assert not folder.exists()


def test_folders_in_use_and_those_of_others_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    used, other = PrivateFolder(), tmp_path / "jaxpaged-sockets-abcdefgh"
    (other / "work").mkdir(parents=True)
    for folder in (used.path, other):
        os.utime(folder, (0, 0))
    PrivateFolder().remove()
    assert used.path.exists() and (other / "work").exists() and stat.S_IMODE(used.path.stat().st_mode) == 0o700
    used.remove()
    used.remove()
    assert not used.path.exists()


def test_the_paths_of_sockets_are_short_enough(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    folder = PrivateFolder()
    assert folder.path.parent == Path("/tmp")
    folder.remove()


def test_each_core_gets_a_device_of_its_own(tmp_path) -> None:
    def own(count: int, **environment: str) -> list[dict[str, str]]:
        return [device_environment(i, count, environment, tmp_path) for i in range(count)]

    assert own(3) == [{}, {}, {}]
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert own(1) == [{}] and own(2, JAX_PLATFORMS="cpu") == [{}, {}]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in own(3)] == ["0", "1", "10"]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in own(2, CUDA_VISIBLE_DEVICES="7, GPU-abc")] == ["7", "GPU-abc"]
    for count, environment in ((4, {}), (2, {"CUDA_VISIBLE_DEVICES": "3"})):
        with pytest.raises(ConfigError, match=f"data_parallel_size={count}"):
            own(count, **environment)
    chips = tmp_path / "tpu"
    chips.mkdir()
    for i in range(4):
        (chips / f"accel{i}").touch()
    assert device_environment(2, 4, {}, chips)["TPU_VISIBLE_CHIPS"] == "2"
