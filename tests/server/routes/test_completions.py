"""/v1/completions on a scripted engine. Cases B01, B02, B04, B07, B08, B11, B20, B40, B41, B44, B50."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import tiny_tokenizers

PATH = "/v1/completions"


def test_an_answer_has_the_form_of_openais(live) -> None:
    body = live.post(PATH, model="tiny", prompt="hello").json()
    assert body.pop("id").startswith("cmpl-") and body.pop("created") > 1e9
    assert body.pop("system_fingerprint").startswith("jaxpaged-")
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_prompts_as_text_ids_and_lists_of_both(live) -> None:
    ids = live.tokenizer.byte_ids
    assert live.openai.completions.create(model="tiny", prompt="x").choices[0].text == "x"
    assert live.openai.completions.create(model="alias", prompt=ids("🔥")).choices[0].text == "🔥"
    for prompts in (["one", "two", "three"], [ids("one"), ids("two"), ids("three")]):
        answer = live.openai.completions.create(model="tiny", prompt=prompts)
        assert [(c.index, c.text) for c in answer.choices] == [(0, "one"), (1, "two"), (2, "three")]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 14)


def test_a_batch_streams_each_prompt_under_its_index(live) -> None:
    prompts = ["one", "two 🔥", "three and more"]
    texts, reasons, usages = ["", "", ""], [[], [], []], []
    options = {"include_usage": True}
    for chunk in live.openai.completions.create(model="tiny", prompt=prompts, stream=True, stream_options=options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
        usages += [chunk.usage] if chunk.usage else []
    assert texts == prompts
    assert reasons == [["stop"]] * 3
    assert [u.completion_tokens for u in usages] == [sum(len(p.encode()) for p in prompts) + 3]


@pytest.mark.parametrize("text", ["ď", "🔥", "👩‍👩‍👧", "日本語 text"])
def test_no_chunk_holds_part_of_a_character(live, text) -> None:
    """B01."""
    live.play(live.tokenizer.byte_ids(text))
    n = len(text.encode())
    texts = [e["choices"][0]["text"] for e in live.events(PATH, prompt="x", max_tokens=n)]
    assert "".join(texts) == text
    assert all(t and "\ufffd" not in t for t in texts)


def test_an_unfinished_character_is_the_same_streamed_or_not(live) -> None:
    """B02."""
    live.play(live.tokenizer.byte_ids("🔥"))
    whole = live.post(PATH, prompt="x", max_tokens=2).json()
    events = live.events(PATH, prompt="x", max_tokens=2)
    assert whole["choices"][0]["text"] == "".join(e["choices"][0]["text"] for e in events) == "\ufffd"
    assert whole["choices"][0]["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 2


def test_a_stop_string_leaks_nothing(live) -> None:
    """B07."""
    live.play(live.tokenizer.ids("DEF", "G", "HI", "J"), delay=0.001)
    for options, text in (({}, ""), ({"include_stop_str_in_output": True}, "DEFGHIJ")):
        body = {"prompt": "x", "stop": ["DEFGHIJ"], **options}
        choice = live.post(PATH, **body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "DEFGHIJ")
        events = live.events(PATH, **body)
        assert "".join(e["choices"][0]["text"] for e in events) == text
        assert len(events) == 1
        live.settle()  # the engine was told to stop as well


def test_a_near_miss_is_released(live) -> None:
    """B08."""
    live.play(live.tokenizer.ids("The", "Ġbr", "own", "Ġdog"), delay=0.01)
    events = live.events(PATH, prompt="x", stop="own fox", max_tokens=4)
    assert [e["choices"][0]["text"] for e in events] == ["The", " br", "own dog"]
    events = live.events(PATH, prompt="x", stop="own fox", max_tokens=3)
    assert "".join(e["choices"][0]["text"] for e in events) == "The brown"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_logprobs_come_with_their_text(live) -> None:
    """B11."""
    live.play(live.tokenizer.ids("The", "Ġbr", "own", "Ġdog"), delay=0.01)
    for event in live.events(PATH, prompt="x", stop="own fox", max_tokens=4, logprobs=0):
        choice = event["choices"][0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_usage_counts_up_to_the_token_that_completes_the_stop_string(live) -> None:
    """B10's cut over HTTP, several tokens a step."""
    live.play(live.tokenizer.ids("Ġha"), tokens_per_step=5)
    body = live.post(PATH, prompt="x", stop=[" ha ha ha"], logprobs=2, max_tokens=50).json()
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["logprobs"]["tokens"]) == 3


def test_logprobs_of_partial_bytes_lose_no_entry(live) -> None:
    """B04: in an object keyed by name, tokens that are parts of characters need names of their own."""
    ids = live.tokenizer.byte_ids("🔥")
    live.play(ids, tops=[*ids, live.tokenizer.byte_ids("a")[0]])
    logprobs = live.post(PATH, prompt="x", max_tokens=4, logprobs=5).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x94", "bytes:\\xa5"]
    for top in logprobs["top_logprobs"]:
        assert list(top) == [*logprobs["tokens"], "a"]
    as_ids = live.post(PATH, prompt="x", max_tokens=4, logprobs=5, return_tokens_as_token_ids=True).json()
    logprobs = as_ids["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in ids]
    assert all(len(top) == 5 and all(name.startswith("token_id:") for name in top) for top in logprobs["top_logprobs"])


def test_two_tokens_of_the_same_text_are_both_listed(start) -> None:
    """B04's kind: the byte token <0x41> and the letter A."""
    tokenizer = tiny_tokenizers.sentencepiece()
    server = start(tokenizer)
    byte, letter = tokenizer.ids("<0x41>", "A")
    server.play([byte], tops=[byte, letter])
    top = server.post(PATH, prompt="x", max_tokens=1, logprobs=2).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert top == {"A": -1.0, f"token_id:{letter}": -2.0}


def test_logprobs_zero_gives_the_chosen_token_only(live) -> None:
    """B40."""
    live.play(live.tokenizer.ids("The", "own"), tops=[9, 8])
    choice = live.openai.completions.create(model="tiny", prompt="x", max_tokens=2, logprobs=0).choices[0]
    assert choice.logprobs.tokens == ["The", "own"]
    assert choice.logprobs.token_logprobs == [-0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 3]
    assert choice.logprobs.top_logprobs is None
    assert live.post(PATH, prompt="x", max_tokens=2, logprobs=None).json()["choices"][0]["logprobs"] is None


def test_the_chosen_token_is_listed_beside_the_top_ones(live) -> None:
    """B40: even when it is not among them."""
    a, b, c = live.tokenizer.byte_ids("abc")
    live.play([c], tops=[a, b])
    logprobs = live.post(PATH, prompt="x", max_tokens=1, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -1.0, "b": -2.0, "c": -0.5}]


def test_minus_infinity_is_json(live) -> None:
    """B41."""
    live.play([5], sampled_logprob=-math.inf)
    for event in live.events(PATH, prompt="x", max_tokens=1, logprobs=0):  # refuses -Infinity
        assert event["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_text_offsets_stay_within_a_text_that_was_cut(live) -> None:
    live.play(live.tokenizer.ids("The", "DEF", "G", "HI"), delay=0.001)
    choice = live.post(PATH, prompt="x", stop="DEFGHI", logprobs=0).json()["choices"][0]
    assert choice["text"] == "The"
    assert choice["logprobs"]["text_offset"] == [0, 3, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ([-1], "-1"),
        ([10**6], "1000000"),
        ([2**31], "2147483648"),
        ([5279552648203111001], "5279552648203111001"),
        ([10**30], "1000000000000000000000000000000"),
        ([1.5], "1.5"),
        ([True], "True"),
        ([], "empty"),
        ([[]], "empty"),
        ([[5], [-1]], "-1"),
        ([[5], "x"], "'x'"),
        (["x", 5], "'x'"),
        (5, "int"),
        ({}, "dict"),
        (None, "prompt"),
    ],
)
def test_wrong_prompts_are_refused_by_value(live, prompt, names) -> None:
    """B20. None of a batch is started."""
    started = len(live.engine.added)
    for stream in (False, True):
        response = live.post(PATH, prompt=prompt, stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "prompt")
        assert names in error["message"]
    assert len(live.engine.added) == started
    assert live.post(PATH, prompt=[[5, 6], [7]]).status_code == 200


def test_an_empty_text_is_refused_where_no_bos_is_added(live) -> None:
    assert live.post(PATH, prompt="").json()["error"]["param"] == "prompt"


def test_a_prompt_that_does_not_fit_is_refused(live) -> None:
    response = live.post(PATH, prompt="x" * 512)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_request_that_only_the_scheduler_refuses_gets_a_status_too(start) -> None:
    """It is known only after the stream has begun in the engine: the response must not have."""
    server = start(engine_options={"num_blocks": 2})
    for stream in (False, True):
        response = server.post(PATH, prompt="x" * 100, stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert server.post(PATH, prompt="x").status_code == 200


@pytest.mark.parametrize(
    ("options", "last", "on_chunks"),
    [
        (None, None, "absent"),
        ({}, None, "absent"),
        ({"include_usage": False}, None, "absent"),
        ({"include_usage": True}, 6, None),
        ({"include_usage": True, "continuous_usage_stats": True}, 6, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_usage_in_streams(live, options, last, on_chunks) -> None:
    """B44."""
    live.play([5], delay=0.01)
    body = {} if options is None else {"stream_options": options}
    events = live.events(PATH, prompt="x", max_tokens=6, **body)
    if last is None:
        assert all("usage" not in e for e in events)
        return
    *chunks, final = events
    assert final["choices"] == [] and final["usage"]["completion_tokens"] == last
    if on_chunks is None:
        assert all(c["usage"] is None for c in chunks)
    else:
        assert [c["usage"]["completion_tokens"] for c in chunks] == on_chunks


def test_stream_options_need_a_stream(live) -> None:
    """B45."""
    for stream in ({}, {"stream": False}, {"stream": None}):
        response = live.post(PATH, prompt="x", stream_options={"include_usage": True}, **stream)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


def test_max_tokens_defaults_to_sixteen(live) -> None:
    live.play([5])
    assert live.post(PATH, prompt="x").json()["usage"]["completion_tokens"] == 16
    assert live.post(PATH, prompt="x", max_tokens=None).json()["usage"]["completion_tokens"] == 16
    response = live.post(PATH, prompt="x", max_tokens=0)  # B18: 400 without echo
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


def test_parameters_reach_the_engine(live) -> None:
    seen = []

    def script(request) -> list[int]:
        seen.append(request.params)
        return [5]

    live.play(script)
    wanted = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "seed": 7, "stop": ["zzz"], "min_tokens": 2,
        "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
        "max_tokens": 4, "logprobs": 1,
    }  # fmt: skip
    assert live.post(PATH, prompt="x", **wanted).status_code == 200
    assert {name: getattr(seen[0], name) for name in wanted} == wanted


def test_the_same_request_id_twice_and_again(live) -> None:
    """B50: answers echo the id, and each has its own text."""
    live.play(live.engine.script, delay=0.001)
    prompts = [f"text {i}" for i in range(16)]

    def ask(prompt: str) -> tuple[str, str, str]:
        response = live.http.post(PATH, json={"prompt": prompt, "max_tokens": 99}, headers={"X-Request-Id": "same"})
        return response.json()["choices"][0]["text"], response.headers["x-request-id"], response.json()["id"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == [(p, "same", "cmpl-same") for p in prompts]


def test_many_streams_at_once_keep_their_own_text(live) -> None:
    live.play(live.engine.script, delay=0.001)
    prompts = [f"prompt {i} 🔥 " + "ď" * (i % 5) for i in range(24)]

    def ask(prompt: str) -> str:
        chunks = live.openai.completions.create(model="tiny", prompt=prompt, max_tokens=99, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, prompts)) == prompts
