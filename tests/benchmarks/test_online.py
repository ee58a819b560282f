"""The load generator: its client on answers cut anywhere, its figures, and a whole run against the server."""

import asyncio
import contextlib
import itertools
import json
import random
import statistics
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks import online
from benchmarks.http_client import Client, Reply
from benchmarks.latencies import Outcome, outcome, percentile, summary
from benchmarks.online_options import BACKENDS, ELSEWHERE
from benchmarks.workload import Lengths, Ramp, arrivals, requests
from tests import tiny_tokenizers
from tests.server.conftest import LiveServer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def sse(*events: str) -> bytes:
    """A streamed answer, a chunk an event."""
    parts = [f"data: {event}\n\n".encode() for event in events]
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def piece(text: str, **fields: object) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None, **fields}]})


def usage(count: int) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}})


WHOLE = sse(piece("a"), piece("b", finish_reason="length"), usage(2), "[DONE]")


@asynccontextmanager
async def answering(*answers: list[bytes], per_connection: int = 10) -> AsyncGenerator[Client, None]:
    """A client of a server that gives these answers in turn, each written part by part, then closes.

    Args:
      per_connection: answers after which a connection is closed.
    """
    left, tasks = list(answers), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for _ in range(per_connection):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
                if not left:
                    break
                for part in left.pop(0):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if not left:
                    break
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        client.close()
        server.close()
        await asyncio.gather(*tasks)


def post(*parts: bytes, timeout: float = 10.0) -> Reply:
    async def ask() -> Reply:
        async with answering(list(parts)) as client:
            return await client.post("/v1/completions", b"{}", timeout=timeout)

    return asyncio.run(ask())


class TestClient:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
    def test_an_answer_is_read_the_same_however_it_is_cut(self, size: int) -> None:
        reply = post(*(WHOLE[i : i + size] for i in range(0, len(WHOLE), size)))
        result = outcome(reply, 2, exactly=True)
        assert (result.fault, result.text, result.finish_reason) == ("", "ab", "length")
        assert (result.prompt_tokens, result.completion_tokens) == (3, 2)
        assert 0 < result.ttft <= result.arrivals[1] <= result.end

    def test_an_answer_with_a_length(self) -> None:
        reply = post(b'HTTP/1.1 400 Bad Request\r\nContent-Length: 8\r\n\r\n{"er', b"ror}")
        assert (reply.status, reply.body, reply.error) == (400, b'{"error}', "")
        assert "status 400" in outcome(reply, 2, exactly=True).fault

    def test_a_connection_lost_in_the_middle_is_a_fault(self) -> None:
        reply = post(WHOLE[:-20])
        assert "closed too early" in reply.error
        assert "closed too early" in outcome(reply, 2, exactly=True).fault

    def test_a_server_that_is_not_there(self) -> None:
        reply = asyncio.run(Client("http://127.0.0.1:9").post("/", b"{}"))
        assert reply.error and not reply.status

    def test_a_server_that_is_silent_is_given_up(self) -> None:
        async def ask() -> Reply:
            released = asyncio.Event()

            async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await released.wait()
                writer.close()

            server = await asyncio.start_server(silent, "127.0.0.1", 0)
            reply = await Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").post(
                "/", b"{}", timeout=0.05
            )
            released.set()
            server.close()
            await server.wait_closed()
            return reply

        assert asyncio.run(ask()).error == "not answered within 0.05 s"

    def test_a_connection_is_used_again_and_replaced_when_the_server_has_closed_it(self) -> None:
        async def ask() -> list[Reply]:
            async with answering(*[[WHOLE]] * 5, per_connection=2) as client:
                return [await client.post("/", b"{}") for _ in range(5)]

        assert [outcome(reply, 2, exactly=True).fault for reply in asyncio.run(ask())] == [""] * 5

    def test_other_urls_are_refused(self) -> None:
        with pytest.raises(ValueError, match="https://host"):
            Client("https://host")


class TestOutcome:
    @pytest.mark.parametrize(
        ("events", "fault"),
        [
            ([piece("a"), usage(1)], "DONE"),
            ([piece("a", finish_reason="length"), usage(1), "[DONE]"], "1 tokens came, 2 were asked for"),
            ([piece("a", finish_reason="abort"), usage(2), "[DONE]"], "finish_reason is 'abort'"),
            ([piece("a"), '{"error": {"message": "broke"}}', "[DONE]"], "broke"),
            ([piece("a"), "{", "[DONE]"], "not a chunk"),
            ([usage(0), "[DONE]"], "nothing was generated"),
        ],
    )
    def test_whatever_is_wrong_with_a_stream_is_a_fault(self, events: list[str], fault: str) -> None:
        assert fault in outcome(post(sse(*events)), 2, exactly=True).fault

    def test_a_text_may_end_early_unless_exactly_so_many_tokens_are_due(self) -> None:
        reply = post(sse(piece("a", finish_reason="stop"), usage(1), "[DONE]"))
        assert outcome(reply, 2, exactly=False).fault == ""
        assert outcome(reply, 2, exactly=True).fault

    def test_a_chat_counts_from_its_first_text(self) -> None:
        deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"reasoning_content": "b"}]
        chunks = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
        end = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        result = outcome(post(sse(*chunks, end, usage(2), "[DONE]")), 2, exactly=True)
        assert (result.fault, result.text, len(result.arrivals)) == ("", "ab", 2)


class TestFigures:
    def test_percentiles_are_numpys(self) -> None:
        import numpy as np

        values = [random.Random(1).random() for _ in range(37)]
        for percent in (0, 1, 50, 99, 100):
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))

    def test_a_summary_counts_only_what_came_whole(self) -> None:
        good = Outcome(arrivals=[0.1, 0.2, 0.4], end=0.5, prompt_tokens=3, completion_tokens=3)
        slow = Outcome(arrivals=[0.3, 0.4, 0.5], end=0.6, prompt_tokens=3, completion_tokens=3)
        figures = summary([good, slow, Outcome("bad")], 2.0, percentiles=[50], goals={"ttft": 200, "itl": 250})
        assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (2, 1, 6)
        assert (figures["output_throughput"], figures["request_goodput"]) == (3.0, 0.5)
        assert figures["median_ttft_ms"] == figures["p50_ttft_ms"] == pytest.approx(200)
        assert figures["median_itl_ms"] == pytest.approx(100)
        assert figures["mean_tpot_ms"] == pytest.approx(125)
        assert figures["mean_e2el_ms"] == pytest.approx(550)

    def test_a_report_of_nothing(self) -> None:
        assert "failed" in online.report(summary([Outcome("bad")], 1.0))


class TestWorkload:
    def test_lengths_stay_within_their_range_and_a_power_law_favours_short_ones(self) -> None:
        source = random.Random(0)
        even = [Lengths(100, 0.9).draw(source) for _ in range(4000)]
        steep = [Lengths(100, 0.9, exponent=1.5).draw(source) for _ in range(4000)]
        harmonic = [Lengths(100, 0.9, exponent=1.0).draw(source) for _ in range(4000)]
        for lengths in (even, steep, harmonic):
            assert min(lengths) >= 10 and max(lengths) <= 190
        assert statistics.median(even) == pytest.approx(100, rel=0.1)
        assert statistics.median(harmonic) == pytest.approx(43.6, rel=0.15)  # the geometric mean of the ends
        assert statistics.median(steep) == pytest.approx(26.3, rel=0.15)  # (10**-.5 + 190**-.5) / 2, to the -2
        assert {Lengths(7).draw(source) for _ in range(9)} == {7}

    def test_arrivals_keep_their_rate_and_burstiness_spreads_them(self) -> None:
        def spread(burstiness: float) -> float:
            times = arrivals(2000, 10.0, burstiness, seed=3)
            assert times[-1] == pytest.approx(200) and times == sorted(times)
            gaps = [b - a for a, b in itertools.pairwise(times)]
            return statistics.stdev(gaps) / statistics.mean(gaps)

        assert spread(1.0) == pytest.approx(1.0, rel=0.1)  # Poisson
        assert spread(0.25) == pytest.approx(2.0, rel=0.15)
        assert spread(100.0) == pytest.approx(0.1, rel=0.15)
        assert arrivals(3, float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("strategy", ["linear", "exponential"])
    def test_a_rate_may_ramp_up(self, strategy: str) -> None:
        times = arrivals(2000, Ramp(strategy, 1.0, 100.0), 1.0, seed=3)
        first, last = times[200] - times[0], times[-1] - times[-201]
        assert times == sorted(times) and first > 5 * last
        assert arrivals(9, Ramp(strategy, 4.0, 4.0), 1.0, seed=3) == pytest.approx(arrivals(9, 4.0, 1.0, seed=3))

    @pytest.mark.parametrize("chat", [False, True])
    def test_prompts_may_begin_alike(self, chat: bool) -> None:
        made = requests(4, Lengths(3), Lengths(2), chat=chat, vocab_size=10**6, seed=1, fields={}, prefix_len=20)
        bodies = [json.loads(request.body) for request in made]
        prompts = [body["messages"][0]["content"].split() if chat else body["prompt"] for body in bodies]
        assert {len(prompt) for prompt in prompts} == {23} and len({tuple(prompt[:20]) for prompt in prompts}) == 1
        assert len({tuple(prompt) for prompt in prompts}) > 1

    @pytest.mark.parametrize("chat", [False, True])
    def test_requests_are_repeatable_and_differ(self, chat: bool) -> None:
        def make(seed: int) -> list[dict]:
            made = requests(3, Lengths(5), Lengths(4), chat=chat, vocab_size=1000, seed=seed, fields={"model": "m"})
            return [json.loads(request.body) for request in made]

        first, *others = make(1)
        assert make(1)[0] == first and make(2)[0] != first and first not in others
        assert first["max_tokens"] == 4 and first["model"] == "m" and first["stream"]
        assert len(first["messages"][0]["content"].split() if chat else first["prompt"]) == 5


class TestRun:
    @pytest.fixture(scope="class")
    def server(self) -> Iterator[LiveServer]:
        live = LiveServer(tiny_tokenizers.byte_level())
        live.play(lambda request: [40 + request.prompt_token_ids[0] % 7, 50, 51])
        yield live
        live.stop()

    @pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("how", ["--max-concurrency 3", "--request-rate 400 --burstiness 0.5"])
    def test_all_is_whole_and_right(
        self, server: LiveServer, endpoint: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lengths = "--random-input-len 8 --random-output-len 6 --random-range-ratio 0.5 --vocab-size 250"
        flags = f"--base-url {server.url} --endpoint {endpoint} --num-prompts 12 {how} {lengths} --ignore-eos"
        save = f"--goodput e2el:10000 --check --num-warmups 2 --save-result --result-dir {tmp_path}"
        secret = "--header Authorization=Bearer-SECRET X-Key=SECRET"
        monkeypatch.setattr("sys.argv", f"online {flags} {save} --result-filename out.json {secret}".split())
        with pytest.raises(SystemExit) as ended:
            online.main()
        assert ended.value.code == 0
        text = (tmp_path / "out.json").read_text()
        assert "SECRET" not in text and json.loads(text)["settings"]["header"] == ["Authorization", "X-Key"]
        (row,) = json.loads(text)["results"]
        assert (row["completed"], row["failed"]) == (12, 0)
        assert row["request_goodput"] == pytest.approx(row["request_throughput"])
        assert row["median_e2el_ms"] >= row["median_ttft_ms"] > 0

    def test_a_command_line_of_vllm(self, server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flags = (
            f"--backend openai-chat --base-url {server.url} --model some/path --served-model-name alias --dataset-name "
            "random --random-input-len 4 --random-prefix-len 3 --random-output-len 3 --num-prompts 5 --disable-tqdm "
            "--top-p 0.9 --top-k 4 --temperature 0.5 --ramp-up-strategy linear --ramp-up-start-rps 50 "
            "--ramp-up-end-rps 500 --metadata run=7 seed=x "
            f"--save-result --result-dir {tmp_path} --result-filename out.json"
        )
        seen, make = [], server.engine.make_request
        monkeypatch.setattr(server.engine, "make_request", lambda *a, **k: seen.append(a[2]) or make(*a, **k))
        monkeypatch.setattr("sys.argv", ["online", *flags.split()])
        with pytest.raises(SystemExit) as ended:
            online.main()
        settings = json.loads((tmp_path / "out.json").read_text())["settings"]
        assert (ended.value.code, settings["model"], settings["seed"]) == (0, "alias", 0)
        assert settings["metadata"] == {"run": "7", "seed": "x"}
        assert len(seen) == 5 and {(p.top_p, p.top_k, p.temperature) for p in seen} == {(0.9, 4, 0.5)}

    @pytest.mark.parametrize("name", ELSEWHERE)
    def test_other_flags_of_vllm_are_refused_with_advice(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        for values in ([], ["x"]):
            with pytest.raises(SystemExit):
                online.arguments([name, *values])
            assert f"{name} is vLLM's and not built here: {ELSEWHERE[name]}" in capsys.readouterr().err

    def test_what_flags_say_for_others(self, capsys: pytest.CaptureFixture[str]) -> None:
        for backend, endpoint in BACKENDS.items():
            assert online.arguments(["--backend", backend]).endpoint == endpoint
        assert online.arguments([]).vocab_size == 32_000
        assert online.arguments(["--tokenizer", "demo"]).vocab_size == 49_152
        for wrong in ("--backend openai-chat --endpoint /v1/completions", "--ramp-up-start-rps 5",
                      "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 3",
                      "--dataset-name sharegpt", "--random-prefix-len -1"):  # fmt: skip
            with pytest.raises(SystemExit):
                online.arguments(wrong.split())
            assert wrong.split()[0] in capsys.readouterr().err

    def test_a_text_that_changes_in_company_is_found(self, server: LiveServer) -> None:
        calls = iter(range(10**6))
        before = server.engine.script
        server.play(lambda request: [40 + next(calls) % 31])
        try:
            flags = (
                f"--base-url {server.url} --num-prompts 3 --random-output-len 4 --random-input-len 4 --vocab-size 250"
            )
            args = online.arguments([*flags.split(), "--ignore-eos", "--check", "2"])
            _, outcomes = asyncio.run(online.run(args))
        finally:
            server.play(before)
        assert ["alone" in item.fault for item in outcomes] == [True, True, False]

    @pytest.mark.parametrize(
        "flags",
        ["--request-rate 0", "--random-range-ratio 1", "--num-prompts 0", "--goodput speed:1", "--goodput ttft"],
    )
    def test_wrong_flags_are_refused(self, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            online.arguments(flags.split())
        assert flags.split()[0].lstrip("-").split("-")[0] in capsys.readouterr().err.replace("metric", "goodput")
