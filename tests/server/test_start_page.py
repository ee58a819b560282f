"""What the operator is told at the start."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.programs import Programs
from server.config import ServerConfig
from server.listen import Listener
from server.start_page import start_page

ENGINE = EngineConfig(
    model="org/m", dtype="bfloat16", kv_cache_dtype="bfloat16", max_model_len=1024, max_num_seqs=8,
    max_num_batched_tokens=256, num_kv_blocks=320,
)  # fmt: skip
WARM = {"decoding, by requests": [1, 4, 8], "forward, by tokens": [16, 64, 128, 256, 512, 1024, 1500], "pooling": []}
COLD = {"decoding, by requests": [], "pooling, by tokens": [1, 4]}


def page(
    engine: EngineConfig = ENGINE,
    *,
    num_cores: int = 1,
    weight_bytes: int | None = 270_000_000,
    cold: dict | None = None,
    **options,
) -> tuple[str, str]:
    """The page, and the URL in it."""
    server = ServerConfig(**{"port": 0, **options})
    with Listener(server) as listener:
        programs = Programs(12, WARM, cold or {})
        said = {"num_cores": num_cores, "weight_bytes": weight_bytes, "seconds": 3.25}
        text = start_page(engine, programs, server, listener, **said)
        return text, listener.url


def test_it_says_what_was_loaded_and_how_much_fits() -> None:
    text, url = page(served_model_name=("a", "b"))
    for part in (
        "org/m (bfloat16, 270 MB of weights), served as a, b",
        "320 blocks of 16 tokens (bfloat16): 5120 tokens, 5.0 requests of the full context",
        "up to 8 requests, 256 tokens a step",
        "after 3.2 s",
        "12 compiled: decoding, by requests: 1, 4, 8; forward, by tokens: 16, 64, 128 … 1500\n",
        f"{url}/v1", f"{url}/docs", f"{url}/metrics",
    ):  # fmt: skip
        assert part in text, text
    assert "WARNING" not in text and "cores" not in text and "sampling" not in text
    assert text == "\n".join(line.rstrip() for line in text.splitlines())


def test_programs_that_are_cold_are_named() -> None:
    assert "cold" not in page()[0]
    assert "being compiled; until then, others serve: pooling, by tokens: 1, 4\n" in page(cold=COLD)[0]
    text, _ = page(replace(ENGINE, warmup=False), cold=COLD)
    assert "compiled when first needed, while requests wait (--warmup): pooling, by tokens: 1, 4\n" in text


def test_cores_multiply_what_fits() -> None:
    text, _ = page(num_cores=2, weight_bytes=None)
    assert "cores        2" in text and "10240 tokens, 10.0 requests" in text and "weights" not in text


def test_defaults_and_parsers_are_named() -> None:
    text, _ = page(override_generation_config={"temperature": 0.6}, tool_call_parser="hermes", reasoning_parser="qwen3")
    assert "temperature=0.6" in text and "tool calls: hermes" in text and "reasoning: qwen3" in text


def test_keys_are_never_shown_and_their_lack_is(tmp_path) -> None:
    keys = {"api_key": ("hunter2",), "admin_api_key": ("hunter2",), "api_key_file": str(tmp_path / "hunter")}
    text, _ = page(host="0.0.0.0", **keys)
    assert "hunter2" not in text and "with an API key" in text and "WARNING" not in text
    text, _ = page(host="0.0.0.0")
    assert "WARNING" in text and "no API key" in text


def test_with_keys_no_pages_are_named_that_need_one() -> None:
    text, url = page(api_key=("k",))
    assert "pages" not in text and f"{url}/v1" in text
    text, url = page(api_key=("k",), enable_public_page=True)
    assert f"pages        {url}/, {url}/docs\n" in text


@pytest.mark.parametrize("words", [["--api-key", "k"], ["--api_key=k"], ["--admin-api-key=k"]])
def test_a_key_in_the_list_of_processes_is_warned_of(words, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["jaxpaged", "serve", "m", *words])
    assert "JAXPAGED_API_KEY and --api-key-file" in page(api_key=("k",))[0]
    monkeypatch.setattr(sys, "argv", ["jaxpaged", "serve", "m", "--api-key-file", "f"])
    assert "WARNING" not in page(api_key=("k",))[0]


def test_a_unix_socket(tmp_path) -> None:
    text, _ = page(uds=str(tmp_path / "s"))
    assert f"unix:{tmp_path / 's'}" in text and "/docs" not in text and "WARNING" not in text


def test_pages_that_are_off_are_not_named() -> None:
    assert "/docs" not in page(disable_fastapi_docs=True)[0]


@pytest.mark.parametrize(("size", "shown"), [(999, "999 B"), (16_060_000_000, "16.1 GB"), (2 * 10**12, "2 TB")])
def test_sizes(size, shown) -> None:
    assert f"{shown} of weights" in page(weight_bytes=size)[0]
