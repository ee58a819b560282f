"""The prompt in the answer: echo and prompt log-probabilities. Cases B18, B40, B41, B43."""

from __future__ import annotations

import math

import pytest

from tests import tiny_tokenizers

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
WATER = "The step of boiling water is: "


def spelled(tokens, offsets, text) -> bool:
    """Whether each token stands where its offset says."""
    return all(text.startswith(token, offset) for token, offset in zip(tokens, offsets, strict=True))


def test_echo_begins_the_text_with_the_prompt(live) -> None:
    answer = live.openai.completions.create(model="tiny", prompt=["one", "two 🔥"], echo=True)
    assert [c.text for c in answer.choices] == ["oneone", "two 🔥two 🔥"]
    assert all(c.logprobs is None for c in answer.choices)
    ids = live.tokenizer.byte_ids("two 🔥")
    assert live.post(PATH, prompt=ids, echo=True).json()["choices"][0]["text"] == "two 🔥two 🔥"


def test_logprobs_cover_the_prompt(live) -> None:
    """B43."""
    live.play(live.tokenizer.ids("The"), tops=live.tokenizer.byte_ids("abcdefg"))
    answer = live.openai.completions.create(model="tiny", prompt=WATER, echo=True, logprobs=5, max_tokens=1)
    (choice,) = answer.choices
    logprobs, n = choice.logprobs, len(WATER)
    assert choice.text == WATER + "The"
    assert logprobs.tokens == [*WATER, "The"]
    assert logprobs.token_logprobs == [None] + [-0.5] * n
    assert logprobs.text_offset == list(range(n + 1)) and spelled(logprobs.tokens, logprobs.text_offset, choice.text)
    assert logprobs.top_logprobs[0] is None
    assert all(set("abcde") <= set(top) and len(top) <= 6 for top in logprobs.top_logprobs[1:])
    assert answer.usage.completion_tokens == 1


def test_prompts_of_a_batch_keep_their_order(live) -> None:
    """B43: texts and ids, several choices each."""
    texts = ["one", "two 🔥", "a longer third"]
    for prompts in (texts, [live.tokenizer.byte_ids(text) for text in texts]):
        choices = live.post(PATH, prompt=prompts, echo=True, logprobs=0, n=2, max_tokens=2).json()["choices"]
        assert [c["index"] for c in choices] == list(range(6))
        for i, choice in enumerate(choices):
            text = texts[i // 2]
            assert choice["text"].startswith(text)
            assert len(choice["logprobs"]["tokens"]) == len(text.encode()) + 2
            assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"] is None


def test_offsets_count_characters_of_the_returned_text(live) -> None:
    """A character of several tokens begins where the first of them does."""
    live.play(live.tokenizer.byte_ids("ď!"))
    choice = live.post(PATH, prompt="🔥a", echo=True, logprobs=0, max_tokens=3).json()["choices"][0]
    assert choice["text"] == "🔥aď!"
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize("options", [{"logprobs": 1}, {}, {"logprobs": 1, "n": 2}])
def test_a_stream_says_the_same(live, options) -> None:
    live.play(live.tokenizer.ids("The", "Ġbr", "own"), delay=0.005, tops=[9, 8])
    body = {"prompt": ["one", "two"], "echo": True, "max_tokens": 3, "stop": "zzz", **options}
    whole = live.post(PATH, **body).json()
    streamed = {}
    for event in live.events(PATH, **body):
        for choice in event["choices"]:
            mine = streamed.setdefault(choice["index"], {"text": "", "tokens": [], "offsets": [], "logprobs": []})
            mine["text"] += choice["text"]
            if choice["logprobs"]:
                mine["tokens"] += choice["logprobs"]["tokens"]
                mine["offsets"] += choice["logprobs"]["text_offset"]
                mine["logprobs"] += choice["logprobs"]["token_logprobs"]
    for choice in whole["choices"]:
        mine, logprobs = streamed[choice["index"]], choice["logprobs"]
        assert mine["text"] == choice["text"]
        if "logprobs" in options:
            assert mine["tokens"] == logprobs["tokens"] and mine["offsets"] == logprobs["text_offset"]
            assert mine["logprobs"] == logprobs["token_logprobs"] and mine["logprobs"][0] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_a_prompt_can_be_scored_without_an_answer(live, stream, logprobs) -> None:
    """B18."""
    live.play([5], tops=live.tokenizer.byte_ids("a"))
    body = {"prompt": "score", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    if stream:
        chunk, usage = live.events(PATH, **body, stream_options={"include_usage": True})
        choice, usage = chunk["choices"][0], usage["usage"]
    else:
        answer = live.post(PATH, **body).json()
        choice, usage = answer["choices"][0], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("score", "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)
    assert "prompt_logprobs" not in choice
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    assert choice["logprobs"]["tokens"] == list("score")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"] == (
        None if logprobs == 0 else [None, *({"a": -1.0, letter: -0.5} for letter in "core")]
    )


def test_without_echo_there_must_be_something_to_answer(live) -> None:
    """B18."""
    for body in ({"max_tokens": 0}, {"max_tokens": 0, "logprobs": 1}, {"max_tokens": 0, "echo": False}):
        response = live.post(PATH, prompt="x", **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    choice = live.post(PATH, prompt="xy", max_tokens=0, prompt_logprobs=0).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert [p and len(p) for p in choice["prompt_logprobs"]] == [None, 1]


def test_prompt_logprobs_have_the_form_of_vllms(live) -> None:
    a, b, c = live.tokenizer.byte_ids("abc")
    live.play([c], tops=[a, b])
    body = {"prompt_logprobs": 2, "max_tokens": 1}
    choice = live.post(PATH, prompt="abc", **body).json()["choices"][0]
    top_a = {"logprob": -1.0, "rank": 1, "decoded_token": "a"}
    assert choice["prompt_logprobs"] == [
        None,
        {str(b): {"logprob": -2.0, "rank": 2, "decoded_token": "b"}, str(a): top_a},
        {
            str(c): {"logprob": -0.5, "rank": 3, "decoded_token": "c"},
            str(a): top_a,
            str(b): {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        },
    ]
    assert choice["logprobs"] is None
    answer = live.post(CHAT, messages=[{"role": "user", "content": "x"}], **body).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in answer["choices"][0]
    for path, prompt in ((PATH, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        response = live.post(path, **prompt, prompt_logprobs=1, stream=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_logprobs_and_prompt_logprobs_may_differ(live) -> None:
    live.play([5], tops=live.tokenizer.byte_ids("abc"))
    body = {"prompt": "zz", "echo": True, "max_tokens": 1}
    for few, many in ((1, 3), (3, 1)):
        choice = live.post(PATH, **body, logprobs=few, prompt_logprobs=many).json()["choices"][0]
        assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, few + 1, few + 1]
        assert [len(top or ()) for top in choice["prompt_logprobs"]] == [0, many + 1]


def test_minus_infinity_is_json_everywhere(live) -> None:
    """B41."""
    live.play([5], sampled_logprob=-math.inf)
    body = {"prompt": "xy", "echo": True, "logprobs": 1, "max_tokens": 1}
    choice = live.post(PATH, **body, top_k=1, prompt_logprobs=1).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0, -9999.0]
    assert next(iter(choice["prompt_logprobs"][1].values()))["logprob"] == -9999.0
    live.events(PATH, **body)  # refuses -Infinity
    for value in (math.nan, -math.inf):
        live.play([5], sampled_logprob=value)
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5, "max_tokens": 1}
        (_, chunk, _) = live.events(CHAT, **chat)
        assert chunk["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_tokens_that_the_tokenizer_adds_have_no_place_in_the_text(start) -> None:
    """BOS is listed, and is no part of the text."""
    tokenizer = tiny_tokenizers.sentencepiece()
    server = start(tokenizer)
    server.play(tokenizer.ids("!"))
    prompt = [1, *tokenizer.ids("▁Hello", "▁world")]
    choice = server.post(PATH, prompt=prompt, echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "Hello world!"
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 11]
    shown = server.post(PATH, prompt=prompt, echo=True, max_tokens=1, skip_special_tokens=False).json()["choices"][0]
    assert shown["text"] == "<s> Hello world!"


def test_a_prompt_that_was_cut_is_returned_as_it_was_used(live) -> None:
    body = {"echo": True, "logprobs": 0, "max_tokens": 3, "truncate_prompt_tokens": 3}
    answer = live.post(PATH, prompt="undisturbed", **body).json()
    choice = answer["choices"][0]
    assert (choice["text"], answer["usage"]["prompt_tokens"]) == ("bedbed", 3)
    assert choice["logprobs"]["tokens"] == list("bedbed")
    assert choice["logprobs"]["text_offset"] == list(range(6))


def test_logprobs_of_chosen_tokens(live) -> None:
    a, b, z = live.tokenizer.byte_ids("abz")
    live.play([z])
    body = {"logprob_token_ids": [b, a], "max_tokens": 1}
    logprobs = live.post(PATH, prompt="x", logprobs=0, **body).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"b": -1.0, "a": -1.0, "z": -0.5}]
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    (entry,) = live.post(CHAT, **chat, **body).json()["choices"][0]["logprobs"]["content"]
    assert [t["token"] for t in entry["top_logprobs"]] == ["b", "a"]


def test_echo_of_a_chat_is_the_message_that_is_continued(live) -> None:
    live.play([*live.tokenizer.byte_ids(" upon"), 2])
    messages = [{"role": "user", "content": "tell"}, {"role": "assistant", "content": "Once"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    assert live.post(CHAT, **body).json()["choices"][0]["message"]["content"] == "Once upon"
    parts = [e["choices"][0]["delta"].get("content", "") for e in live.events(CHAT, **body)]
    assert parts[:2] == ["", "Once"] and "".join(parts) == "Once upon"
    body = {"messages": messages[:1], "echo": True}  # the last message is another's
    assert live.post(CHAT, **body).json()["choices"][0]["message"]["content"] == " upon"
    messages[1]["content"] = [{"type": "text", "text": "Once"}]
    assert live.post(CHAT, messages=messages, echo=True).json()["choices"][0]["message"]["content"] == "Once upon"


def test_a_prompt_that_was_not_scored_in_time_has_nulls(live) -> None:
    """It ended before: the lists are as long as each other all the same."""
    choice = live.post(PATH, prompt="abc", echo=True, logprobs=1, max_tokens=3, timeout=0).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "abort")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("abc") and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == logprobs["top_logprobs"] == [None] * 3
