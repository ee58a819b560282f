"""Forced calls of tools on a real engine with a tiny random model: whatever it draws, the calls are valid."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.engine.load import load_engine
from tests import tiny_model
from tests.server.conftest import RunningServer

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}!{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
MOVE = {
    "type": "object",
    "properties": {
        "to": {"$ref": "#/$defs/place"},
        "fast": {"type": "boolean"},
        "steps": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["to", "fast"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Rom", "日本", 'a"b']}},
    "description": "holds what looks like a rule: root ::= x",
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE}},
    {"type": "function", "function": {"name": "wait"}},
]


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model.save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    engine, tokenizer = load_engine(
        EngineConfig(model=str(folder), max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=260, strict=True)
    )
    llm = AsyncLLM(InProcessClient(engine, tokenizer), tokenizer)
    server = RunningServer(llm, chat_template=TEMPLATE, reasoning_parser="qwen3")
    yield server
    server.stop()
    assert engine.num_compilations == 0


def check(call) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "wait":
        assert arguments == {}
        return
    assert call.function.name == "move"
    assert {"to", "fast"} <= arguments.keys() <= {"to", "fast", "steps"}
    assert arguments["to"] in ("Rom", "日本", 'a"b') and isinstance(arguments["fast"], bool)
    assert all(step in (1, 2) for step in arguments.get("steps", []))


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid(real, parallel) -> None:
    blanks = {str(real.llm.tokenizer.encode(blank)[0]): -100 for blank in " \n\t\r"}
    counts = set()
    for seed in range(4):
        answer = real.openai.chat.completions.create(
            model="tiny", messages=HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel, n=3,
            seed=seed, extra_body={"chat_template_kwargs": {"enable_thinking": False}}, logit_bias=blanks,
        )  # fmt: skip
        for choice in answer.choices:
            calls = choice.message.tool_calls
            if choice.finish_reason == "length":  # it never stopped calling: all calls but the last one are whole
                calls = calls[:-1]
            else:
                assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            for call in calls:
                check(call)
            counts.add(len(calls))
    assert counts == {1} if not parallel else len(counts) > 1


def test_a_named_call_is_valid_and_streams(real) -> None:
    for seed in range(4):
        body = {
            "model": "tiny", "messages": HELLO, "tools": TOOLS, "seed": seed,
            "tool_choice": {"type": "function", "function": {"name": "move"}},
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        }  # fmt: skip
        whole = real.openai.chat.completions.create(**body).choices[0]
        with real.openai.chat.completions.stream(**body) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (whole, streamed):
            (call,) = choice.message.tool_calls
            assert (call.function.name, choice.finish_reason) == ("move", "stop")
            check(call)
        assert whole.message.tool_calls[0].function.arguments == streamed.message.tool_calls[0].function.arguments


def test_the_model_may_think_first(real) -> None:
    """A random model that begins to think never ends it; one that does not calls."""
    reasons = set()
    for seed in range(8):
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = real.post(PATH, **body, seed=seed, max_tokens=200).json()["choices"]
        reasons.add(choice["finish_reason"])
        assert (choice["finish_reason"] == "length") == bool(choice["message"]["reasoning_content"])
    assert reasons == {"length", "tool_calls"}


def test_a_schema_that_no_grammar_can_follow_is_named(real) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "stsring"}}}}}
    for stream in (False, True):
        response = real.post(PATH, messages=HELLO, tools=[tool], tool_choice="required", stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools") and "stsring" in error["message"]
