"""Tools in /v1/chat/completions on a scripted engine. Case B47."""

from __future__ import annotations

import json

import pytest

from server.tools.formats import TOOL_FORMATS
from tests import tiny_tokenizers

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
ARGUMENTS = '{"city": "Paris </tool_call> 日本", "more": {"a": [1, {"b": "}"}]}}'
HERMES = (
    "Let me see.\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
CALLS = [("get_weather", ARGUMENTS), ("get_time", "{}")]
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def shared_server():
    from tests.server.conftest import LiveServer

    server = LiveServer(tiny_tokenizers.byte_level(TEMPLATE), {"max_model_len": 2048})
    yield server
    server.stop()


def allowed(*names: str, mode: str = "auto") -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def calls_of(message: dict) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def streamed(live, **body) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and finish reason of the only choice; checks what each chunk may say."""
    content, calls, reason = "", [], None
    for event in live.events(PATH, **body):
        (choice,) = event["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        content += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert piece["type"] == "function" and len(piece["id"]) == 9
                calls.append([piece["function"]["name"], piece["function"]["arguments"]])
            else:
                assert piece["index"] == len(calls) - 1 and piece.keys() == {"index", "function"}
                assert piece["function"].keys() == {"arguments"}
                calls[-1][1] += piece["function"]["arguments"]
    assert reason is not None
    return content, [tuple(call) for call in calls], reason


def test_calls_in_an_answer(live, says) -> None:
    says(HERMES)
    (choice,) = live.post(PATH, messages=HELLO, tools=TOOLS).json()["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Let me see.")
    assert calls_of(message) == CALLS
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2 and all(call.keys() == {"id", "type", "function"} for call in message["tool_calls"])


@pytest.mark.parametrize("tokens_per_step", [*range(1, 12), 40, 1000])
def test_a_stream_says_the_same_at_any_cut(live, says, tokens_per_step) -> None:
    """B47: a token is a byte, so characters are cut too."""
    says(HERMES, tokens_per_step)
    assert streamed(live, messages=HELLO, tools=TOOLS) == ("Let me see.", CALLS, "tool_calls")


def test_every_cut_in_two(live) -> None:
    """B47."""
    ids = [*live.tokenizer.byte_ids(HERMES), 2]
    for place in range(1, len(ids)):
        live.play(ids, tokens_per_step=[place, len(ids)])
        assert streamed(live, messages=HELLO, tools=TOOLS) == ("Let me see.", CALLS, "tool_calls"), place


def test_an_answer_without_calls(live, says) -> None:
    for answer in ("Hi 🔥", "<tool_call>no", '{"name": "get_time"}', "a < b\n"):
        says(answer)
        (choice,) = live.post(PATH, messages=HELLO, tools=TOOLS).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": answer, "refusal": None, "annotations": []}
        assert choice["finish_reason"] == "stop"
        assert streamed(live, messages=HELLO, tools=TOOLS) == (answer, [], "stop")


def test_only_calls_leave_no_content(live, says) -> None:
    says(HERMES.removeprefix("Let me see.\n"))
    message = live.post(PATH, messages=HELLO, tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None and calls_of(message) == CALLS


def test_the_openai_client_accumulates_a_stream(live, says) -> None:
    says(HERMES)
    whole = live.openai.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    assert [(c.function.name, c.function.arguments) for c in whole.choices[0].message.tool_calls] == CALLS
    with live.openai.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == CALLS


def test_one_call_at_most(live, says) -> None:
    says(HERMES)
    body = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    assert calls_of(live.post(PATH, **body).json()["choices"][0]["message"]) == CALLS[:1]
    assert streamed(live, **body) == ("Let me see.", CALLS[:1], "tool_calls")


def test_an_answer_that_is_cut_off(live) -> None:
    ids = live.tokenizer.byte_ids(HERMES)
    end = len(HERMES.partition('"more"')[0].encode())
    live.play(ids)
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": end}
    (choice,) = live.post(PATH, **body).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert calls_of(choice["message"]) == [("get_weather", ARGUMENTS.partition('"more"')[0])]
    assert streamed(live, **body)[1:] == ([("get_weather", ARGUMENTS.partition('"more"')[0])], "length")


def test_choice_none_reads_no_calls(live, says) -> None:
    says(HERMES)
    (choice,) = live.post(PATH, messages=HELLO, tools=TOOLS, tool_choice="none").json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (HERMES, "stop")
    assert "tool_calls" not in choice["message"]


def test_several_choices_with_logprobs_and_token_ids(live) -> None:
    answers = [HERMES, "Hi", '<tool_call>{"name": "get_time"}</tool_call>']
    live.play(lambda request: [*live.tokenizer.byte_ids(answers[request.index]), 2])
    body = {"messages": HELLO, "tools": TOOLS, "n": 3, "logprobs": True, "return_token_ids": True, "seed": 1}
    choices = live.post(PATH, **body).json()["choices"]
    assert [c["finish_reason"] for c in choices] == ["tool_calls", "stop", "tool_calls"]
    ids = {c["index"]: [] for c in choices}
    logprobs = {c["index"]: [] for c in choices}
    for event in live.events(PATH, **body):
        (choice,) = event["choices"]
        ids[choice["index"]] += choice.get("token_ids", [])
        logprobs[choice["index"]] += (choice["logprobs"] or {}).get("content", [])
    for choice in choices:
        assert ids[choice["index"]] == choice["token_ids"]
        assert logprobs[choice["index"]] == choice["logprobs"]["content"] and len(choice["token_ids"]) > 2


def test_a_stop_string_ends_a_call(live, says) -> None:
    says(HERMES)
    body = {"messages": HELLO, "tools": TOOLS, "stop": ["</tool_call>\n<"]}
    (choice,) = live.post(PATH, **body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>\n<")
    assert calls_of(choice["message"]) == CALLS[:1]
    assert streamed(live, **body)[1] == CALLS[:1]


def test_markers_that_are_control_tokens_reach_the_parser(start) -> None:
    """They are never shown, even where they begin no call."""
    hf = tiny_tokenizers.byte_level(chat_template=TEMPLATE).hf
    hf.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    tokenizer = tiny_tokenizers.TinyTokenizer(hf, byte_level=True)
    tag = tokenizer.id("<|python_tag|>")
    server = start(tokenizer, tool_call_parser="llama3_json")
    call = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
    server.play([tag, *tokenizer.byte_ids(call), 2])
    expected = ("", [("get_weather", '{"city": "Rome"}')], "tool_calls")
    assert streamed(server, messages=HELLO, tools=TOOLS) == expected
    server.play([tag, *tokenizer.byte_ids("print(1)"), 2])
    assert streamed(server, messages=HELLO, tools=TOOLS) == ("print(1)", [], "stop")


def test_tools_and_their_history_reach_the_template(live) -> None:
    prompts = []
    live.play(lambda request: prompts.append(request.prompt_token_ids) or [2])
    call = {"id": "123456789", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rom"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": [{"type": "text", "text": "sunny"}]},
    ]
    live.post(PATH, messages=messages, tools=TOOLS)
    text = live.tokenizer.decode(prompts[-1], skip_special_tokens=False)
    assert '"name": "get_time"' in text and '"properties": {}' in text  # a tool without parameters takes none
    assert '"arguments": {"city": "Rom"}' in text and "None" not in text
    assert text.endswith("[tool]sunny[assistant]")


def test_a_template_without_tools_is_told_in_plain_json(start) -> None:
    server = start(engine_options={"max_model_len": 2048})
    prompts = []
    answer = '[{"name": "get_weather", "arguments": {"city": "Rome"}}]'

    def script(request) -> list[int]:
        prompts.append(request.prompt_token_ids)
        return [*server.tokenizer.byte_ids(answer), 2]

    server.play(script)
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    expected = ("", [("get_weather", '{"city": "Rome"}')], "tool_calls")
    assert streamed(server, messages=messages, tools=TOOLS) == expected
    text = server.tokenizer.decode(prompts[-1], skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools:\n{")
    assert '"name": "get_weather", "description": "The weather of a city."' in text
    assert '<|im_start|>assistant\n[{"name": "get_time", "arguments": {}}]<|im_end|>' in text


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "get weather"}}]}, "tools", "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools", "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools.0.function.name is missing"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function is missing"),
        ({"tools": [TIME, TIME]}, "tools", "'get_time' twice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "array",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "foo": 1}}]}, "tools", "foo"),
        ({"tools": {}}, "tools", "tools"),
        ({"tools": [TIME] * 513}, "tools", "512"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "'always'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
        ({"tools": TOOLS, "tool_choice": allowed("f")}, "tool_choice", "'f', which is none"),
        ({"tools": TOOLS, "tool_choice": allowed()}, "tool_choice", "one tool or more"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "one tool or more"),
        ({"tools": TOOLS, "tool_choice": allowed("get_time", mode="none")}, "tool_choice", "'none'"),
        ({"tool_choice": allowed("get_time")}, "tool_choice", "no tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions", "functions is not supported: use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "contradicts tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "contradicts tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 3}}}}],
                "tool_choice": "required",
            },
            "tools",
            "tools",
        ),
    ],
)
def test_wrong_tools_are_refused_by_name(live, fields, param, says) -> None:
    for stream in (False, True):
        response = live.post(PATH, messages=HELLO, stream=stream, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param) and says in error["message"], error


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": "f"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}, "messages[1].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0]",
        ),
        ({"role": "assistant", "function_call": {"name": 3}}, "messages[1].function_call"),
        ({"role": "assistant", "refusal": 3}, "messages[1].content"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[1].content"),
        ({"role": "function", "name": "f", "content": 1}, "messages[1].content"),
        ({"role": "tool", "content": None}, "messages[1].content"),
    ],
)
def test_a_wrong_history_is_refused_by_name(live, start, message, param) -> None:
    response = live.post(PATH, messages=[*HELLO, message], tools=TOOLS)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": '{"a": "b'}}]}, r'"arguments": "{\"a\": \"b"'),
        ({"function_call": {"name": "f", "arguments": '{"a": 1}'}}, '{"name": "f", "arguments": {"a": 1}}'),
        ({"role": "function", "name": "f", "content": "12 o'clock"}, "[tool]12 o'clock"),
        ({"content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Why"}]}, "[assistant]No.\nWhy"),
        ({"content": None, "refusal": "No!"}, "[assistant]No!"),
    ],
)
def test_a_history_of_older_words_refusals_and_calls_that_were_cut_off(live, message, shown) -> None:
    """A call whose tokens ran out must not end a conversation: the template gets what the model wrote."""
    prompts = []
    live.play(lambda request: prompts.append(request.prompt_token_ids) or [2])
    response = live.post(PATH, messages=[*HELLO, {"role": "assistant", **message}, *HELLO])
    assert response.status_code == 200, response.text
    assert shown in live.tokenizer.decode(prompts[-1], skip_special_tokens=False)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_called(live, mode) -> None:
    """As if there were no others: the model is told of no other, and one that it calls all the same is content."""
    prompts: list[list[int]] = []
    choice = allowed("get_time", mode=mode)
    answer = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    answer = '[{"name": "get_time", "arguments": {}}]' if mode == "required" else answer
    ids = [*live.tokenizer.byte_ids(answer), 2]
    live.play(lambda request: prompts.append(request.prompt_token_ids) or ids)
    message = live.post(PATH, messages=HELLO, tools=TOOLS, tool_choice=choice).json()["choices"][0]["message"]
    assert calls_of(message) == [("get_time", "{}")]
    text = live.tokenizer.decode(prompts[-1], skip_special_tokens=False)
    assert "get_time" in text and "get_weather" not in text


def test_a_server_that_leaves_no_choice(start) -> None:
    server = start(tiny_tokenizers.byte_level(TEMPLATE), enable_auto_tool_choice=False)
    for fields, status in (({}, 400), ({"tool_choice": "auto"}, 400), ({"tool_choice": "none"}, 200)):
        response = server.post(PATH, messages=HELLO, tools=TOOLS, max_tokens=5, **fields)
        assert response.status_code == status, response.text
    assert "enable_auto_tool_choice" in server.post(PATH, messages=HELLO, tools=TOOLS).json()["error"]["message"]
    assert server.post("/tokenize", messages=HELLO, tools=TOOLS).json()["count"] > 0  # nothing is to be called there


LONG_CONTEXT = {"max_model_len": 4096, "num_blocks": 512}  # the tokenizer knows bytes only
CITY = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
]}  # fmt: skip


@pytest.mark.parametrize("template", [TEMPLATE, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"])
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_a_parser_that_is_named_goes_before_what_the_template_tells(start, name, template) -> None:
    """One that knows no tools is told of them in that form, earlier calls too."""
    write = TOOL_FORMATS[name].write
    server = start(tiny_tokenizers.byte_level(template), engine_options=LONG_CONTEXT, tool_call_parser=name)
    prompts: list[list[int]] = []
    ids = server.tokenizer.byte_ids(write([{"name": "get_weather", "arguments": {"city": "Paris"}}]))
    server.play(lambda request: prompts.append(request.prompt_token_ids) or [*ids, 2])
    body = {"messages": [*HELLO, CITY, {"role": "tool", "tool_call_id": "a", "content": "hot"}], "tools": TOOLS}
    message = server.post(PATH, **body).json()["choices"][0]["message"]
    assert [(n, json.loads(arguments)) for n, arguments in calls_of(message)] == [("get_weather", {"city": "Paris"})]
    said = server.tokenizer.decode(prompts[-1], skip_special_tokens=False)
    if template != TEMPLATE:
        assert write([{"name": "get_weather", "arguments": {"city": "Rome"}}]) in said
        assert write([{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}]) in said


def test_tools_that_may_not_be_called_may_be_left_out(live, start) -> None:
    server = start(tiny_tokenizers.byte_level(TEMPLATE), exclude_tools_when_tool_choice_none=True)
    lengths = [
        s.post(PATH, messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=1).json()["usage"]["prompt_tokens"]
        for s in (live, server)
    ]
    assert lengths[1] < 30 < lengths[0]


def test_forced_calls_are_a_grammar_and_say_what_openai_says(live) -> None:
    """The scripted engine honours grammars: it refuses tokens that cannot follow."""
    array = '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "get_time", "arguments": {}}]'
    live.play([*live.tokenizer.byte_ids(array), 2])
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    calls = [("get_weather", '{"city": "Rome"}'), ("get_time", "{}")]
    (choice,) = live.post(PATH, **body).json()["choices"]
    assert (calls_of(choice["message"]), choice["finish_reason"]) == (calls, "tool_calls")
    assert choice["message"]["content"] is None
    assert streamed(live, **body) == ("", calls, "tool_calls")
    assert live.post(PATH, **body, parallel_tool_calls=False).status_code == 500  # the second call cannot follow
    live.play([*live.tokenizer.byte_ids('[{"name": "get_time", "arguments": {}}]'), 2])
    named = {**body, "tool_choice": {"type": "function", "function": {"name": "get_time"}}}
    (choice,) = live.post(PATH, **named).json()["choices"]
    assert (calls_of(choice["message"]), choice["finish_reason"]) == ([("get_time", "{}")], "stop")
    assert streamed(live, **named) == ("", [("get_time", "{}")], "stop")
    assert json.loads(calls_of(choice["message"])[0][1]) == {}
