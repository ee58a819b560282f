"""Flags: what their text means, and vLLM's command lines."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from jaxpaged.config import EngineConfig
from server.cli import main, parse
from server.config import ServerConfig
from server.options import values
from server.options.flags import API_KEY_VARIABLE, engine_config_of, flags, server_config_of
from server.options.vllm import VLLM_FLAGS
from server.options.vllm_table import CONTRADICTS, VALUES


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1M", 2**20), ("1m", 10**6), ("2G", 2**31), ("25.6k", 25_600),
     ("-1", -1), ("1.5K", 1536), (" 7 ", 7)],
)  # fmt: skip
def test_whole_numbers_may_be_short(text, value) -> None:
    assert values.integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "0x10", "1kk", "1 k", "1,000", "1.0001k", "nan", "9" * 30])
def test_what_is_no_whole_number(text) -> None:
    with pytest.raises(ValueError, match="no whole number"):
        values.integer(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "x", ""])
def test_what_is_no_number(text) -> None:
    with pytest.raises(ValueError, match="no number"):
        values.number(text)


@pytest.mark.parametrize(
    ("line", "engine", "server"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", {}, {}),
        ("org/m --dtype auto --api-key token-abc123", {}, {"api_key": ("token-abc123",)}),
        ("--model org/m --port 8080 --host 0.0.0.0", {}, {"port": 8080, "host": "0.0.0.0"}),
        ("--port 8080 org/m", {}, {"port": 8080}),
        ("org/m --max-model-len 32k --gpu-memory-utilization 0.95", {"max_model_len": 32_000,
                                                                     "gpu_memory_utilization": 0.95}, {}),
        ("org/m --max_model_len=4096 --max_num_seqs 64", {"max_model_len": 4096, "max_num_seqs": 64}, {}),
        ("org/m --max-model-len -1", {}, {}),
        ("org/m --max-model-len auto --dtype half", {"dtype": "float16"}, {}),
        ("org/m --enable-prefix-caching --enable-chunked-prefill --max-num-batched-tokens 8K",
         {"max_num_batched_tokens": 8192}, {}),
        ("org/m --reasoning-parser deepseek_r1 --enable-auto-tool-choice --tool-call-parser hermes", {},
         {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}),
        ("org/m -dp 2 --tensor-parallel-size 1 --max-num-queued-reqs 9", {"max_num_queued_requests": 9},
         {"data_parallel_size": 2}),
        ("org/m --no-enable-prefix-caching --swap-space 4 --block-size 32",
         {"enable_prefix_caching": False, "swap_space": 4.0, "block_size": 32}, {}),
        ("org/m -tp 1 --pipeline-parallel-size 1 --distributed-executor-backend mp", {}, {}),
        ("org/m --served-model-name a b --api-key K1 K2 --api-key K3", {},
         {"served_model_name": ("a", "b"), "api_key": ("K1", "K2", "K3")}),
        ('org/m --generation-config vllm --override-generation-config {"temperature":0.5}', {},
         {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}}),
        ('org/m --allowed-origins ["https://a.example","https://b.example"]', {},
         {"allowed_origins": ("https://a.example", "https://b.example")}),
        ("org/m --allowed-origins https://a.example", {}, {"allowed_origins": ("https://a.example",)}),
        ("org/m --uvicorn-log-level debug --disable-log-requests --disable-uvicorn-access-log --root-path /llm", {},
         {"uvicorn_log_level": "debug", "disable_uvicorn_access_log": True, "root_path": "/llm"}),
        ("org/m --uds /run/m.sock --seed 1 --load-format safetensors", {"seed": 1}, {"uds": "/run/m.sock"}),
        ("org/m --kv-cache-memory-bytes 2G --num-gpu-blocks-override 100 --runner generate --async-scheduling",
         {"kv_cache_bytes": 2**31, "num_kv_blocks": 100}, {}),
        ("org/m --scheduling-policy priority --max-logprobs -1 --ssl-keyfile k --ssl-certfile c --disable-log-stats",
         {"scheduling_policy": "priority", "max_logprobs": -1},
         {"ssl_keyfile": "k", "ssl_certfile": "c", "disable_log_stats": True}),
    ],
)  # fmt: skip
def test_command_lines_of_vllm(line, engine, server) -> None:
    arguments = parse(["serve", *line.split()])
    model = "Qwen/Qwen2.5-1.5B-Instruct" if "Qwen" in line else "org/m"
    assert engine_config_of(arguments) == EngineConfig(model=model, **engine)
    assert server_config_of(arguments) == ServerConfig(**{"served_model_name": (model,), **server})


def test_what_may_be_none_can_be_given_as_none() -> None:
    """Also where it is not the default: an engine may be waited for without end."""
    optional = [flag for flag in flags() if flag.optional]
    assert {"engine_timeout", "request_timeout", "max_num_seqs"} <= {flag.field for flag in optional}
    arguments = parse(["serve", "m", *(word for flag in optional for word in (flag.name, "none"))])
    assert server_config_of(arguments) == ServerConfig(served_model_name=("m",), engine_timeout=None)
    assert engine_config_of(arguments) == EngineConfig(model="m")
    assert server_config_of(parse(["serve", "m"])).engine_timeout == 300
    with pytest.raises(SystemExit):
        parse(["serve", "m", "--port", "none"])


@pytest.mark.parametrize(
    ("line", "variables", "keys"),
    [
        ("m", {"VLLM_API_KEY": "theirs"}, ("theirs",)),
        ("m", {"VLLM_API_KEY": "theirs", API_KEY_VARIABLE: "ours"}, ("ours",)),
        ("m --api-key flag", {"VLLM_API_KEY": "theirs", API_KEY_VARIABLE: "ours"}, ("flag", "ours")),
        ("m --api-key flag", {"VLLM_API_KEY": "theirs"}, ("flag",)),
        ("m --api-key-file keys", {"VLLM_API_KEY": "theirs"}, ()),
        ("m", {"VLLM_API_KEY": ""}, ()),
    ],
)
def test_keys_in_the_environment(line, variables, keys, monkeypatch) -> None:
    """One that vLLM's server would ask for is asked for here, too."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert server_config_of(parse(["serve", *line.split()])).api_key == keys


def refused(capsys, *words: str, status: int = 2) -> str:
    """The last line of what a wrong command line is told."""
    if status == 2:
        with pytest.raises(SystemExit) as error:
            main(["serve", *words])
        assert error.value.code == 2
    else:
        assert main(["serve", *words]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") <= 2, err
    return err.splitlines()[-1]


VLLM_SERVE_FLAGS = [
    line for line in (Path(__file__).parent / "vllm_serve_flags.txt").read_text().splitlines() if line[0] != "#"
]


def serve_actions() -> dict[str, argparse.Action]:
    return parse(["serve", "m"]).parser._option_string_actions


def test_every_flag_of_vllm_is_known() -> None:
    """Each takes a value where vLLM's does; what is ours besides has its own test."""
    actions = serve_actions()
    for line in VLLM_SERVE_FLAGS:
        name = line.removesuffix("=")
        assert name in actions, name
        assert (actions[name].nargs != 0) == (name != line), name


def test_flags_of_vllm_are_refused_ignored_or_so_anyway(capsys) -> None:
    """All of a kind in one command line: each is told of, with why."""
    own = {name for flag in flags() for name in flag.names}
    table = {name: flag for name, flag in VLLM_FLAGS.items() if name not in own}
    neutral = [[name, value] if value else [name] for name, flag in table.items() for value in flag.neutral]
    ignored, wrong = ({n: f for n, f in table.items() if f.advice and f.ignored is kind} for kind in (True, False))

    parse(["serve", "m", *(word for words in neutral for word in words)])
    assert capsys.readouterr().err == ""
    parse(
        ["serve", "m", *(word for name, flag in ignored.items() for word in [name, *["something"] * bool(flag.nargs)])]
    )
    assert capsys.readouterr().err.splitlines() == [
        f"jaxpaged: warning: {name} makes no difference here: {flag.advice}" for name, flag in ignored.items()
    ]
    with pytest.raises(SystemExit):
        main(
            [
                "serve",
                "m",
                *(word for name, flag in wrong.items() for word in [name, *["something"] * bool(flag.nargs)]),
            ]
        )
    err = capsys.readouterr().err
    for name, flag in wrong.items():
        assert f"{name} is vLLM's and not built here: {flag.advice}\n" in err


def test_values_of_ignored_flags_are_not_the_model(capsys) -> None:
    line = "-O3 --max-log-len 100 --compilation-config.mode=3 --enforce_eager m --trust-remote-code"
    assert parse(["serve", *line.split()]).model == "m"
    assert capsys.readouterr().err.count("makes no difference") == 5


def test_values_of_vllm_are_none_of_ours() -> None:
    for flag in flags():
        for text in VALUES.get(flag.field, "").split():
            with pytest.raises(ValueError, match="not built here"):
                flag.value(text)


def test_what_contradicts_a_flag_goes_with_its_opposite(capsys) -> None:
    by_dest = {flag.dest: flag for flag in flags()}
    for name, (dest, value, spelled) in CONTRADICTS.items():
        opposite = by_dest[dest].name if not value else by_dest[dest].name.replace("--", "--no-", 1)
        parse(["serve", "m", name, opposite])
        assert VLLM_FLAGS[name].advice == "" and f"{name} contradicts {spelled}" in refused(capsys, "m", name, spelled)


def test_all_bad_flags_are_told_at_once(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", "--quantization", "awq", "--no-such-flag", "4", "--enable-lora", "--enforce-eager"])
    err = capsys.readouterr().err
    assert all(name in err for name in ("--quantization is", "unknown option --no-such-flag", "--enable-lora is"))
    assert "warning" not in err


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("m --max-model 64", ("unknown option --max-model", "did you mean --max-model-len?")),
        ("m --data-paralel-size 2", ("did you mean --data-parallel-size?",)),
        ("m --api-keys hunter2", ("unknown option --api-keys", "did you mean --api-key?")),
        ("m --max-model-len=4 --foo=hunter2", ("unknown option --foo",)),
        ("m other", ("unexpected argument 'other'",)),
        ("--served-model-name a b", ("MODEL is missing", "several values")),
        ("m --model other", ("two models", "'m'", "'other'")),
        ("m --max-num-seqs many", ("--max-num-seqs", "'many' is no whole number")),
        ("m --swap-space lots", ("--swap-space", "'lots' is no number")),
        ("m --dtype int4", ("--dtype", "'int4' is none of auto, float32, bfloat16, float16")),
        (
            "m --kv-cache-dtype fp8",
            ("--kv-cache-dtype", "'fp8' is vLLM's and not built here: it is none of auto, float32"),
        ),
        ("m --override-generation-config temperature", ("--override-generation-config", "no JSON")),
        ("m --override-generation-config [1]", ("no JSON object",)),
        ("m --allowed-origins [1]", ("no JSON list of strings",)),
        ("m --tool-call-parser nonesuch", ("--tool-call-parser", "'nonesuch' is none of hermes,")),
        ("m --tool-call-parser qwen3_coder", ("'qwen3_coder' is vLLM's and not built here", "hermes,")),
        ("m --reasoning-parser glm45", ("'glm45' is vLLM's and not built here", "qwen3")),
        ("m --load-format tensorizer", ("'tensorizer' is vLLM's and not built here", "dummy")),
        (
            "m --disable-log-requests --enable-log-requests",
            ("--disable-log-requests contradicts --enable-log-requests",),
        ),
        ("m --no-overlap --async-scheduling", ("--async-scheduling contradicts --no-overlap",)),
        ("m -q awq", ("-q", "GGUF", "gguf")),
    ],
)
def test_wrong_command_lines(line, parts, capsys) -> None:
    message = refused(capsys, *line.split())
    assert all(part in message for part in parts if part != "GGUF"), message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("-tp 2", ("--tensor-parallel-size 2", "not built yet")),
        ("--tensor-parallel-size 0", ("--tensor-parallel-size 0",)),
        ("--port 70000", ("--port 70000",)),
        ("--ssl-keyfile k", ("--ssl-keyfile needs --ssl-certfile",)),
        ("--shutdown-timeout -1", ("--shutdown-timeout -1",)),
        ("--block-size 24", ("--block-size 24", "power of two")),
    ],
)
def test_options_out_of_range(line, parts, capsys) -> None:
    message = refused(capsys, "m", *line.split(), status=1)
    assert message.startswith("jaxpaged: error: ") and all(part in message for part in parts)
