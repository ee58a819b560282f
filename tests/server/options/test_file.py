"""`--config FILE`."""

from __future__ import annotations

import pytest

from jaxpaged.config import EngineConfig
from server.cli import main, parse
from server.config import ServerConfig
from server.options.file import MAX_BYTES
from server.options.flags import engine_config_of, server_config_of


@pytest.fixture
def write(tmp_path):
    """Writes the file; its path."""

    def write_file(text: str | bytes) -> str:
        path = tmp_path / "options.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_file


def test_a_file_has_every_kind_of_value(write) -> None:
    path = write(
        """
        # as vLLM has it
        model: org/m
        host: "127.0.0.1"
        port: 6379
        uvicorn-log-level: warning
        max_model_len: 32k
        gpu-memory-utilization: 0.5
        enable-prefix-caching: false
        no-overlap: yes
        disable-uvicorn-access-log: true
        served-model-name: [a, b]
        api-key:
          - 0123
          - true
        allowed-origins: ["https://a.example"]
        override-generation-config: {temperature: 0.5, top_k: 20}
        kv-cache-memory-bytes: 2G
        trust-remote-code: false
        pipeline-parallel-size: 1
        enable-chunked-prefill: true
        """
    )
    arguments = parse(["serve", "--config", path])
    assert engine_config_of(arguments) == EngineConfig(
        model="org/m", max_model_len=32_000, gpu_memory_utilization=0.5, enable_prefix_caching=False, overlap=False,
        kv_cache_bytes=2**31,
    )  # fmt: skip
    assert server_config_of(arguments) == ServerConfig(
        port=6379, uvicorn_log_level="warning", disable_uvicorn_access_log=True, served_model_name=("a", "b"),
        api_key=("0123", "true"), allowed_origins=("https://a.example",),
        override_generation_config={"temperature": 0.5, "top_k": 20},
    )  # fmt: skip


def test_the_command_line_goes_before_the_file(write) -> None:
    path = write("model: of-file\nport: 1\nmax-num-seqs: 2\napi-key: of-file\nenable-prefix-caching: false")
    line = ["serve", "of-line", "--config", path, "--port", "3", "--api-key", "of-line", "--enable-prefix-caching"]
    arguments = parse(line)
    server = server_config_of(arguments)
    assert engine_config_of(arguments) == EngineConfig(model="of-line", max_num_seqs=2)
    assert (server.port, server.api_key, server.served_model_name) == (3, ("of-line",), ("of-line",))


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file(write, text) -> None:
    assert engine_config_of(parse(["serve", "m", "--config", write(text)])) == EngineConfig(model="m")


def test_what_makes_no_difference_is_a_warning(write, capsys) -> None:
    path = write("trust-remote-code: true\nenable-log-outputs: false\n")
    parse(["serve", "m", "--config", path])
    err = capsys.readouterr().err
    assert err.startswith(f"jaxpaged: warning: {path}:1: trust-remote-code: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("port: 1\nmax-modl-len: 4", 2, ("max-modl-len", "is no option", "did you mean --max-model-len?")),
        ("port: 1\nhost: a\nport: 2", 3, ("port", "line 1 already")),
        ("kv-cache-bytes: 1\nkv-cache-memory-bytes: 2", 2, ("line 1 already",)),
        ("port: many", 1, ("port", "'many' is no whole number")),
        ("port: 80.5", 1, ("port", "no whole number")),
        ("port: [1, 2]", 1, ("port", "single value")),
        ("port: {a: 1}", 1, ("port", "single value")),
        ("port:", 1, ("port", "has no value")),
        ("overlap: 1", 1, ("overlap", "neither true nor false")),
        ("dtype: int4", 1, ("dtype", "none of auto")),
        ("api-key: [[a]]", 1, ("api-key", "single value")),
        ("override-generation-config: {a: [1]}", 1, ("single value",)),
        ("override-generation-config: {temperature: !!timestamp x}", 1, ("'x' is no timestamp",)),
        ("override-generation-config: {temperature: !!int ''}", 1, ("'' is no int",)),
        ("override-generation-config: {temperature: !!int x}", 1, ("'x' is no int",)),
        ("override-generation-config: {temperature: !!float ''}", 1, ("'' is no float",)),
        ("override-generation-config: {temperature: !!bool x}", 1, ("'x' is no bool",)),
        ("override-generation-config: {temperature: !!binary é}", 1, ("base64",)),
        ("override-generation-config: {temperature: !none x}", 1, ("!none",)),
        ("override-generation-config: {temperature: !!python/name:os.system x}", 1, ("python/name",)),
        ("kv-cache-dtype: fp8", 1, ("'fp8' is vLLM's and not built here",)),
        ("enable-lora: true", 1, ("enable-lora", "merge the adapter")),
        ("speculative-config: {method: ngram}", 1, ("speculative-config", "not built")),
        ("pipeline-parallel-size: 2", 1, ("pipeline-parallel-size",)),
        ("a: &x 1\nport: *y", 2, ("undefined alias",)),
        ("port: [", 1, ("expected",)),
        ("port: 1\n  host: a", 2, ()),
        ("a: 1\n---\nb: 2", 2, ("another document",)),
        ("? [a]\n: 1", 1, ("key",)),
        ("port: !!python/object/apply:os.system [echo]", 1, ("port",)),
        ("<<: {port: 1}", 1, ("<<",)),
    ],
)
def test_a_mistake_is_one_line_with_the_place(write, capsys, text, line, parts) -> None:
    path = write(text)
    assert main(["serve", "m", "--config", path]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"jaxpaged: error: {path}:{line}: ") and err.count("\n") == 1, err
    assert all(part in err for part in parts), err


@pytest.mark.parametrize(
    "text", ["- a\n- b", "just text", b"\xff\xfe\x00", "a: " + "[" * 20_000, "a: 1\n" * MAX_BYTES, "a: \x00"]
)
def test_what_is_no_file_of_options(write, capsys, text) -> None:
    path = write(text)
    assert main(["serve", "m", "--config", path]) == 1
    err = capsys.readouterr().err
    assert path in err and err.count("\n") == 1 and len(err) < 500


def test_aliases_do_not_multiply(write, capsys) -> None:
    """A small file that would stand for billions of values is refused at once."""
    text = "a: &a [x, x]\n" + "".join(
        f"{n}: &{n} [*{p}, *{p}]\n" for p, n in zip("abcdefghij", "bcdefghijk", strict=True)
    )
    assert main(["serve", "m", "--config", write(text + "api-key: *k")]) == 1
    assert capsys.readouterr().err.count("\n") == text.count("\n") + 1  # none of them is an option


def test_all_mistakes_are_told_at_once(write, capsys) -> None:
    path = write("port: many\nhost: a\nhost: b\nmax-modl-len: 4\nenable-lora: true")
    assert main(["serve", "m", "--config", path]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip().removeprefix("jaxpaged: error: ").split(": ")[0] for line in lines] == [
        f"{path}:{line}" for line in (1, 3, 4, 5)
    ]


@pytest.mark.parametrize(("count", "told"), [(20, 20), (21, 21), (3000, 21)])
@pytest.mark.parametrize("fault", ["wrong-{}: 1", "wrong-{}: {{a: 1}}", "port: {}"])
def test_not_thousands_of_mistakes_are_told(write, capsys, fault: str, count: int, told: int) -> None:
    """That there may be more is the last line."""
    right = "port: 1\n" if fault.startswith("port") else ""
    path = write(right + "".join(fault.format(i) + "\n" for i in range(count)))
    assert main(["serve", "m", "--config", path]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == told and sum(path in line for line in lines) == 20
    assert (lines[-1].strip() == "... and maybe more") is (count > 20)


def test_a_contradiction_within_a_file(write, capsys) -> None:
    path = write("disable-log-requests: true\nenable-log-requests: true")
    assert main(["serve", "m", "--config", path]) == 1
    assert capsys.readouterr().err.endswith(": --disable-log-requests contradicts --enable-log-requests\n")
    path = write("disable-log-requests: true")  # the command line goes before it
    assert server_config_of(parse(["serve", "m", "--config", path, "--enable-log-requests"])).enable_log_requests
    parse(["serve", "m", "--config", write("disable-log-requests: false\nenable-log-requests: true")])


def test_a_file_without_a_name(capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(["serve", "m", "--config", ""])
    assert error.value.code == 2 and "--config must name a file" in capsys.readouterr().err


def test_no_such_file(capsys, tmp_path) -> None:
    for path in (tmp_path / "no.yaml", tmp_path):
        assert main(["serve", "m", "--config", str(path)]) == 1
        err = capsys.readouterr().err
        assert str(path) in err and "cannot be read" in err and err.count("\n") == 1
