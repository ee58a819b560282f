"""The offline API, the async engine and the HTTP server over one real engine on a tiny model."""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
import uvicorn

import jaxpaged
from jaxpaged import LLM, LogitsProcessor, SamplingParams, StructuredOutputs
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.errors import ConfigError, InvalidRequestError, ModelError, ModelNotFoundError, RequestTooLargeError
from server.app import create_app
from server.config import ServerConfig
from tests import tiny_model

OPTIONS = {
    "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_kv_blocks": 40, "use_tqdm": False, "strict": True,
    "scheduling_policy": "priority",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hello world"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-llama")
    tiny_model.save(path)
    return path


def only_these(logits, context):
    return jnp.where(jnp.arange(len(logits)) == context.arguments["token"], logits, -jnp.inf)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), logits_processors=[LogitsProcessor("only", only_these, {"token": None})], **OPTIONS)


@pytest.fixture(scope="module")
def server(llm):
    """The HTTP server over the same engine, once the offline tests are done with it."""
    front = AsyncLLM(InProcessClient(llm.engine, llm.tokenizer), llm.tokenizer)
    config = uvicorn.Config(
        create_app(front, ServerConfig(served_model_name=("tiny",))), port=0, log_level="critical", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join(20)
    front.close()


def only(outputs):
    (output,) = outputs
    return output.outputs[0]


# --- offline ---------------------------------------------------------------------------------------------------


def test_text_ids_and_arrays_mixed_come_back_in_order(llm):
    ids = llm.tokenizer.encode("Hello world")
    outputs = llm.generate(["Hello world", ids, np.array(ids), "The quick fox", [7]], GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["Hello world", None, None, "The quick fox", None]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    assert [o.prompt_token_ids for o in outputs][:3] == [ids] * 3
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished and completion.finish_reason == "length" and len(completion.token_ids) == 10
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert output.metrics.first_token_time <= output.metrics.last_token_time


def test_one_prompt_of_each_kind(llm):
    expected = only(llm.generate("Hello", GREEDY, use_tqdm=False)).token_ids
    ids = llm.tokenizer.encode("Hello")
    for prompt in (ids, np.array(ids), jnp.array(ids), ["Hello"], [jnp.array(ids)], jnp.array([ids])):
        assert only(llm.generate(prompt, GREEDY, use_tqdm=False)).token_ids == expected


def test_params_for_each_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 3]
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2])


def test_chat_is_generate_of_the_rendered_template(llm):
    rendered = "<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.tokenizer.encode(rendered, add_special_tokens=False)
    answer = llm.chat(CHAT, GREEDY, use_tqdm=False)[0]
    assert answer.prompt_token_ids == ids
    assert answer.outputs[0].token_ids == only(llm.generate(ids, GREEDY, use_tqdm=False)).token_ids
    assert len(llm.chat([CHAT, CHAT], GREEDY, use_tqdm=False)) == 2


def test_stop_string_cuts_text_and_tokens_together(llm):
    whole = only(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False))
    stop = whole.text[5:7]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop, logprobs=1)
    cut = only(llm.generate("Hello", params, use_tqdm=False))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.logprobs) == len(cut.token_ids)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 99999]], "99999"),
        ([[]], "empty"),
        ([], None),
        ([[1.5]], "1.5"),
        ([[1], None], "None"),
        ([b"abc"], "abc"),
        ([np.zeros((2, 2), int)], r"\(2, 2\)"),
    ],
    ids=str,
)
def test_a_bad_prompt_starts_nothing(llm, prompts, message):
    if message is None:
        assert llm.generate(prompts, use_tqdm=False) == []
        return
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([*prompts, "fine"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work


def test_too_long_a_prompt_names_both_numbers(llm):
    with pytest.raises(RequestTooLargeError, match=r"128.*128"):
        llm.generate([[5] * 128], GREEDY, use_tqdm=False)


def test_options_of_single_prompts(llm):
    for options, text in (
        ({"priority": [1]}, "1 values of priority for 2 prompts"),
        ({"cache_salt": ["a", "b", "c"]}, "3 values of cache_salt for 2"),
        ({"cache_salt": ["a", ""]}, "cache_salt=''"),
        ({"priority": [1, 1.5]}, "priority=1.5"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False, **options)
    assert not llm.engine.has_work
    llm.reset_prefix_cache()
    ids = list(range(3, 40))
    salted = llm.generate([ids, ids], GREEDY, cache_salt=["a", "b"], priority=[2, 1], use_tqdm=False)
    (again,) = llm.chat(CHAT, GREEDY, cache_salt="a", priority=3, use_tqdm=False)
    (hit,) = llm.generate([ids], GREEDY, cache_salt="a", use_tqdm=False)
    (miss,) = llm.generate([ids], GREEDY, use_tqdm=False)
    assert [o.num_cached_tokens for o in (*salted, again, hit, miss)] == [0, 0, 0, 32, 0]


def test_samples_and_the_best_of_them(llm):
    orders = set()
    for seed in range(4):
        params = {"seed": seed, "max_tokens": 8, "ignore_eos": True}
        (four,) = llm.generate("Hello", SamplingParams(n=4, logprobs=0, **params), use_tqdm=False)
        assert [c.index for c in four.outputs] == [0, 1, 2, 3] and len({c.text for c in four.outputs}) == 4
        ranked = sorted(four.outputs, key=lambda c: -c.cumulative_logprob / len(c.token_ids))
        orders.add(tuple(c.index for c in ranked[:2]))
        (two,) = llm.generate("Hello", SamplingParams(n=2, best_of=4, **params), use_tqdm=False)
        assert [c.token_ids for c in two.outputs] == [c.token_ids for c in ranked[:2]]
        assert [c.index for c in two.outputs] == [0, 1] and two.outputs[0].logprobs is None
    assert len(orders) > 1


def test_beams_come_best_first(llm):
    params = SamplingParams(temperature=0, n=2, beam_width=4, use_beam_search=True, max_tokens=8, logprobs=0)
    first, second = llm.generate("Hello", params, use_tqdm=False)[0].outputs
    assert (first.index, second.index) == (0, 1) and first.text != second.text
    assert first.cumulative_logprob >= second.cumulative_logprob and len(first.logprobs) == len(first.token_ids) == 8
    plain = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    assert first.cumulative_logprob >= only(llm.generate("Hello", plain, use_tqdm=False)).cumulative_logprob


def test_prompt_logprobs_of_a_text(llm):
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)
    (output,) = llm.generate("Hello world", params, use_tqdm=False)
    first, *rest = output.prompt_logprobs
    assert first is None and output.outputs[0].text == "" and output.outputs[0].finish_reason == "length"
    assert [p.token_id for p in rest] == output.prompt_token_ids[1:] and all(len(p.top) == 2 for p in rest)
    for position, token_id in zip(rest, output.prompt_token_ids[1:], strict=True):
        assert "Hello world"[position.text_offset :].startswith(llm.tokenizer.decode([token_id]))


def test_bad_words_are_not_said(llm):
    whole = only(llm.generate("Hello", GREEDY, use_tqdm=False))
    word = llm.tokenizer.decode(whole.token_ids[2:4]).strip()
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, bad_words=[word])
    banned = only(llm.generate("Hello", params, use_tqdm=False))
    assert word in whole.text and word not in banned.text


def test_structured_outputs(llm):
    def wanting(**wanted):
        return SamplingParams(temperature=1, seed=2, max_tokens=40, structured_outputs=StructuredOutputs(**wanted))

    params = [wanting(choice=["The quick", "own fox"]), wanting(regex=r"[ab]{3}x?"), GREEDY]
    chosen, matched, free = llm.generate(["Hello"] * 3, params, use_tqdm=False)
    assert chosen.text in ("The quick", "own fox") and chosen.finish_reason == "stop"
    assert re.fullmatch(r"[ab]{3}x?", matched.text) and matched.finish_reason == "stop"
    assert free.token_ids == only(llm.generate("Hello", GREEDY, use_tqdm=False)).token_ids
    with pytest.raises(InvalidRequestError, match="regex"):
        llm.generate(["Hello", "a"], [GREEDY, wanting(regex="(")], use_tqdm=False)
    assert not llm.engine.has_work


def test_a_fault_in_one_output_ends_that_request_alone(llm, monkeypatch):
    """S21."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
    good = only(llm.generate("Hello", params, use_tqdm=False))
    real = llm.tokenizer.token_bytes

    def broken(token_id):
        if token_id == good.token_ids[4]:
            raise KeyError("no such token")
        return real(token_id)

    with monkeypatch.context() as patch:
        patch.setattr(llm.tokenizer, "token_bytes", broken)
        bad, fine = llm.generate(["Hello", "Hello"], [params, SamplingParams(max_tokens=3, seed=1, detokenize=False)])
    assert bad.finish_reason == "error" and "no such token" in str(bad.stop_reason)
    assert len(fine.token_ids) == 3
    assert llm.engine.stats.num_used_blocks == 0
    assert only(llm.generate("Hello", params, use_tqdm=False)) == good


def test_embeddings(llm):
    """B52: of texts, ids and arrays in one call; as alone; the last hidden state unless the model says otherwise."""
    prompts = ["Hello world", [5, 6, 7], jnp.arange(3, 43), "a"]
    vectors = llm.embed(prompts, use_tqdm=False)
    assert vectors.shape == (4, 32) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    for pooling in (None, "last", "mean"):
        together = llm.embed(prompts, pooling, use_tqdm=False)
        alone = [llm.embed(prompt, pooling, use_tqdm=False)[0] for prompt in prompts]
        np.testing.assert_allclose(together, alone, atol=1e-5)
        assert np.allclose(together, vectors, atol=1e-5) == (pooling != "mean")
    raw = llm.embed(prompts, "mean", 16, False, use_tqdm=False)
    cut = llm.embed(prompts, "mean", 16, use_tqdm=False)
    assert raw.shape == (4, 16)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), cut, atol=1e-6)


def test_embeddings_of_nothing(llm):
    assert llm.embed([]).shape == (0, 32) and llm.embed([], dimensions=8).shape == (0, 8)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("a", {"dimensions": 0}, "dimensions=0"),
        ("a", {"dimensions": 33}, "dimensions=33 is more than the 32"),
        ("a", {"pooling": "cls"}, "pooling='cls'"),
        (["a", [99999]], {}, "99999"),
        (["a", [5] * 129], {}, "129 tokens, but the context holds 128"),
    ],
)
def test_what_cannot_be_embedded(llm, prompts, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.embed(prompts, **options)
    assert not llm.engine.has_work


def test_no_embedding_of_broken_weights(llm):
    params = llm.params
    llm.update_params({**params, "final_norm": params["final_norm"] * jnp.nan})
    with pytest.raises(ModelError, match="NaN"):
        llm.embed("a", use_tqdm=False)
    llm.update_params(params)
    assert np.isfinite(llm.embed("a", use_tqdm=False)).all()


def test_other_weights(llm):
    before = only(llm.generate("Hello world", GREEDY, use_tqdm=False))
    params = llm.params
    llm.update_params(jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params))
    assert only(llm.generate("Hello world", GREEDY, use_tqdm=False)).token_ids != before.token_ids
    llm.update_params(params)
    assert only(llm.generate("Hello world", GREEDY, use_tqdm=False)) == before


def test_an_interrupted_call_leaves_nothing_behind(llm, monkeypatch):
    before = only(llm.generate("Hello", GREEDY, use_tqdm=False)).token_ids
    steps, real = 0, llm.engine.step

    def interrupted():
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello", "The"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0
    assert only(llm.generate("Hello", GREEDY, use_tqdm=False)).token_ids == before


def test_more_prompts_than_the_queue_takes(llm, monkeypatch):
    """They go in as it drains; samples count, and what is wrong is told before anything starts."""
    prompts = [[5 + i, 6] for i in range(9)]
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=1 + i % 4) for i in range(9)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(llm.engine.scheduler, "max_num_queued_requests", 2)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[c.token_ids for c in o.outputs] for o in expected]
    monkeypatch.setattr(llm.engine, "step", None)
    with monkeypatch.context() as patch, pytest.raises(RequestTooLargeError, match="blocks"):
        patch.setattr(llm.engine.scheduler.block_manager, "num_blocks", 3)
        llm.generate([*prompts, [5] * 60], GREEDY, use_tqdm=False)


def test_progress_bars_do_not_fill_a_log(llm, capsys):
    llm.generate([[5, 6]] * 40, SamplingParams(max_tokens=2), use_tqdm=True)
    assert capsys.readouterr().err.count("Generating") <= 2


def test_calls_from_two_threads_run_one_after_the_other(llm):
    prompts = ["Hello", "The quick", "own fox", "ab"]
    expected = [only(llm.generate(p, GREEDY, use_tqdm=False)).token_ids for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda p: only(llm.generate(p, GREEDY, use_tqdm=False)).token_ids, prompts))
    assert results == expected


@pytest.mark.parametrize("bad", [None, 5, {"prompt": "x"}, b"ab", np.array(5)], ids=str)
def test_what_is_no_prompt_at_all(llm, bad):
    with pytest.raises(InvalidRequestError):
        llm.generate(bad, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        llm.chat(bad, GREEDY, use_tqdm=False)


def test_generate_in_three_lines(folder, llm):
    options = OPTIONS | {"warmup": False, "strict": False}
    outputs = jaxpaged.generate(str(folder), ["Hello", [7]], GREEDY, **options)
    again = llm.generate(["Hello", [7]], GREEDY, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in again]


def test_the_context_is_cut_to_what_the_cache_holds(folder):
    options = OPTIONS | {"warmup": False, "strict": False, "num_kv_blocks": 4}
    with pytest.warns(UserWarning, match="max_model_len is 64"):
        cut = LLM(str(folder), **options)
    with pytest.raises(RequestTooLargeError, match=r"70.*64"):
        cut.generate([[5] * 70], GREEDY, use_tqdm=False)


def test_users_processors(llm, folder):
    params = SamplingParams(temperature=1, max_tokens=4, logits_processors={"only": {"token": 9}})
    forced, free = llm.generate(["Hello", "Hello"], [params, GREEDY], use_tqdm=False)
    assert forced.token_ids == [9] * 4 and free.token_ids != [9] * 10
    for wrong in ({"only": {}}, {"nobody": {}}, {"only": {"token": "x"}}):
        with pytest.raises(InvalidRequestError, match=r"only|nobody"):
            llm.generate("Hello", SamplingParams(logits_processors=wrong), use_tqdm=False)
    with pytest.raises(ConfigError, match="logits_processors"):
        LLM(str(folder), logits_processors=[only_these], **OPTIONS)


def test_mistakes_in_names_are_told_early(folder):
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        LLM("./no-such-model")
    with pytest.raises(ConfigError, match="max_seqs"):
        LLM(str(folder), max_seqs=3)
    with pytest.raises(ConfigError, match=r"max_model_len=4096 exceeds.*128"):
        LLM(str(folder), max_model_len=4096)


def test_nothing_was_compiled_by_all_this(llm):
    assert llm.engine.num_compilations == 0


# --- over HTTP -------------------------------------------------------------------------------------------------


def test_http_with_the_openai_client(server):
    with httpx.Client(trust_env=False) as http:
        check_http(openai.OpenAI(base_url=server, api_key="none", http_client=http, max_retries=0))
        assert http.get(server.removesuffix("/v1") + "/health").status_code == 200


def test_embeddings_over_http(llm, server):
    """Beside a stream of text, and as alone."""
    texts = ["Hello", "The quick brown fox", "x" * 60]
    with httpx.Client(trust_env=False) as http:
        client = openai.OpenAI(base_url=server, api_key="none", http_client=http, max_retries=0)
        stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=40, temperature=0, stream=True)
        answer = client.embeddings.create(model="tiny", input=texts, dimensions=16, extra_body={"pooling": "mean"})
        text = "".join(chunk.choices[0].text for chunk in stream)
        alone = client.completions.create(model="tiny", prompt="Hello", max_tokens=40, temperature=0)
        assert text == alone.choices[0].text
        vectors = [entry.embedding for entry in answer.data]
        options = {"model": "tiny", "dimensions": 16, "extra_body": {"pooling": "mean"}}
        solo = [client.embeddings.create(input=each, **options).data[0].embedding for each in texts]
    np.testing.assert_allclose(vectors, solo, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert answer.usage.prompt_tokens == sum(len(llm.tokenizer.encode(text)) for text in texts)


def check_http(client):
    options = {"model": "tiny", "temperature": 0, "max_tokens": 10, "extra_body": {"ignore_eos": True}}
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **options)
    stream = client.chat.completions.create(messages=CHAT, stream=True, **options)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert streamed == chat.choices[0].message.content
    assert chat.usage.completion_tokens == 10 == len(chat.choices[0].logprobs.content)
    completion = client.completions.create(prompt=["Hello", "The quick"], **options)
    assert [c.index for c in completion.choices] == [0, 1]
    with pytest.raises(openai.BadRequestError, match="2000000 characters"):
        client.completions.create(prompt="a" * 2_000_000, **options)
    with pytest.raises(openai.BadRequestError, match=r"2000\d* characters"):
        client.chat.completions.create(messages=[{"role": "user", "content": "a" * 2_000_000}], **options)
    for reserved in ("self", "template", "max_tokens"):
        extra = {"extra_body": {"chat_template_kwargs": {reserved: 1}}}
        with pytest.raises(openai.BadRequestError, match=reserved):
            client.chat.completions.create(model="tiny", messages=CHAT, **extra)
    with pytest.raises(openai.BadRequestError, match="99999"):
        client.completions.create(prompt=[1, 99999], **options)
    assert client.models.list().data[0].id == "tiny"


def test_many_streams_at_once_each_with_its_own_text(llm, server):
    """Twelve streams on four rows; half of the clients leave after a few chunks, and nothing of theirs stays."""
    prompts = [f"Hello {i}" for i in range(12)]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}

    async def text(client, prompt: str, leave_after: int | None = None) -> str:
        stream = await client.completions.create(prompt=prompt, stream=True, **options)
        pieces = []
        async for chunk in stream:
            pieces.append(chunk.choices[0].text)
            if leave_after is not None and len(pieces) > leave_after:
                await stream.close()
                break
        return "".join(pieces)

    async def both() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(trust_env=False) as http:
            client = openai.AsyncOpenAI(base_url=server, api_key="none", http_client=http, max_retries=0)
            leaving = [i % 7 if i % 2 else None for i in range(len(prompts))]
            together = await asyncio.gather(*map(text, [client] * len(prompts), prompts, leaving))
            return together, [await text(client, p) for p in prompts]

    together, expected = asyncio.run(both())
    assert together[::2] == expected[::2]
    assert all(whole.startswith(part) for part, whole in zip(together[1::2], expected[1::2], strict=True))
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0
    assert llm.engine.num_compilations == 0
