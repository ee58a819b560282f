"""The commands, with a scripted engine in place of a model."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest

import jaxpaged
import server.serve
import server.terminal.chat
from benchmarks.server_process import free_port
from jaxpaged.config import EngineConfig
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.device.logits_processor import LogitsProcessor
from jaxpaged.engine.load import load_engine
from jaxpaged.errors import ConfigError
from server.cli import main, parse
from server.config import ServerConfig
from server.options.flags import engine_config_of, flags, server_config_of
from tests import tiny_tokenizers
from tests.fake_engine import FakeEngine
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = tiny_tokenizers.byte_level()


@pytest.fixture
def fake(monkeypatch) -> FakeEngine:
    """What `jaxpaged chat` loads."""
    engine = FakeEngine([*TOKENIZER.byte_ids("Hi 🔥"), 2], vocab_size=TOKENIZER.vocab_size, eos_token_ids=[2])

    def load(config, progress):
        progress("load", 10, 10)
        progress("warm-up", 3, 3)
        engine.wanted = config
        return engine, TOKENIZER

    monkeypatch.setattr(server.terminal.chat, "load_engine", load)
    return engine


def test_chat_answers_on_stdout_and_reports_on_stderr(fake, capsys) -> None:
    assert main(["chat", "demo", "hello", "--max-tokens", "50"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hi 🔥\n"
    for part in (
        "Loading weights",
        "Preparing programs",
        "8 tokens",
        "tokens/s",
        "first token after",
        "3 programs",
        "loading demo",
    ):
        assert part in err
    assert fake.wanted.max_num_seqs == 1 and fake.num_free == fake.num_blocks


def test_chat_reads_a_prompt_from_stdin(fake, capsys, monkeypatch) -> None:
    prompts = []
    fake.script = lambda request: prompts.append(request.prompt_token_ids) or [2]
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main(["chat", "demo"]) == 1
    assert capsys.readouterr().err == "jaxpaged: error: the prompt is empty\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert main(["chat", "demo", "--system", "Be brief."]) == 0
    text = TOKENIZER.decode(prompts[0], skip_special_tokens=False)
    assert "system\nBe brief.<|im_end|>" in text and "user\nfrom a pipe<|im_end|>" in text


def test_chat_holds_a_conversation(fake, capsys, monkeypatch) -> None:
    prompts = []

    def script(request) -> list[int]:
        if not request.num_output_tokens:
            prompts.append(TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False))
        return [*TOKENIZER.byte_ids("Yes"), 2]

    fake.script = script
    typed = ["two", "", "one"]

    def read(_: str) -> str:
        if not typed:
            raise EOFError
        return typed.pop()

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
    assert main(["chat", "demo"]) == 0
    assert capsys.readouterr().out == "Yes\nYes\n"
    assert prompts[1].endswith("user\none<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
                               "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")  # fmt: skip


def test_an_answer_that_is_left_early_stays_in_the_conversation(fake) -> None:
    conversation = server.terminal.chat.Conversation(fake, TOKENIZER, SamplingParams(max_tokens=50))
    answer = conversation.ask("hello")
    assert next(answer) == "H"
    answer.close()
    assert not fake.live
    assert conversation._messages[1:] == [{"role": "assistant", "content": "H"}]


def test_an_interrupted_answer_leaves_nothing_running(fake, monkeypatch) -> None:
    fake.script, steps = [5], []

    def interrupt() -> list:
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return FakeEngine.step(fake)

    monkeypatch.setattr(fake, "step", interrupt)
    assert main(["chat", "demo", "hello"]) == 130
    assert not fake.live


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "/no/such/model", "hi"],
        ["chat", "demo", "hi", "--block-size", "3"],
        ["chat", "demo", "hi", "--temperature", "-1"],
        ["serve", "demo", "--port", "70000"],
        ["serve", "demo", "--host", "no.such.host.invalid"],
        ["serve", "demo", "--gpu-memory-utilization", "2"],
    ],
)
def test_mistakes_are_one_line(arguments, capsys) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxpaged: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["serve", "demo", "--no-such-flag", "4"], ["serve"], ["serve", "x", "--max-model", "64"]]
)
def test_unknown_flags_are_refused(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_option_is_a_flag_with_help_and_default(config, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as error:
        main(["serve", "--help"])
    assert error.value.code == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for field in dataclasses.fields(config):
        if field.name not in ("model", "scheduling_key"):  # a function exists only in Python
            name = f"--{field.name.replace('_', '-')}"
            (at,) = (i for i, line in enumerate(lines) if re.match(rf"{name}\b(?!-)", line))
            text = lines[at] if "(default" in lines[at] else lines[at] + " " + lines[at + 1]  # a long one has two lines
            told = re.search(r"\S \(default: (.+?)(?:; none: .+)?\)( |$)", text)
            assert told and "None" not in text and "Empty" not in text, text
            flag = next(flag for flag in flags([config]) if flag.name == name)
            if isinstance(field.default, bool):
                assert told[1] == ("on" if field.default else "off"), text
            elif field.default not in (None, "", ()):
                assert (tuple(told[1].split()) if flag.many else flag.value(told[1])) == field.default, text
            assert ("; none: " in text) == (flag.optional and field.default is not None), text


def test_a_chat_has_no_flags_of_queues_and_servers(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    text = capsys.readouterr().out
    assert "--max-model-len" in text and "--temperature" in text
    for flag in ("--port", "--max-num-seqs", "--scheduling-policy", "--api-key", "--tensor-parallel-size"):
        assert flag not in text


def test_what_follows_two_dashes_is_a_prompt() -> None:
    arguments = parse(["chat", "demo", "--max_tokens", "5", "--", "--what_is this?"])
    assert (arguments.prompt, arguments.max_tokens) == ("--what_is this?", 5)
    assert parse(["chat", "demo", "--max-tokens", "5", "hello"]).prompt == "hello"
    assert parse(["chat", "demo", "--", "-x"]).prompt == "-x"


def test_the_version(capsys) -> None:
    assert main(["version"]) == 0
    with pytest.raises(SystemExit):
        main(["--version"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == f"jaxpaged {jaxpaged.__version__}"


def test_flags_become_the_config() -> None:
    arguments = parse(
        ["serve", "m", "--max-model-len", "64", "--no-enable-prefix-caching", "--dtype", "float32", "--seed", "3",
         "--gpu-memory-utilization", "0.5", "--attention-implementation", "xla", "--strict", "--swap-space", "1.5",
         "--scheduling-policy", "priority", "--ageing", "2", "--max-logprobs", "-1", "--logprobs-mode",
         "processed_logprobs", "--max-num-queued-requests", "7"]
    )  # fmt: skip
    assert engine_config_of(arguments, max_num_seqs=4, seed=9) == EngineConfig(
        model="m", max_model_len=64, enable_prefix_caching=False, dtype="float32", seed=3, gpu_memory_utilization=0.5,
        attention_implementation="xla", strict=True, max_num_seqs=4, swap_space=1.5, scheduling_policy="priority",
        ageing=2.0, max_logprobs=-1, logprobs_mode="processed_logprobs", max_num_queued_requests=7,
    )  # fmt: skip
    assert server_config_of(arguments) == ServerConfig(served_model_name=("m",))


HALVE = LogitsProcessor("halve", lambda logits, context: logits / 2)


def test_logits_processors_are_imported_by_name() -> None:
    name = f"{__name__}:HALVE"
    arguments = parse(["serve", "m", "--logits-processors", name, name])
    assert engine_config_of(arguments).logits_processors == (name, name)  # for the engine's process to import
    for wrong in ("no.such.module:HALVE", f"{__name__}:NOTHING", "HALVE", ":", "server.options.flags:"):
        with pytest.raises(ConfigError, match=re.escape(repr(wrong))):
            load_engine(EngineConfig(model="m", logits_processors=(wrong,)))


def test_a_taken_port_is_found_before_the_weights_load(monkeypatch, capsys) -> None:
    monkeypatch.setattr(server.serve, "ProcessClient", lambda *_, **__: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "demo", "--port", str(port)]) == 1
    err = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in err and "in use" in err and err.count("\n") == 1


@pytest.mark.parametrize("module", ["server.commands", "server.options.flags", "server.config", "jaxpaged.config"])
def test_ctrl_c_while_it_imports_is_quiet(module) -> None:
    code = textwrap.dedent(
        f"""
        import sys

        class Interrupted:
            def find_spec(self, name, *_):
                if name == "{module}":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupted())
        from server.cli import main
        sys.exit(main(["serve", "demo"]))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_mistakes_are_found_before_anything_slow_is_imported(tmp_path) -> None:
    """A taken port, a folder without a model, a file of keys that is not there."""
    code = (
        "import sys; from server.cli import main; status = main(sys.argv[1:]);"
        "print(status, {'jax', 'fastapi', 'transformers', 'uvicorn'} & sys.modules.keys())"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, said in (
            (["serve", "demo", "--port", port], "in use"),
            (["serve", str(tmp_path), "--port", "0"], f"error: {tmp_path} has neither"),
            (["serve", "demo", "--api-key-file", "/no/keys"], "--api-key-file '/no/keys' cannot be read: No such file"),
        ):
            done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
            assert done.stdout == "1 set()\n", done
            assert said in done.stderr and done.stderr.count("\n") == 1 and "Errno" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--block-size", "15"], "--block-size 15 "),
        (["--max_num_seqs", "0"], "--max-num-seqs 0 "),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--port", "70000"], "--port 70000 "),
    ],
)
def test_errors_name_the_flag_that_was_given(arguments, said, capsys) -> None:
    assert main(["serve", "demo", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"jaxpaged: error: {said}")


def test_without_a_command_there_is_help(capsys) -> None:
    assert main([]) == 0
    assert "serve a model over HTTP" in capsys.readouterr().out


SERVE = textwrap.dedent(
    """
    import functools
    import sys
    import server.commands
    import server.serve
    from server.cli import main
    from tests.scripted_core import LOAD, TOKENIZER

    server.serve.ProcessClient = functools.partial(server.serve.ProcessClient, engine=LOAD)
    server.commands.announce = lambda config: None  # no model has such a name
    server.serve.open_front = lambda config: (TOKENIZER, {})
    sys.exit(main(["serve", "echo delay=0.02", "--served-model-name", "tiny", *sys.argv[1:]]))
    """
)


class Process:
    """`jaxpaged serve`, with a client."""

    def __init__(self, client: httpx.Client, address: str | tuple[str, int], *options: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAXPAGED_API_KEY": "secret"}
        command = [sys.executable, "-c", SERVE, "--uvicorn-log-level", "warning", *options]
        self.child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        self.client, self.address = client, address

    def ready(self) -> bool:
        assert self.child.poll() is None, self.child.stderr.read()
        # By hand: httpx does not close a Unix socket that refused it.
        with socket.socket(socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET) as probe:
            if probe.connect_ex(self.address) != 0:
                return False
        return self.client.get("/health").status_code == 200


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-out", certificate, "-keyout", key]
    subprocess.run([*made.split(), *names], check=True, capture_output=True)
    return certificate, key


def over_tls(folder: Path) -> Process:
    """On a port, its options in a file."""
    certificate, key = self_signed(folder)
    port = free_port()
    file = folder / "options.yaml"
    file.write_text(
        f"port: {port}\nssl-certfile: {certificate}\nssl-keyfile: {key}\noverride-generation-config: {{top_k: 1}}\n"
    )
    trusted = ssl.create_default_context(cafile=certificate)
    client = httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, trust_env=False, timeout=120)
    return Process(client, ("127.0.0.1", port), "--config", str(file))


def over_unix_socket(folder: Path) -> Process:
    path = str(folder / "server.sock")
    client = httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=path), timeout=120)
    return Process(client, path, "--uds", path)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two, started side by side: most of their start is importing."""
    folder = tmp_path_factory.mktemp("serve")
    both = [over_tls(folder), over_unix_socket(folder)]
    try:
        for process in both:
            wait_for(process.ready, 300)
        yield both
    finally:
        for process in both:
            process.child.kill()
            process.child.wait()
            process.child.stderr.close()
            process.client.close()


def test_serve_drains_on_sigterm(processes) -> None:
    child, client = processes[0].child, processes[0].client
    assert client.get("/v1/models").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "long", "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = [next(iterator := response.iter_lines())]
        child.send_signal(signal.SIGTERM)
        lines += [line for line in iterator if line]
    assert '"completion_tokens":50' in lines[-2] and lines[-1] == "data: [DONE]"
    assert child.wait(60) == 0
    page = child.stderr.read()
    for part in (
        "served as tiny",
        "64 blocks of 16 tokens",
        "top_k=1",
        "with an API key",
        f":{client.base_url.port}/v1",
        "shutting down: 1 requests may go on for 30 s",
    ):
        assert part in page
    assert "secret" not in page


def test_serve_exits_when_the_engine_dies(processes) -> None:
    """B54."""
    child, client = processes[1].child, processes[1].client
    headers = {"Authorization": "Bearer secret"}
    answer = client.post("/v1/completions", json={"prompt": "fail", "max_tokens": 50}, headers=headers)
    assert answer.status_code == 503 and client.get("/health").status_code == 503
    assert child.wait(60) == 1
    text = child.stderr.read()
    assert "device lost" in text and "listening    unix:/" in text and "secret" not in text
