"""Thoughts told from answers, at every cut, and their tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.errors import ConfigError
from server.chat.parser import ChatParser, ReasoningTokens
from server.chat.reasoning import REASONING_FORMATS, Prompted, ReasoningParser, prompted, reasoning_format
from tests import tiny_tokenizers
from tests.server.tools.formats_cases import cut, make, message, parse

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
NOTHING, BEGUN, ENDED = Prompted.NOTHING, Prompted.BEGUN, Prompted.ENDED


def parser(name: str, before: Prompted, *, calls: bool = True) -> ChatParser:
    return ChatParser(ReasoningParser(REASONING_FORMATS[name], before), make("hermes") if calls else None)


@pytest.mark.parametrize(
    ("name", "before", "answer", "reasoning", "content", "calls"),
    [
        ("qwen3", NOTHING, "<think>\nOne.\n\nTwo.\n</think>\n\nHi\n", "One.\n\nTwo.", "Hi\n", []),
        ("qwen3", BEGUN, "One.\n</think>\n\nHi", "One.", "Hi", []),
        ("qwen3", BEGUN, "<think>\nOne.\n</think>\n\nHi", "One.", "Hi", []),
        ("qwen3", ENDED, "Hi </think>", "", "Hi </think>", []),
        ("qwen3", NOTHING, " Hi <think>", "", " Hi <think>", []),
        ("qwen3", NOTHING, "<think>\n\n</think>\n\nHi", "", "Hi", []),
        ("think", NOTHING, f"<think>{CALL}</think>\n{CALL}", CALL, "", [("f", "{}")]),
        ("think", NOTHING, "<think>One </thin", "One </thin", "", []),
        ("deepseek_r1", NOTHING, "One.\n</think>\nHi", "One.", "Hi", []),
        ("deepseek_r1", NOTHING, "One. Two", "One. Two", "", []),
        ("deepseek_r1", NOTHING, "<think>One.</think>Hi", "One.", "Hi", []),
        ("deepseek_r1", ENDED, "Hi", "", "Hi", []),
    ],
)
def test_thoughts_and_answer_at_every_cut(name, before, answer, reasoning, content, calls) -> None:
    expected = message(content, calls, reasoning)
    assert parse(parser(name, before), answer) == expected
    for place in range(len(answer)):
        assert parse(parser(name, before), [answer[:place], answer[place:]]) == expected


texts = st.lists(st.sampled_from(["<think>", "</think>", "<", "\n", " ", "a", "日", CALL, "<tool_call>"]), max_size=10)


@settings(max_examples=200, deadline=None)
@given(
    text=texts.map("".join),
    places=st.lists(st.integers(0, 80), max_size=6),
    name=st.sampled_from(sorted(REASONING_FORMATS)),
    before=st.sampled_from(Prompted),
)
def test_any_text_at_any_cut(text, places, name, before) -> None:
    whole = parse(parser(name, before), [text])
    assert parse(parser(name, before), cut(text, places)) == whole
    assert parse(parser(name, before), text) == whole


@settings(max_examples=100, deadline=None)
@given(
    text=texts.map("".join), places=st.lists(st.integers(0, 80), max_size=6), name=st.sampled_from(["think", "qwen3"])
)
def test_tokens_of_thoughts_are_counted_the_same_at_any_cut(text, places, name) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    counts = set()
    for pieces in ([text], cut(text, places), list(text)):
        thoughts = ReasoningParser(REASONING_FORMATS[name], NOTHING)
        counter = ReasoningTokens(tokenizer, thoughts)
        for piece in pieces:
            thoughts.feed(piece)
            counter.add(tokenizer.byte_ids(piece))
        thoughts.finish()
        counts.add(counter.count)
    assert len(counts) == 1
    if text.lstrip().startswith("<think>") and "</think>" in text:
        assert counts == {len((text.partition("</think>")[0] + "</think>").encode())}


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", BEGUN),
        ("assistant\n<think>\n\n</think>\n\n", ENDED),
        ("<|im_start|>assistant\n", NOTHING),
        ("user: <think>\n<|im_start|>assistant\n", NOTHING),
        ("", NOTHING),
    ],
)
def test_what_the_prompt_says(end, state) -> None:
    assert prompted(REASONING_FORMATS["think"], end) is state


def test_names() -> None:
    assert reasoning_format(None) is None
    assert reasoning_format("qwen3") is not None
    with pytest.raises(ConfigError, match="reasoning_parser='foo' must be one of deepseek_r1"):
        reasoning_format("foo")
