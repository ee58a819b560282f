"""Parsers of calls: real answers of each format, any cut, broken markup, and floods. Cases B47 and S09."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.errors import ConfigError
from server.tools.formats import PLAIN_JSON, TOOL_FORMATS, tool_format
from tests.server.tools.formats_cases import ALL, CASES, cut, make, message, parse

FORMATS = sorted(CASES)
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "{", "}", "[", "]", "(", ")", '"name"', '"arguments"', '"parameters"', ": ", ", ",
    "f", '"f"', "get_time", "=", "'", '"', "\\", "\n", " ", "1", "true", "True", "null", "-", "e", ";", "```json",
    "```", "x", *sorted({marker for form in TOOL_FORMATS.values() for marker in form.markers}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "content", "calls"), ALL)
def test_an_answer_says_the_same_at_every_cut(name, answer, content, calls) -> None:
    """B47."""
    expected = message(content, calls)
    assert parse(make(name), [answer]) == expected
    assert parse(make(name), answer) == expected
    for place in range(1, len(answer)):
        assert parse(make(name), [answer[:place], answer[place:]]) == expected


@pytest.mark.parametrize(("name", "answer", "calls"), [(n, a, c) for n, a, _, c in ALL if c])
def test_arguments_are_json_objects_and_come_in_pieces(name, answer, calls) -> None:
    parser = make(name)
    pieces = [delta for char in answer for delta in parser.feed(char) if hasattr(delta, "index")]
    for index, (_, arguments) in enumerate(calls):
        if arguments.endswith("}"):
            assert isinstance(json.loads(arguments), dict)
        assert arguments == "{}" or sum(p.index == index for p in pieces) > 2 or '"arguments":"' in answer


@pytest.mark.parametrize(("name", "answer"), [(n, a) for n, a, _, _ in ALL])
def test_an_answer_may_end_anywhere(name, answer) -> None:
    whole = parse(make(name), [answer])
    for end in range(len(answer)):
        part = parse(make(name), [answer[:end]])
        for made, call in zip(part.calls, whole.calls, strict=False):
            assert made.name == call.name and call.arguments.startswith(made.arguments.removesuffix("}"))
        if not part.calls:
            assert part.content == answer[:end]


ARGUMENTS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text("ab <>{}[]()'\"\\\n;,=日🔥", max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"", max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["get_weather", "f"]), ARGUMENTS), min_size=1, max_size=3))
def test_what_is_written_in_a_format_is_read_in_it(made) -> None:
    for name in FORMATS:
        text = TOOL_FORMATS[name].write([{"name": called, "arguments": arguments} for called, arguments in made])
        read = parse(make(name), [text])
        assert [(call.name, json.loads(call.arguments)) for call in read.calls] == made, text
        assert not read.content


broken = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join)
damaged = st.builds(
    lambda case, place, fragment: case[1][:place] + fragment + case[1][place + 1 :],
    st.sampled_from(ALL),
    st.integers(0, 120),
    st.sampled_from(FRAGMENTS),
)


@settings(max_examples=60, deadline=None)
@given(text=broken | damaged, places=st.lists(st.integers(0, 200), max_size=8), hides=st.booleans())
def test_whatever_comes_is_read_the_same_at_any_cut_and_not_lost(text, places, hides) -> None:
    """B47."""
    for name in FORMATS:
        hidden = TOOL_FORMATS[name].markers if hides else ()
        whole = parse(make(name, hidden), [text])
        assert parse(make(name, hidden), cut(text, places)) == whole
        assert parse(make(name, hidden), text) == whole
        if not whole.calls and not hides:
            assert whole.content == text


@pytest.mark.parametrize(
    ("call", "made"),
    [
        (f'{{"x": {"9" * 5000}, "name": "f", "arguments": {{}}}}', "{}"),  # Python reads 4300 digits
        (r'{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}', r'{"a": "\ud83d"}'),  # half of a character
        (r'{"name": "f", "arguments": {"a": "\ud83d"}}', r'{"a": "\ud83d"}'),
        (r'{"name": "\ud83d", "arguments": {}}', None),
    ],
)
def test_what_is_json_but_no_value_of_python_or_text_of_utf8(call, made) -> None:
    """Neither may end an answer with an error."""
    answer = f"<tool_call>{call}</tool_call>"
    expected = message(answer, []) if made is None else message("", [("f", made)])
    assert parse(make("hermes"), [answer]) == expected
    assert parse(make("hermes"), answer) == expected


FLOODS = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": ['],
    "llama3_json": ["<|python_tag|>", '{"name":'],
    "json": ['[{"name":', "["],
    "pythonic": ["<|python_start|>", "[f(", "[f(a=("],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]"],
    "deepseek_v3": TOOL_FORMATS["deepseek_v3"].markers,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_flood_takes_time_in_proportion(name) -> None:
    """S09: a megabyte of beginnings that never end: 100,000 `<tool_call>`, for one."""
    for flood in (*FLOODS[name], "(", "\n"):
        started = time.process_time()
        parse(make(name), [flood * min(100_000, 1_100_000 // len(flood))])
        parse(make(name), [flood + "[(" * 50_000])
        assert time.process_time() - started < 10, flood


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_wait_takes_time_in_proportion(name) -> None:
    """S09: held back, a token at a time."""
    for begin in ("", CASES[name][0][1][:-4]):
        for held in (" ", "<", "["):
            started = time.process_time()
            parse(make(name), [begin, *[held] * 20_000])
            assert time.process_time() - started < 10, (begin, held)


def test_control_tokens_never_become_content() -> None:
    for name, answer in (("llama3_json", "<|python_tag|>print(1)"), ("mistral", "[TOOL_CALLS] no")):
        markers = TOOL_FORMATS[name].markers
        content = parse(make(name, markers), answer).content
        assert content and not any(marker in content for marker in markers)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_start|>' }}", "pythonic"),
        ("{{ '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}", "deepseek_v3"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and', "llama3_json"),
        ("<tool_call>\n<function=example>", "json"),
        ("{{ messages }}", "json"),
        (None, "json"),
    ],
)
def test_the_format_is_read_from_the_template(template, name) -> None:
    assert tool_format(None, template) is TOOL_FORMATS[name]
    assert tool_format("json", template) is PLAIN_JSON


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'xml' must be one of hermes, llama3_json"):
        tool_format("xml", None)
