"""Sampling parameters over HTTP on a real engine with a tiny model. Cases S01, B18, B21, B35, B38, B41, B43, B48."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient

from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.engine.load import load_engine
from server.app import create_app
from server.config import ServerConfig
from tests import tiny_model
from tests.server.conftest import RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello world"}]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model.save(folder)
    # Programs as in tests/test_llm.py: what is compiled there need not be here.
    config = EngineConfig(
        model=str(folder), max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=40, scheduling_policy="priority",
        strict=True,
    )  # fmt: skip
    engine, tokenizer = load_engine(config)
    server = RunningServer(AsyncLLM(InProcessClient(engine, tokenizer), tokenizer))
    yield server
    server.stop()
    engine.scheduler.check_invariants()
    assert engine.num_compilations == 0


@pytest.fixture
def crowded(tmp_path) -> Iterator[RunningServer]:
    """A server whose KV blocks are too few for what runs at once."""
    tiny_model.save(tmp_path)
    config = EngineConfig(model=str(tmp_path), max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=16)
    engine, tokenizer = load_engine(config)
    server = RunningServer(AsyncLLM(InProcessClient(engine, tokenizer), tokenizer))
    yield server
    server.stop()
    engine.scheduler.check_invariants()


def metric(server: RunningServer, name: str) -> float:
    """The sum over its labels."""
    lines = server.http.get("/metrics").text.splitlines()
    found = [float(line.split()[-1]) for line in lines if line.startswith((f"jaxpaged:{name} ", f"jaxpaged:{name}{{"))]
    assert found, name
    return sum(found)


def test_what_is_computed_again_after_preemption_is_no_hit(crowded) -> None:
    """B53."""
    prompts = [str(i) * 20 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        body = {"temperature": 0, "max_tokens": 90, "ignore_eos": True}
        usages = [a["usage"] for a in pool.map(lambda prompt: ask(crowded, prompt=prompt, **body), prompts)]
    assert metric(crowded, "num_preemptions_total") > 0
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0] * 8
    assert metric(crowded, "prefix_cache_hits_total") == 0
    assert metric(crowded, "prefix_cache_queries_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert metric(crowded, "prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)


def ask(real: RunningServer, **body) -> dict:
    response = real.post(CHAT if "messages" in body else COMPLETIONS, **body)
    assert response.status_code == 200, response.text
    return response.json()


def text(real: RunningServer, **body) -> str:
    return ask(real, **body)["choices"][0]["text"]


def cached(real: RunningServer, prompt: str, **body) -> int:
    return ask(real, prompt=prompt, **GREEDY, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_prefixes_are_shared_only_with_the_same_salt(real) -> None:
    """S01."""
    secret = "our secret: the merger is on friday and nobody knows"
    assert cached(real, secret, cache_salt="ours") == 0
    assert cached(real, secret, cache_salt="ours") > 0
    assert cached(real, secret, cache_salt="theirs") == 0
    assert cached(real, secret) == 0
    assert cached(real, secret) > 0
    messages = [{"role": "user", "content": secret}]
    for salt, hit in (("ours", False), ("ours", True), ("theirs", False), (None, False)):
        usage = ask(real, messages=messages, **GREEDY, cache_salt=salt)["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == hit


def test_tenants_share_no_cached_prefix(real) -> None:
    """S01: each key has its own, even if one sends the other's salt."""
    app = create_app(real.llm, ServerConfig(served_model_name=("tiny",), api_key=("ours", "theirs")))
    client = TestClient(app)  # its lifespan, at the end of which the engine is shut down, is not entered
    prompt = "what one tenant asked: the merger is on friday and nobody knows"

    def hit(key: str, salt: str | None) -> bool:
        body = {"prompt": prompt, **GREEDY, "cache_salt": salt}
        response = client.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"})
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    for salt in (None, "copied"):
        assert [hit("ours", salt), hit("ours", salt), hit("theirs", salt), hit("theirs", salt)] == [False, True] * 2
    assert cached(real, prompt) == 0


def test_samples_differ_and_are_the_same_streamed(real) -> None:
    """B35."""
    body = {"prompt": "Hello", "n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    whole = ask(real, **body, priority=2)
    texts = {c["index"]: c["text"] for c in whole["choices"]}
    assert sorted(texts) == [0, 1, 2] and len(set(texts.values())) == 3
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (5, 36)
    streamed, reasons = defaultdict(str), defaultdict(list)
    *chunks, last = real.events(COMPLETIONS, **body, stream_options={"include_usage": True})
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        streamed[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert dict(streamed) == texts
    assert dict(reasons) == {i: ["length"] for i in range(3)}
    assert last["usage"]["completion_tokens"] == 36
    chat = real.openai.chat.completions.create(model="tiny", messages=HELLO, n=2, seed=7, max_tokens=6)
    assert [c.index for c in chat.choices] == [0, 1]


def test_the_best_is_among_the_samples(real) -> None:
    body = {"prompt": "Hello", "temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    all_four = ask(real, **body, n=4)["choices"]
    best = max(all_four, key=lambda c: sum(c["logprobs"]["token_logprobs"]))
    (chosen,) = ask(real, **body, best_of=4)["choices"]
    assert (chosen["text"], chosen["index"]) == (best["text"], 0)


def test_beam_search(real) -> None:
    body = {"prompt": "Hello", "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    choices = ask(real, **body, use_beam_search=True, n=2, beam_width=4)["choices"]
    first, second = (sum(c["logprobs"]["token_logprobs"]) for c in choices)
    assert choices[0]["text"] != choices[1]["text"] and first >= second
    greedy = ask(real, **body, temperature=0)["choices"][0]
    assert first >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-4
    streamed = defaultdict(str)
    for event in real.events(COMPLETIONS, **body, use_beam_search=True, n=2, beam_width=4):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert [streamed[0], streamed[1]] == [c["text"] for c in choices]


def test_a_prompt_is_scored_the_same_in_every_way(real) -> None:
    """B18, B38, B41 (a), B43: alone, before an answer, again with a cached prefix, and however the answer is drawn."""
    prompt = "The quick brown fox jumps over the lazy dog."
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    alone = ask(real, **body, max_tokens=0)
    (choice,) = alone["choices"]
    assert (choice["text"], choice["finish_reason"], alone["usage"]["completion_tokens"]) == (prompt, "length", 0)
    scores, n = choice["logprobs"]["token_logprobs"], len(prompt)
    assert len(scores) == n and scores[0] is None and all(s < 0 for s in scores[1:])
    for options in ({"temperature": 0}, {"temperature": 1, "top_k": 1}, {"temperature": 2, "logit_bias": {"9": 50}}):
        (choice,) = ask(real, **body, **options, max_tokens=2)["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][:n] == pytest.approx(scores, abs=1e-4)
        assert len(logprobs["tokens"]) == n + 2 and choice["text"].startswith(prompt)
        assert logprobs["text_offset"][: n + 1] == list(range(n + 1))
    (choice,) = ask(real, prompt=prompt, prompt_logprobs=1, max_tokens=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry.values()))["logprob"] for entry in rest] == pytest.approx(scores[1:], abs=1e-4)


def test_what_may_be_produced(real) -> None:
    byte_id = real.llm.tokenizer.encode("z")[0]
    assert text(real, prompt="a", **GREEDY, logit_bias={str(byte_id): 100}) == "z" * 8
    assert text(real, prompt="a", **GREEDY, allowed_token_ids=[byte_id]) == "z" * 8
    plain = text(real, prompt="a", **GREEDY)
    assert text(real, prompt="a", **GREEDY, presence_penalty=0.0, repetition_penalty=1.0, logit_bias={}) == plain
    letters = [real.llm.tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    words = text(real, prompt="a", **GREEDY, allowed_token_ids=letters)
    assert set(words) <= set("abcdefgh")
    others = text(real, prompt="a", **GREEDY, allowed_token_ids=letters, bad_words=[words[0], words[1:3]])
    assert words[0] not in others and words[1:3] not in others and len(others) == 8
    penalized = ask(real, prompt="a", **GREEDY, frequency_penalty=2, presence_penalty=2, repetition_penalty=1000)
    assert len(set(penalized["choices"][0]["text"])) >= len(set(plain))


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "(ab|cd)e"}}, {"abe", "cde"}),
        ({"guided_grammar": 'root ::= "x" ("1" | "2")'}, {"x1", "x2"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["u", "v"]}}}},
            {'"u"', '"v"'},
        ),
    ],
)
def test_the_form_of_the_text(real, fields, texts) -> None:
    for seed in range(3):
        (choice,) = ask(real, prompt="a", max_tokens=20, seed=seed, **fields)["choices"]
        assert choice["text"] in texts and choice["finish_reason"] == "stop"
    streamed = [e["choices"][0] for e in real.events(CHAT, messages=HELLO, seed=0, **fields)]
    assert "".join(c["delta"].get("content", "") for c in streamed) in texts


def test_json_of_a_schema_by_the_openai_client(real) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    answer = real.openai.chat.completions.create(
        model="tiny",
        messages=HELLO,
        seed=1,
        logit_bias={str(real.llm.tokenizer.encode(space)[0]): -100 for space in (" ", "\n", "\t", "\r")},
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_of_what_a_grammar_forbids_are_json(real) -> None:
    """B41 (b)."""
    body = {"guided_regex": "[xy]{2}", "max_tokens": 2, "logprobs_mode": "processed_logprobs"}
    (choice,) = ask(real, messages=HELLO, **body, logprobs=True, top_logprobs=5)["choices"]
    for entry in choice["logprobs"]["content"][:2]:
        assert sorted(t["logprob"] for t in entry["top_logprobs"])[:3] == [-9999.0] * 3
    (choice,) = ask(real, prompt="a", **body, logprobs=5)["choices"]
    assert all(min(top.values()) == -9999.0 for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"191222": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"allowed_token_ids": [191222]}, "allowed_token_ids"),
        ({"stop_token_ids": [191222]}, "stop_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logits_processors": {"none": {}}}, "logits_processors"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": {"type": "stsring"}}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "stsring"}}}},
            "response_format",
        ),
        ({"use_beam_search": True, "beam_width": 65}, "beam_width"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_only_the_engine_can_refuse_is_named_as_sent(real, fields, param) -> None:
    """B21, B48."""
    for stream in (False, True):
        for prompt in ({"prompt": "a"}, {"messages": HELLO}):
            response = real.post(CHAT if "messages" in prompt else COMPLETIONS, **prompt, **fields, stream=stream)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
    assert text(real, prompt="a", **GREEDY)


def test_time_that_is_over(real) -> None:
    (choice,) = ask(real, prompt="a", max_tokens=100, ignore_eos=True, timeout=0)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
