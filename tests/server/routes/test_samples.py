"""Several choices to a prompt, in both endpoints. Cases B35 and B44; and a queue that is full."""

from __future__ import annotations

from collections import defaultdict

import openai
import pytest

from jaxpaged.device.logits_processor import LogitsProcessor
from tests.server.conftest import LiveServer
from tests.waiting import wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TEXTS = ["one", "two 🔥", "three and more"]


@pytest.fixture
def samples(live) -> LiveServer:
    """Sample i says TEXTS[i]: their lengths differ, and so do the steps in which they end."""
    ids = [[*live.tokenizer.byte_ids(text), 2] for text in TEXTS]
    live.play(lambda sample: ids[sample.index])
    return live


def num_tokens(texts) -> int:
    return sum(len(text.encode()) + 1 for text in texts)


def test_choices_of_a_completion(samples) -> None:
    answer = samples.openai.completions.create(model="tiny", prompt="hello", n=3, max_tokens=50)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (i, text, "stop") for i, text in enumerate(TEXTS)
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, num_tokens(TEXTS))


def test_choices_of_several_prompts_are_numbered_through(samples) -> None:
    prompts = ["a", "bb"]
    answer = samples.post(COMPLETIONS, prompt=prompts, n=3, max_tokens=50).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(TEXTS * 2))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 2 * num_tokens(TEXTS))
    texts = defaultdict(str)
    for event in samples.events(COMPLETIONS, prompt=prompts, n=3, max_tokens=50):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert dict(texts) == dict(enumerate(TEXTS * 2))


@pytest.mark.parametrize("merging", [False, True])
def test_a_streamed_completion(samples, merging) -> None:
    """B35: each index once, with one finish reason. B44: one usage chunk."""
    samples.play(samples.engine.script, delay=0.0 if merging else 0.005)
    texts, reasons = defaultdict(str), defaultdict(list)
    *chunks, last = samples.events(
        COMPLETIONS, prompt="hello", n=3, max_tokens=50, stream_options={"include_usage": True}
    )
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert chunk["usage"] is None and not reasons[choice["index"]], "a chunk after the last"
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert dict(texts) == dict(enumerate(TEXTS)) and dict(reasons) == {i: ["stop"] for i in range(3)}
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (5, num_tokens(TEXTS))


def test_choices_of_a_chat(samples) -> None:
    answer = samples.openai.chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (i, text, "stop") for i, text in enumerate(TEXTS)
    ]
    single = samples.openai.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens
    assert answer.usage.completion_tokens == num_tokens(TEXTS)


@pytest.mark.parametrize("merging", [False, True])
def test_a_streamed_chat(samples, merging) -> None:
    """Each choice has a role first, then text, then one finish reason."""
    samples.play(samples.engine.script, delay=0.0 if merging else 0.005)
    parts = defaultdict(list)
    for event in samples.events(CHAT, messages=HELLO, n=3):
        (choice,) = event["choices"]
        parts[choice["index"]].append(choice)
    assert sorted(parts) == [0, 1, 2]
    for index, (first, *middle, last) in parts.items():
        assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(c["delta"]["content"] for c in middle) == TEXTS[index]
        assert all("role" not in c["delta"] and c["finish_reason"] is None for c in middle)
        assert (last["delta"], last["finish_reason"]) == ({}, "stop")


def test_the_openai_client_gathers_streamed_choices(samples) -> None:
    with samples.openai.chat.completions.stream(model="tiny", messages=HELLO, n=3) as stream:
        choices = stream.get_final_completion().choices
    assert [c.message.content for c in choices] == TEXTS


def test_totals_on_every_chunk(samples) -> None:
    samples.play(samples.engine.script, delay=0.005)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = samples.events(COMPLETIONS, prompt="hello", n=3, max_tokens=50, stream_options=options)
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[-1] == num_tokens(TEXTS)
    assert {e["usage"]["prompt_tokens"] for e in events} == {5}


def test_a_sample_that_a_stop_string_ends_leaves_the_others(samples) -> None:
    for choices in (
        samples.post(COMPLETIONS, prompt="x", n=3, max_tokens=50, stop=" 🔥").json()["choices"],
        samples.post(CHAT, messages=HELLO, n=3, stop=" 🔥").json()["choices"],
    ):
        texts = [c["text"] if "text" in c else c["message"]["content"] for c in choices]
        assert texts == ["one", "two", "three and more"]
        assert [c["stop_reason"] for c in choices] == [None, " 🔥", None]


def test_best_of_returns_the_best(samples) -> None:
    """All are as likely a token here: the first ones. It cannot be streamed."""
    answer = samples.openai.completions.create(model="tiny", prompt="hello", n=1, best_of=3, max_tokens=50)
    assert [(c.index, c.text, c.logprobs) for c in answer.choices] == [(0, "one", None)]
    assert answer.usage.completion_tokens == num_tokens(["one"])
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        response = samples.post(path, **prompt, best_of=2, stream=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


def test_sequences_of_a_beam_search_are_choices(samples) -> None:
    body = {"n": 2, "beam_width": 3, "use_beam_search": True, "max_tokens": 50}
    answer = samples.post(COMPLETIONS, prompt="hello", **body).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "one"), (1, "two 🔥")]
    answer = samples.post(CHAT, messages=HELLO, **body).json()
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "one"), (1, "two 🔥")]
    events = samples.events(COMPLETIONS, prompt="hello", **body)  # whole ones: they are known at the end
    assert [(e["choices"][0]["index"], e["choices"][0]["text"]) for e in events] == [(0, "one"), (1, "two 🔥")]


def test_token_ids_are_returned(samples) -> None:
    ids, prompt = samples.tokenizer.byte_ids, samples.tokenizer.byte_ids("hello")
    wanted = {i: [*ids(text), 2] for i, text in enumerate(TEXTS)}
    body = {"n": 3, "return_token_ids": True, "max_tokens": 50}
    choices = samples.post(COMPLETIONS, prompt="hello", **body).json()["choices"]
    assert {c["index"]: c["token_ids"] for c in choices} == wanted
    assert all(c["prompt_token_ids"] == prompt for c in choices)
    streamed, prompts = defaultdict(list), []
    for event in samples.events(COMPLETIONS, prompt="hello", **body):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["token_ids"]
        prompts += [event["choices"][0]["prompt_token_ids"]] if "prompt_token_ids" in event["choices"][0] else []
    assert (dict(streamed), prompts) == (wanted, [prompt] * 3)

    answer = samples.post(CHAT, messages=HELLO, **body).json()
    assert {c["index"]: c["token_ids"] for c in answer["choices"]} == wanted
    streamed, prompts = defaultdict(list), []
    for event in samples.events(CHAT, messages=HELLO, **body):
        streamed[event["choices"][0]["index"]] += event["choices"][0].get("token_ids", [])
        prompts += [event["prompt_token_ids"]] if "prompt_token_ids" in event else []
    assert (dict(streamed), prompts) == (wanted, [answer["prompt_token_ids"]])
    assert "token_ids" not in samples.post(COMPLETIONS, prompt="x").json()["choices"][0]


def test_a_request_out_of_time_is_aborted(live) -> None:
    live.play([5], delay=0.01)
    choice = live.post(COMPLETIONS, prompt="x", max_tokens=400, timeout=0.1).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
    *_, last = live.events(CHAT, messages=HELLO, max_tokens=400, timeout=0.1)
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("abort", "timeout")


def test_a_full_queue_is_no_fault_of_the_client(start) -> None:
    """503 and when to come back, streamed or not; part of a batch leaves nothing behind."""
    server = start()
    server.play([5], delay=0.01, queue_limit=2)
    for stream in (False, True):
        for path, prompt in ((COMPLETIONS, {"prompt": ["x"] * 3}), (COMPLETIONS, {"prompt": ["x"] * 9})):
            response = server.post(path, **prompt, max_tokens=400, stream=stream)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            error = response.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("server_error", "queue_full", None)
            server.settle()
    server.play([5], delay=0.01, queue_limit=0)
    with pytest.raises(openai.InternalServerError) as error:
        server.openai.chat.completions.create(model="tiny", messages=HELLO)
    assert error.value.status_code == 503
    server.play([5, 2], queue_limit=None)
    assert server.post(CHAT, messages=HELLO).status_code == 200


def test_priority_and_salt_reach_the_engine(start) -> None:
    server = start(engine_options={"scheduling_policy": "priority"})
    assert server.post(COMPLETIONS, prompt="x", priority=-3, cache_salt="mine").status_code == 200
    assert server.post(CHAT, messages=HELLO, priority=4, cache_salt="theirs").status_code == 200
    assert server.post(CHAT, messages=HELLO).status_code == 200
    assert [(r.priority, r.cache_salt) for r in server.engine.requests] == [(-3, "mine"), (4, "theirs"), (0, None)]
    assert server.post(COMPLETIONS, prompt="x", cache_salt="").json()["error"]["param"] == "cache_salt"


def test_a_priority_that_nothing_heeds_is_refused(live) -> None:
    response = live.post(COMPLETIONS, prompt="x", priority=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
    assert live.post(COMPLETIONS, prompt="x", priority=0).status_code == 200


def test_a_client_that_leaves_ends_all_samples(samples) -> None:
    from tests.server.test_stream import open_request

    samples.play([5], delay=0.005)
    for stream in (False, True):
        client = open_request(samples, prompt="x", n=4, max_tokens=400, stream=stream)
        wait_for(lambda: len(samples.engine.live) == 4)
        client.close()
        samples.settle()


def test_a_sample_that_breaks_its_grammar_ends_alone(samples) -> None:
    """The engine never lets that happen; if it does, it is said, and the others go on."""
    body = {"n": 3, "max_tokens": 50, "guided_regex": "one|three and more"}
    choices = samples.post(COMPLETIONS, prompt="x", **body).json()["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [
        ("one", "stop"), ("t", "error"), ("three and more", "stop"),
    ]  # fmt: skip
    assert choices[1]["stop_reason"]
    reasons = {}
    for event in samples.events(CHAT, messages=HELLO, **body):
        for choice in event["choices"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert reasons == {0: "stop", 1: "error", 2: "stop"}


def test_processors_that_the_server_has_can_be_asked_for(start) -> None:
    halve = LogitsProcessor("halve", lambda logits, context: logits / 2, {"times": 1.0})
    server = start(engine_options={"logits_processors": (halve,)})
    asked = {"halve": {"times": 2}}
    assert server.post(COMPLETIONS, prompt="x", logits_processors=asked).status_code == 200
    assert server.engine.requests[0].params.logits_processors == asked
    for wrong in (["halve"], {"halve": 2}, "halve"):
        response = server.post(COMPLETIONS, prompt="x", logits_processors=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logits_processors")
