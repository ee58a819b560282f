"""Answers in every format, with what they say: content, and calls with their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from server.chat.parser import MadeCall, ParsedMessage, parsed_message
from server.parsing.deltas import Delta, Parser
from server.tools.deepseek_v3 import CALL, CALLS, CALLS_END, END, SEPARATOR
from server.tools.formats import TOOL_FORMATS

NAMES = frozenset({"get_weather", "get_time", "f"})
WEATHER = '{"city": "Paris", "days": 3}'
NESTED = '{"a": {"b": [1, {"c": "</tool_call> } \\" ]"}]}, "d": "日本🔥"}'

Case = tuple[str, str, list[tuple[str, str]]]  # answer, content, calls

CASES: dict[str, list[Case]] = {
    "hermes": [
        (
            f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
            "",
            [("get_weather", WEATHER)],
        ),
        (
            f'I look.\n\n<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>',
            "I look.",
            [("f", NESTED), ("get_time", "{}")],
        ),
        ('<tool_call>{"name":"get_time"}</tool_call>\n\nDone.', "\n\nDone.", [("get_time", "{}")]),
        ('<tool_call>{"name":"f","arguments":{"a":1}</tool_call>', "", [("f", '{"a":1}')]),  # a brace is missing
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name":"f","arguments":null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "", [("f", '{"a": "x\\ny"}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, "tw', "", [("f", '{"a": [1, "tw')]),
        ('<tool_call>{"name":"f","arguments":""}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>\n{"name":"f","arguments":{"a":1}}}\n</tool_call>\nDone.', "\nDone.", [("f", '{"a":1}')]),
        (
            '<tool_call>\n{"name":"f","arguments":{"a":1}}\n{"name":"get_time","arguments":{}}\n</tool_call>',
            "",
            [("f", '{"a":1}'), ("get_time", "{}")],
        ),
        ('<tool_call>{"name":"f","arguments":{}}} or not', "} or not", [("f", "{}")]),
        ("A <tool_call> is a tag </tool_call>.", "A <tool_call> is a tag </tool_call>.", []),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [],
        ),
        ("1 < 2 and <tool", "1 < 2 and <tool", []),
    ],
    "llama3_json": [
        (f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
        (
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; '
            '{"type": "function", "name": "get_time", "parameters": {}}',
            "",
            [("f", '{"a": 1}'), ("get_time", "{}")],
        ),
        ('{"name": "f", "parameters": {"a": 1}, "strict": true}', "", [("f", '{"a": 1}')]),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("Hello {name}", "Hello {name}", []),
        ('<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
    ],
    "json": [
        (f'[{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [("get_weather", WEATHER)]),
        (
            ' {"name": "f", "arguments": {"a": 1}}, {"name": "get_time", "arguments": {}}\n',
            "",
            [("f", '{"a": 1}'), ("get_time", "{}")],
        ),
        ('{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
        ("[1, 2]", "[1, 2]", []),
        ('[{"name": "who", "arguments": {}}]', '[{"name": "who", "arguments": {}}]', []),
    ],
    "pythonic": [
        ('[get_weather(city="Paris", days=3)]', "", [("get_weather", WEATHER)]),
        (
            "<|python_start|>[f(a='it\\'s', "
            "b=[True, None, -1.5, (1, 2,)], c={'k': \"日本\"}), get_time()]<|python_end|>",
            "",
            [("f", '{"a": "it\'s", "b": [true, null, -1.5, [1, 2]], "c": {"k": "日本"}}'), ("get_time", "{}")],
        ),
        ("[f(a=1_000, b=0x1F, c=+2, d=1e3)]", "", [("f", '{"a": 1000, "b": 31, "c": 2, "d": 1000.0}')]),
        ("[1](http://x) is a link", "[1](http://x) is a link", []),
        ("[f(1)]", "[f(1)]", []),
        ("[who(a=1)]", "[who(a=1)]", []),
        ('[f(a="x", b=[1, ', "", [("f", '{"a": "x", "b": [1')]),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [("get_weather", WEATHER)]),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "get_time", "arguments": {}}]',
            "",
            [("f", '{"a": 1}'), ("get_time", "{}")],
        ),
        (
            'Now.[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{}',
            "Now.",
            [("f", '{"a": "[TOOL_CALLS]"}'), ("get_weather", "{}")],
        ),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ("[TOOL_CALLS", "[TOOL_CALLS", []),
    ],
    "deepseek_v3": [
        (
            f"Let me see.\n{CALLS}{CALL}function{SEPARATOR}get_weather\n```json\n{WEATHER}\n```{END}\n"
            f'{CALL}function{SEPARATOR}f\n```json\n{{"a": "```"}}\n```{END}{CALLS_END}',
            "Let me see.",
            [("get_weather", WEATHER), ("f", '{"a": "```"}')],
        ),
        (
            f"{CALLS}{CALL}get_weather{SEPARATOR}{WEATHER}{END}{CALL}get_time{SEPARATOR}{{}}{END}{CALLS_END}",
            "",
            [("get_weather", WEATHER), ("get_time", "{}")],
        ),
        (f"{CALLS}\nnothing", f"{CALLS}\nnothing", []),
    ],
}
ALL = [(name, *case) for name, cases in CASES.items() for case in cases]


def make(name: str, hidden: Sequence[str] = ()) -> Parser:
    return TOOL_FORMATS[name].make(NAMES, hidden)


def parse(parser: Parser, pieces: Iterable[str]) -> ParsedMessage:
    """What a parser makes of a text in pieces."""
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    return parsed_message([*deltas, *parser.finish()])


def message(content: str, calls: Sequence[tuple[str, str]], reasoning: str = "") -> ParsedMessage:
    return ParsedMessage(reasoning, content, [MadeCall(*call) for call in calls])


def cut(text: str, places: Iterable[int]) -> list[str]:
    """A text, cut at some places."""
    inside: list[Any] = sorted(place for place in places if 0 < place < len(text))
    return [text[a:b] for a, b in zip([0, *inside], [*inside, len(text)], strict=True)]
