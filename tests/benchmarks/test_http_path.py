"""The benchmarks of the HTTP path: the engine whose tokens are times, servers as processes, tables."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import http_front, http_peers, scripted_engine, server_process
from benchmarks.http_client import Reply
from benchmarks.http_path import added_latencies
from benchmarks.scripted_engine import EOS, VOCAB_SIZE, ScriptedEngine, age
from benchmarks.server_process import ServerFailedError, ServerProcess, cpu_seconds, family, free_port
from jaxpaged.config import EngineConfig
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.text.tokenizer import Tokenizer
from tests.waiting import wait_for

SERVER = """
import http.server, subprocess, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    scripted_engine.write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def engine(pace: float) -> ScriptedEngine:
    return ScriptedEngine(EngineConfig(str(pace), max_model_len=64), pace)


class TestScriptedEngine:
    def test_a_token_tells_when_it_was_handed_out(self, tokenizer: Tokenizer) -> None:
        made = engine(0.0)
        made.add_request(made.make_request("a", [1], SamplingParams(max_tokens=2, ignore_eos=True)))
        before = time.monotonic()
        (update,) = made.step()
        after = time.monotonic()
        stamp = tokenizer.decode(update.new_token_ids)
        assert len(stamp) == scripted_engine.STAMP_CHARS
        assert age(stamp, after + 0.5) == pytest.approx(0.5, abs=after - before + 1e-4)

    def test_a_request_gets_a_token_a_step_until_its_last(self) -> None:
        made = engine(0.0)
        for name, count in (("a", 1), ("b", 2)):
            made.add_request(made.make_request(name, [1], SamplingParams(max_tokens=count)))
        assert {u.request_id: u.finish_reason for u in made.step()} == {"a": "length", "b": None}
        assert [u.finish_reason for u in made.step()] == ["length"]
        assert not made.has_work

    def test_steps_come_at_their_pace(self) -> None:
        made = engine(0.02)
        made.add_request(made.make_request("a", [1], SamplingParams(max_tokens=5)))
        start = time.monotonic()
        while made.has_work:
            made.step()
        assert time.monotonic() - start >= 4 * 0.02

    def test_the_tokenizer_knows_each_stamp_as_a_token(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.vocab_size == VOCAB_SIZE and EOS in tokenizer.special_ids
        assert tokenizer.token_bytes(37) == b"011"


def test_added_latency_is_that_of_each_token_also_in_a_chunk_of_several() -> None:
    reply = Reply()
    stamps = [scripted_engine.stamp(time_) for time_ in (10.0, 10.1)]
    reply.add(b'data: {"choices": [{"text": "%b%b"}]}\n\ndata: [DONE]\n\n' % tuple(s.encode() for s in stamps), 10.2)
    assert list(added_latencies(reply)) == pytest.approx([0.2, 0.1], abs=1e-4)


@pytest.mark.parametrize("endpoint", http_front.BODIES)
def test_the_front_alone_streams(tokenizer: Tokenizer, endpoint: str) -> None:
    assert http_front.seconds_a_token(tokenizer, [[1, 2], [3, 4], [5, 6]], endpoint) > 0


class TestServerProcess:
    def test_it_and_its_children_are_stopped_counted_and_ended(self, tmp_path: Path) -> None:
        port = free_port()
        server = ServerProcess("x", [sys.executable, "-c", SERVER, str(port)], port, log=tmp_path / "log", timeout=60)
        try:
            members = list(server.cpu_seconds())
            assert members == ["front", "child 1"]
            pids = family(server.pid)
            server.pause()
            wait_for(lambda: [_state(pid) for pid in pids] == ["T", "T"])
            server.resume()
        finally:
            server.close()
        wait_for(lambda: not any(_exists(pid) for pid in pids))  # whose new parent may be slow to look

    def test_a_child_keeps_its_name_when_another_one_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        running = [3, 11, 12]
        monkeypatch.setattr(server_process, "family", lambda pid: running)
        monkeypatch.setattr(server_process, "cpu_seconds", float)
        server = object.__new__(ServerProcess)
        server._names, server._process = {}, SimpleNamespace(pid=3)  # type: ignore[assignment]
        assert server.cpu_seconds() == {"front": 3.0, "child 1": 11.0, "child 2": 12.0}
        running[:] = [3, 12, 14]
        assert server.cpu_seconds() == {"front": 3.0, "child 2": 12.0, "child 3": 14.0}

    def test_one_that_ends_at_once_is_reported_with_its_last_words(self, tmp_path: Path) -> None:
        with pytest.raises(ServerFailedError, match=r"status 1.*out of luck"):
            ServerProcess("x", [sys.executable, "-c", "raise SystemExit('out of luck')"], 1, log=tmp_path / "log")

    def test_cpu_time_grows(self) -> None:
        before = cpu_seconds(os.getpid())
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        assert cpu_seconds(os.getpid()) > before
        assert cpu_seconds(2**22 + 1) == 0.0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _exists(pid: int) -> bool:
    try:
        return _state(pid) != "Z"
    except OSError:
        return False


def test_the_table_of_servers_ends_with_the_ratio() -> None:
    rows = [
        {"server": name, "client": "lean", "streams": streams, "output_throughput": speed * streams}
        for name, speed in (("jaxpaged", 30.0), ("vllm", 10.0))
        for streams in (1, 50)
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in http_peers.wide_table(rows).splitlines()]
    assert lines[0] == ["output tok/s", "1 stream", "50 streams"]
    assert lines[2][0] == "jaxpaged, lean client" and lines[3][1:] == ["10", "500"]
    assert lines[4] == ["ratio, lean client", "3.00 x", "3.00 x"]
