"""POST /tokenize and /detokenize: as the tokenizer and the template say, and nothing that could harm."""

from __future__ import annotations

import pytest

from jaxpaged.text.chat import render_chat
from server.protocol.tokenize import MAX_TOKENS
from tests.server.conftest import MODEL, LiveServer

MESSAGES = [{"role": "user", "content": "Hello <|eos|> there"}, {"role": "assistant", "content": "Yes"}]
TEXT = "Hello, wörld 🙂"


@pytest.mark.parametrize("special", [None, True, False])
def test_a_text(live: LiveServer, special):
    body = live.post("/tokenize", prompt=TEXT, model=MODEL, add_special_tokens=special).json()
    ids = live.tokenizer.encode(TEXT, add_special_tokens=special is not False)
    assert body == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}


def test_names_of_tokens(live: LiveServer):
    body = live.post("/tokenize", prompt=TEXT, return_token_strs=True).json()
    assert body["token_strs"] == live.tokenizer.hf.convert_ids_to_tokens(body["tokens"])


def test_there_and_back(live: LiveServer):
    ids = live.post("/tokenize", prompt=TEXT, add_special_tokens=False).json()["tokens"]
    assert live.post("/detokenize", tokens=ids, model=MODEL).json() == {"prompt": TEXT}
    assert live.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_control_tokens_are_told(live: LiveServer):
    (name,) = live.post("/tokenize", prompt="", return_token_strs=True).json()["token_strs"] or ("",)
    assert live.post("/detokenize", tokens=live.tokenizer.encode("")).json() == {"prompt": name}


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}])
def test_a_conversation(live: LiveServer, options):
    body = live.post("/tokenize", messages=MESSAGES, **options).json()
    options = {"add_generation_prompt": not options.get("continue_final_message")} | options
    assert body["tokens"] == render_chat(live.tokenizer, MESSAGES, **options)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"chat_template_kwargs": {"x": 1}}])
def test_it_counts_what_chat_computes(live: LiveServer, options):
    """Also where a template that knows no tools has them described in a message."""
    count = live.post("/tokenize", messages=MESSAGES, **options).json()["count"]
    usage = live.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, **options).json()["usage"]
    assert usage["prompt_tokens"] == count
    assert (count > live.post("/tokenize", messages=MESSAGES).json()["count"]) == ("tools" in options)


def test_more_than_the_context_is_counted_too(live: LiveServer):
    assert live.post("/tokenize", prompt="a b " * 600).json()["count"] > 512
    assert live.post("/tokenize", messages=[{"role": "user", "content": "a b " * 600}]).json()["count"] > 512


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        ("/tokenize", {}, "prompt", "exactly one"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "exactly one"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "string"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "only allowed with messages"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "only allowed"),
        ("/tokenize", {"prompt": "a", "max_tokens": 3}, "max_tokens", "unknown field"),
        ("/tokenize", {"prompt": "x" * (1 << 22)}, "prompt", "characters"),
        ("/tokenize", {"messages": []}, "messages", "empty"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "king"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * (1 << 22)}]}, "prompt", "characters"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template", "does not trust"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs",
            "",
        ),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"cut": False}}, "chat_template_kwargs", "cut"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens", "template"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "exclude",
        ),
        ("/tokenize", {"messages": MESSAGES, "tools": TOOLS * 2}, "tools", "twice"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", "other"),
        ("/detokenize", {}, "tokens", "missing"),
        ("/detokenize", {"tokens": "a"}, "tokens", "'a'"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens", "'a'"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens", "-1"),
        ("/detokenize", {"tokens": [1, True]}, "tokens", "True"),
        ("/detokenize", {"tokens": [10**9]}, "tokens", "1000000000"),
        ("/detokenize", {"tokens": [10**30]}, "tokens", "1000000"),
        ("/detokenize", {"tokens": [1] * (MAX_TOKENS + 1)}, "tokens", "at most"),
    ],
)
def test_what_is_refused(live: LiveServer, path, fields, param, says):
    answer = live.post(path, **fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), answer.text[:300]
    assert error["param"] == param and says in error["message"] and len(error["message"]) < 400, error


def test_what_is_no_text(live: LiveServer):
    answer = live.http.post("/tokenize", content=b'{"prompt": "\\ud800"}')
    assert answer.status_code == 400 and "\\ud800" not in answer.text, answer.text


def test_user_text_cannot_forge_a_turn(live: LiveServer):
    """S12: control tokens that a message spells stay text, as in chat."""
    plain = live.post("/tokenize", messages=[{"role": "user", "content": "a"}]).json()["tokens"]
    name = live.tokenizer.hf.convert_ids_to_tokens(2)
    forged = live.post("/tokenize", messages=[{"role": "user", "content": f"a{name}"}]).json()["tokens"]
    assert forged.count(2) == plain.count(2)
