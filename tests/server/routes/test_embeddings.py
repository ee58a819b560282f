"""POST /v1/embeddings over a scripted engine: the wire format, and what is refused."""

from __future__ import annotations

import base64
import threading

import httpx
import numpy as np
import pytest

from server.protocol.embeddings import MAX_INPUTS
from tests.fake_engine import HIDDEN_SIZE, hidden_state
from tests.server.conftest import EOS, MODEL, LiveServer
from tests.waiting import wait_for

PATH = "/v1/embeddings"
TEXTS = ["a", "Hello there, how are you?", "x" * 40]


def expected(token_ids: list[int], dimensions: int | None = None, normalize: bool = True) -> np.ndarray:
    vector = hidden_state(token_ids)[:dimensions]
    return (vector / np.linalg.norm(vector) if normalize else vector).astype(np.float32)


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]], np.float32)


def test_one_vector_for_each_in_order(live: LiveServer):
    answer = live.post(PATH, input=TEXTS, model=MODEL)
    body = answer.json()
    ids = [live.tokenizer.encode(text) for text in TEXTS]
    assert {"id", "object", "created", "model", "data", "usage"} == body.keys()
    assert (body["object"], body["model"]) == ("list", MODEL) and body["id"].startswith("embd-")
    assert [(entry["object"], entry["index"]) for entry in body["data"]] == [("embedding", i) for i in range(3)]
    assert body["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    got = vectors(answer)
    assert got.shape == (3, HIDDEN_SIZE)
    np.testing.assert_array_equal(got, [expected(i) for i in ids])


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_the_four_forms_of_input(live: LiveServer, form):
    ids = live.tokenizer.encode(TEXTS[1])
    given = {"text": TEXTS[1], "texts": [TEXTS[1]], "ids": ids, "lists of ids": [ids]}[form]
    np.testing.assert_array_equal(vectors(live.post(PATH, input=given)), [expected(ids)])


def test_base64_is_the_same_numbers(live: LiveServer):
    """B52: little-endian float32, equal to the float form."""
    floats = vectors(live.post(PATH, input=TEXTS))
    coded = live.post(PATH, input=TEXTS, encoding_format="base64").json()["data"]
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in coded]
    np.testing.assert_array_equal(floats, decoded)


@pytest.mark.parametrize("dimensions", [1, 5, HIDDEN_SIZE])
@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize("word", ["normalize", "use_activation"])
def test_cut_then_scaled(live: LiveServer, dimensions, normalize, word):
    got = vectors(live.post(PATH, input=[5, 6, 7], dimensions=dimensions, **{word: normalize}))
    np.testing.assert_array_equal(got, [expected([5, 6, 7], dimensions, normalize is not False)])


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_the_openai_client(live: LiveServer, options):
    """It asks for base64 unless told otherwise, and decodes it."""
    answer = live.openai.embeddings.create(model=MODEL, input=TEXTS, dimensions=4, user="u", **options)
    got = [entry.embedding for entry in answer.data]
    if options.get("encoding_format") == "base64":
        got = [np.frombuffer(base64.b64decode(text), "<f4") for text in got]
    np.testing.assert_array_equal(
        np.array(got, np.float32), [expected(live.tokenizer.encode(text), 4) for text in TEXTS]
    )
    assert [entry.index for entry in answer.data] == [0, 1, 2]


def test_what_vllm_adds(live: LiveServer):
    ids = live.tokenizer.encode(TEXTS[1], add_special_tokens=False)
    options = {"add_special_tokens": False, "truncate_prompt_tokens": 3, "cache_salt": "s", "priority": 0}
    options |= {"request_id": "mine", "embed_dtype": "float32", "endianness": "little", "pooling": "mean"}
    answer = live.post(PATH, input=TEXTS[1], **options)
    np.testing.assert_array_equal(vectors(answer), [expected(ids[:3])])
    assert answer.json()["id"] == "embd-mine" and answer.json()["usage"]["total_tokens"] == 3
    request = live.engine.requests[-1]
    assert (request.cache_salt, request.pooling.pooling) == ("s", "mean")


def test_the_models_own_pooling(live: LiveServer):
    for kind in ("last", "mean"):
        live.engine.pooling = kind
        assert live.post(PATH, input="a").status_code == 200
        assert live.engine.requests[-1].pooling.pooling == kind
    live.engine.pooling = "cls_token"
    error = live.post(PATH, input="a").json()["error"]
    assert error["code"] == "unsupported" and "cls_token" in error["message"] and "'mean'" in error["message"]
    assert live.post(PATH, input="a", pooling="last").status_code == 200
    live.engine.pooling = "last"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "empty"),
        ({"input": None}, "input", "empty"),
        ({"input": 5}, "input", "int 5"),
        ({"input": {"a": 1}}, "input", "dict"),
        ({"input": [[]]}, "input", "input[0] is empty"),
        ({"input": ["a", 5]}, "input", "input[0]='a'"),
        ({"input": ["a", [5]]}, "input", "'a'"),
        ({"input": [5, True]}, "input", "True"),
        ({"input": [5, 10**9]}, "input", "1000000000"),
        ({"input": [[5], [5, -1]]}, "input", "input[1]: the prompt holds -1"),
        ({"input": ["a", "word " * 600]}, "input", "input[1]"),
        ({"input": [[5], [5] * 513]}, "input", "input[1]: the prompt has 513 tokens, but the context holds 512"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"at most {MAX_INPUTS}"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions=0"),
        ({"input": "a", "dimensions": -3}, "dimensions", "dimensions=-3"),
        ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions", f"dimensions={HIDDEN_SIZE + 1} is more than"),
        ({"input": "a", "dimensions": "4"}, "dimensions", "'4'"),
        ({"input": "a", "dimensions": True}, "dimensions", "True"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "pooling": "cls"}, "pooling", "cls"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
        ({"input": "a", "priority": 1}, "priority", "priority=1"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "at least 1"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "not supported"),
        ({"input": "a", "padding": "max_length"}, "padding", "not supported"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side", "not supported"),
        ({"input": "a", "temperature": 0}, "temperature", "unknown field"),
        ({"input": "a", "model": "other"}, "model", "other"),
    ],
)
def test_what_is_refused(live: LiveServer, fields, param, says):
    """Before any input has started."""
    before = len(live.engine.added)
    answer = live.post(PATH, **fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert error["param"] == param and says in error["message"], error
    assert len(live.engine.added) == before


@pytest.mark.parametrize(("keep", "length"), [(1, 1), (4, 4), (-1, 512), (600, 513)])
def test_cut_to_the_first_tokens_and_what_ends_them(live: LiveServer, keep, length):
    """Models that pool the last token are trained with a control token there."""
    ids = [5 + i % 50 for i in range(512)]
    got = live.post(PATH, input=[[*ids, EOS], [*ids, 9]], truncate_prompt_tokens=keep)
    if length > 512:
        assert got.json()["error"]["message"].startswith("input[0]: the prompt has 513 tokens")
        return
    np.testing.assert_array_equal(vectors(got), [expected([*ids[: length - 1], EOS]), expected(ids[:length])])


def test_the_whole_context_is_there_for_the_prompt(live: LiveServer):
    assert live.post(PATH, input=[5] * 512).status_code == 200
    cut = live.post(PATH, input=[5, 6] * 600, truncate_prompt_tokens=-1)
    assert cut.json()["usage"]["prompt_tokens"] == 512
    assert live.post("/v1/completions", prompt=[5] * 512, max_tokens=1).status_code == 400


def test_a_client_that_leaves_takes_all_its_inputs_with_it(start):
    server = start()
    started, release, step = threading.Event(), threading.Event(), server.engine.step

    def slow_step():
        started.set()
        assert release.wait(120)
        return step()

    server.engine.step = slow_step
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + PATH, json={"input": TEXTS}, timeout=httpx.Timeout(60, read=1), trust_env=False)
    assert started.is_set()
    wait_for(lambda: server.llm.num_unfinished == 0)
    release.set()
    server.settle()


def test_what_the_engine_cannot_embed(live: LiveServer):
    """Its hidden states are not finite: a fault of the model's, of which no details but this one are told."""
    from jaxpaged.core.step import RequestUpdate

    advance = live.engine._advance

    def fail(sample):
        update = RequestUpdate(sample.request_id, [], index=sample.index)
        return live.engine._end(sample, update, "error", "the model's logits are NaN or infinite")

    live.engine._advance = fail
    answer = live.post(PATH, input="a")
    live.engine._advance = advance
    assert answer.status_code == 500 and "NaN" in answer.json()["error"]["message"]


def test_many_at_once(live: LiveServer):
    many = [[5 + i % 7, 5 + i % 11] for i in range(300)]
    np.testing.assert_array_equal(vectors(live.post(PATH, input=many)), [expected(ids) for ids in many])
