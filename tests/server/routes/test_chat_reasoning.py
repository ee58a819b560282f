"""Thoughts in /v1/chat/completions on a scripted engine."""

from __future__ import annotations

import pytest

from tests import tiny_tokenizers
from tests.server.conftest import LiveServer

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}{{ tools | tojson if tools else '' }}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ANSWER = "<think>\nHm 日.\n</think>\n\nHi"


@pytest.fixture(scope="module")
def shared_server():
    server = LiveServer(tiny_tokenizers.byte_level(TEMPLATE), reasoning_parser="qwen3", tool_call_parser="hermes")
    yield server
    server.stop()


def streamed(live, **body) -> tuple[str, str, dict | None]:
    """Reasoning, content and the last usage."""
    reasoning = content = ""
    usage = None
    for event in live.events(PATH, **body, stream_options={"include_usage": True}):
        usage = event["usage"]
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
    return reasoning, content, usage


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 7, 100])
def test_thoughts_are_told_apart(live, says, tokens_per_step) -> None:
    says(ANSWER, tokens_per_step)
    answer = live.post(PATH, messages=HELLO).json()
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": "Hi", "refusal": None, "annotations": [],
        "reasoning": "Hm 日.", "reasoning_content": "Hm 日.",
    }  # fmt: skip
    thoughts = len(ANSWER.partition("\n\nHi")[0].encode())
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thoughts}
    reasoning, content, usage = streamed(live, messages=HELLO)
    assert (reasoning, content, usage) == ("Hm 日.", "Hi", answer["usage"])


@pytest.mark.parametrize(
    ("options", "answer", "reasoning", "content"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, "Hm.\n</think>\n\nHi", "Hm.", "Hi"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "Hi </think>", None, "Hi </think>"),
        ({"reasoning_effort": "high"}, "Hm.</think>Hi", "Hm.", "Hi"),
        ({"reasoning_effort": "none"}, "Hi", None, "Hi"),
        ({}, "Hi", None, "Hi"),
    ],
)
def test_what_the_template_has_begun(live, says, options, answer, reasoning, content) -> None:
    says(answer)
    message = live.post(PATH, messages=HELLO, **options).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert streamed(live, messages=HELLO, **options)[:2] == (reasoning or "", content)


def test_thoughts_that_do_not_end(live) -> None:
    live.play(live.tokenizer.byte_ids("<think>Hm Hm Hm"))
    answer = live.post(PATH, messages=HELLO, max_tokens=12).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "Hm Hm")
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


def test_thoughts_may_be_left_out(live, says) -> None:
    says(ANSWER)
    message = live.post(PATH, messages=HELLO, include_reasoning=False).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []}
    assert streamed(live, messages=HELLO, include_reasoning=False)[:2] == ("", "Hi")


def test_thoughts_then_calls(live, says) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    says(f"<think>I could {call}</think>\n{call}")
    (choice,) = live.post(PATH, messages=HELLO, tools=[TOOL]).json()["choices"]
    assert choice["message"]["reasoning_content"] == f"I could {call}"
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    with live.openai.chat.completions.stream(model="tiny", messages=HELLO, tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "f" and message.reasoning_content == f"I could {call}"


def test_samples_with_logprobs_and_token_ids(live) -> None:
    answers = [ANSWER, "Hi"]
    live.play(lambda request: [*live.tokenizer.byte_ids(answers[request.index]), 2])
    body = {"messages": HELLO, "n": 2, "logprobs": True, "return_token_ids": True, "seed": 1}
    whole = live.post(PATH, **body).json()
    ids, entries = {0: [], 1: []}, {0: [], 1: []}
    for event in live.events(PATH, **body):
        (choice,) = event["choices"]
        ids[choice["index"]] += choice.get("token_ids", [])
        entries[choice["index"]] += (choice["logprobs"] or {}).get("content", [])
    for choice in whole["choices"]:
        assert ids[choice["index"]] == choice["token_ids"]
        assert entries[choice["index"]] == choice["logprobs"]["content"]


def test_a_forced_call_and_a_form_leave_room_for_thoughts(live, says) -> None:
    call = '[{"name": "f", "arguments": {}}]'
    forced = {"tools": [TOOL], "tool_choice": "required"}
    for options, before in (
        ({"chat_template_kwargs": {"enable_thinking": True}}, "Hm.\n</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ""),
        ({}, "<think>\nHm.\n</think>\n\n"),
        ({}, ""),
    ):
        says(before + call)
        (choice,) = live.post(PATH, messages=HELLO, **forced, **options).json()["choices"]
        assert choice["message"]["reasoning_content"] == ("Hm." if before else None)
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
        assert choice["finish_reason"] == "tool_calls"
        says(before + '{"a": 1}')
        body = {"messages": HELLO, "response_format": {"type": "json_object"}, **options}
        assert live.post(PATH, **body).json()["choices"][0]["message"]["content"] == '{"a": 1}'


def test_thoughts_and_documents_reach_the_template(live) -> None:
    prompts = []
    live.play(lambda request: prompts.append(request.prompt_token_ids) or [2])
    for name in ("reasoning", "reasoning_content"):
        messages = [*HELLO, {"role": "assistant", "content": "Hi", name: "Hm."}, *HELLO]
        live.post(PATH, messages=messages, documents=[{"text": "a page"}])
        text = live.tokenizer.decode(prompts[-1], skip_special_tokens=False)
        assert text == "(a page)[user]hello[assistant]<think>Hm.</think>Hi[user]hello[assistant]"


def test_an_open_message_may_be_within_thoughts(live, says) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "<think>Hm"}]
    says(" hm.</think>Hi")
    message = live.post(PATH, messages=messages, continue_final_message=True).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" hm.", "Hi")


def test_without_a_parser_thoughts_are_content(start) -> None:
    server = start(tiny_tokenizers.byte_level(TEMPLATE))
    server.play([*server.tokenizer.byte_ids(ANSWER), 2])
    answer = server.post(PATH, messages=HELLO).json()
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": ANSWER,
        "refusal": None,
        "annotations": [],
    }
    assert "completion_tokens_details" not in answer["usage"]
