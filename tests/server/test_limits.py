"""One small request cannot become a million of anything. Case S13."""

from __future__ import annotations

import json
import time

import pydantic_core
import pytest

from jaxpaged.core import sampling_params
from jaxpaged.errors import ConfigError
from server.config import ServerConfig
from server.convert import MAX_SEQUENCES
from server.protocol import completions, embeddings
from tests.memory import takes_at_most

pytestmark = pytest.mark.usefixtures("frozen_heap")  # times are taken

MILLION = 10**6
X = {"prompt": "x"}
HELLO = {"messages": [{"role": "user", "content": "x"}]}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

CASES = [
    (COMPLETIONS, "n", {**X, "n": MILLION}),
    (COMPLETIONS, "best_of", {**X, "best_of": 10**9}),
    (COMPLETIONS, "beam_width", {**X, "use_beam_search": True, "beam_width": MILLION}),
    (COMPLETIONS, "n", {"prompt": ["x"] * 1024, "n": 9}),
    (COMPLETIONS, "logprobs", {**X, "logprobs": MILLION}),
    (COMPLETIONS, "logprobs", {**X, "logprobs": -1}),
    (COMPLETIONS, "logprobs", {**X, "logprobs": 21, "echo": True}),
    (COMPLETIONS, "prompt_logprobs", {**X, "prompt_logprobs": -1}),
    (COMPLETIONS, "prompt_logprobs", {**X, "prompt_logprobs": MILLION, "echo": True, "logprobs": 1}),
    (CHAT, "top_logprobs", {**HELLO, "logprobs": True, "top_logprobs": MILLION}),
    (CHAT, "top_logprobs", {**HELLO, "logprobs": True, "top_logprobs": -1}),
    (COMPLETIONS, "logit_bias", {**X, "logit_bias": {str(i): 1 for i in range(250_000)}}),
    (COMPLETIONS, "logit_bias", {**X, "logit_bias": {str(i): 1 for i in range(1025)}}),
    (COMPLETIONS, "stop", {**X, "stop": ["a"] * 10**5}),
    (COMPLETIONS, "stop", {**X, "stop": [5] * 10**5}),
    (COMPLETIONS, "stop", {**X, "stop": ["a" * 10_000_000]}),
    (COMPLETIONS, "stop", {**X, "stop": "a" * 10_000_000}),
    (COMPLETIONS, "stop_token_ids", {**X, "stop_token_ids": [5] * MILLION}),
    (COMPLETIONS, "stop_token_ids", {**X, "stop_token_ids": ["5"] * MILLION}),
    (COMPLETIONS, "bad_words", {**X, "bad_words": ["a"] * 10**5}),
    (COMPLETIONS, "bad_words", {**X, "bad_words": ["a" * 10_000_000]}),
    (COMPLETIONS, "allowed_token_ids", {**X, "allowed_token_ids": [5] * MILLION}),
    (COMPLETIONS, "logprob_token_ids", {**X, "logprobs": 0, "logprob_token_ids": [5] * MILLION}),
    (COMPLETIONS, "structured_outputs", {**X, "structured_outputs": {"choice": ["a"] * MILLION}}),
    (COMPLETIONS, "guided_choice", {**X, "guided_choice": ["a"] * MILLION}),
    (COMPLETIONS, "cache_salt", {**X, "cache_salt": "a" * MILLION}),
    (COMPLETIONS, "prompt", {"prompt": ["x"] * MILLION}),
    (COMPLETIONS, "prompt", {"prompt": [5] * MILLION}),
    (COMPLETIONS, "prompt", {"prompt": [[5]] * 200_000}),
    (COMPLETIONS, "prompt", {"prompt": "x" * 10_000_000}),
    (COMPLETIONS, "prompt", {"prompt": {"x": [5] * MILLION}}),
    (CHAT, "messages", {"messages": HELLO["messages"] * 80_000}),
    (CHAT, "messages", {"messages": [5] * MILLION}),
    (CHAT, "tools", {**HELLO, "tools": [{}] * 250_000}),
    (COMPLETIONS, "x0", {**X, **{f"x{i}": 1 for i in range(200_000)}}),
]


@pytest.mark.parametrize(
    ("path", "param", "body"), CASES, ids=[f"{i}-{param}" for i, (_, param, _) in enumerate(CASES)]
)
def test_a_million_of_anything_is_refused_at_once(live, path, param, body) -> None:
    """In two tenths of a second, and 50 MB, beyond what reading the body takes. Seconds are the processor's."""
    started = len(live.engine.added)
    content = json.dumps(body).encode()
    begin = time.process_time()
    pydantic_core.from_json(content)
    reading = time.process_time() - begin
    with takes_at_most(50 + 4 * len(content) / 1e6):  # client and server hold it, and as it arrives
        begin = time.process_time()
        response = live.http.post(path, content=content)
        answering = time.process_time() - begin
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert len(error["message"]) < 500
    assert answering < 1.5 * reading + 0.2, (answering, reading)
    assert len(live.engine.added) == started


def test_as_many_sequences_as_allowed_are_counted_over_all_prompts(live) -> None:
    live.play([2])
    answer = live.post(COMPLETIONS, prompt=["x"] * 4, n=3)
    assert len(answer.json()["choices"]) == 12
    response = live.post(COMPLETIONS, prompt=["x"] * (MAX_SEQUENCES // 128 + 1), best_of=128)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
    for options, param in (({"beam_width": 64}, "beam_width"), ({"n": 64}, "n"), ({"best_of": 64}, "best_of")):
        response = live.post(COMPLETIONS, prompt=["x"] * (MAX_SEQUENCES // 64 + 1), use_beam_search=True, **options)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("piece", ["a", " ", "\n", "ab, ", "é🙂", "<|im_start|>", "0", "("])
def test_the_time_to_tokenize_grows_with_the_text(start, piece) -> None:
    """S17. Four times as much takes less than ten times as long, on a processor that may change its speed meanwhile.

    Of the processor's time; what takes none counts as some.
    """
    server = start(engine_options={"max_model_len": 10**7})

    def seconds(count: int) -> float:
        text, taken = piece * (count // len(piece)), []
        for _ in range(3):
            begin = time.process_time()
            assert server.post("/tokenize", prompt=text).status_code == 200
            taken.append(time.process_time() - begin)
        return min(taken)

    assert seconds(200_000) < 10 * max(seconds(50_000), 0.01)


FEW = {"max_n": 2, "max_stop": 1, "max_stop_token_ids": 1, "max_logit_bias": 2, "max_prompts": 2, "max_inputs": 3}
TOO_MUCH = [
    ("n", {"n": 2}, {"n": 3}),
    ("best_of", {"best_of": 2}, {"best_of": 3}),
    ("beam_width", {"use_beam_search": True, "beam_width": 2}, {"use_beam_search": True, "beam_width": 3}),
    ("stop", {"stop": ["a"]}, {"stop": ["a", "b"]}),
    ("stop_token_ids", {"stop_token_ids": [5]}, {"stop_token_ids": [5, 6]}),
    ("logit_bias", {"logit_bias": {"5": 1, "6": 1}}, {"logit_bias": {"5": 1, "6": 1, "7": 1}}),
]


def test_the_operator_may_allow_less(start) -> None:
    server = start(**FEW)
    server.play([2])
    ask = [(path, param, {**prompt, **good}, {**prompt, **bad})
           for param, good, bad in TOO_MUCH for path, prompt in ((COMPLETIONS, X), (CHAT, HELLO))]  # fmt: skip
    ask.append((COMPLETIONS, "prompt", {"prompt": ["x"] * 2}, {"prompt": ["x"] * 3}))
    ask.append(("/v1/embeddings", "input", {"input": ["x"] * 3}, {"input": ["x"] * 4}))
    for path, param, good, bad in ask:
        assert server.post(path, **good).status_code == 200, (path, good)
        response = server.post(path, **bad)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert "allows" in response.json()["error"]["message"]
    assert server.post(COMPLETIONS, **X, stop="a").status_code == 200


def test_what_is_allowed_at_most_is_what_a_request_can_hold() -> None:
    config = ServerConfig()
    assert config.max_n == sampling_params.MAX_SAMPLES
    assert config.max_stop == sampling_params.MAX_STOP_STRINGS
    assert config.max_stop_token_ids == sampling_params.MAX_STOP_TOKEN_IDS
    assert config.max_logit_bias == sampling_params.MAX_LOGIT_BIAS
    assert (config.max_prompts, config.max_inputs) == (completions.MAX_PROMPTS, embeddings.MAX_INPUTS)
    for name in FEW:
        for value in (-1, getattr(config, name) + 1):
            with pytest.raises(ConfigError, match=f"{name}="):
                ServerConfig(**{name: value})
