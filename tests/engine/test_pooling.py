"""Embeddings against the Flax module applied to the whole prompt, and as if alone whatever the engine does beside."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from jaxpaged import models
from jaxpaged.config import EngineConfig
from jaxpaged.core.pooling_params import PoolingParams
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.load import build_engine
from jaxpaged.engine.process_client import ProcessClient
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError, UnsupportedError
from jaxpaged.layers.attention import DenseContext
from tests.engine.tiny import GREEDY, MAX_LEN, TINY_LLAMA, VOCAB, prompt
from tests.fake_engine import HIDDEN_SIZE, hidden_state
from tests.models.golden_cases import CASES
from tests.scripted_core import LOAD, TOKENIZER

KINDS = ("last", "mean")
PARAMS = SamplingParams()
LENGTHS = [1, 17, 40]  # B52


def whole(module, params, token_ids: list[int], pooling: PoolingParams) -> np.ndarray:
    """The embedding by definition, from hidden states [T, D] of dense attention."""
    padded = np.zeros(MAX_LEN // 2, np.int32)
    padded[: len(token_ids)] = token_ids
    hidden = np.asarray(_hidden(module, params, padded), np.float64)[: len(token_ids)]
    vector = (hidden[-1] if pooling.pooling == "last" else hidden.mean(0))[: pooling.dimensions]
    return vector / np.linalg.norm(vector) if pooling.normalize else vector


@partial(jax.jit, static_argnums=0)
def _hidden(module, params, ids):
    return module.apply({"params": params}, ids, jnp.arange(len(ids)), DenseContext())[0]


def embed(engine: Engine, prompts, pooling: PoolingParams, *, beside=()) -> tuple[list[np.ndarray], list[list[int]]]:
    """The vectors of the prompts, and the tokens that greedy requests beside them get."""
    answers: dict[str, list[int]] = {f"t{i}": [] for i in range(len(beside))}
    vectors: dict[str, np.ndarray] = {}
    for i, ids in enumerate(beside):
        engine.add_request(engine.make_request(f"t{i}", ids, GREEDY))
    for i, ids in enumerate(prompts):
        engine.add_request(engine.make_request(f"v{i}", ids, PARAMS, pooling=pooling))
    while engine.has_work:
        for update in engine.step():
            if update.request_id in answers:
                answers[update.request_id] += update.new_token_ids
            else:
                assert (update.finish_reason, update.new_token_ids) == ("stop", [])
                assert update.request_id not in vectors and update.embedding is not None
                vectors[update.request_id] = np.frombuffer(update.embedding, "<f4")
        engine.scheduler.check_invariants()
    assert engine.scheduler.block_manager.num_used_blocks == 0
    return [vectors[f"v{i}"] for i in range(len(prompts))], list(answers.values())


@pytest.mark.parametrize("pooling", KINDS)
@pytest.mark.parametrize("options", [{}, {"dimensions": 16}, {"dimensions": 16, "normalize": False}])
def test_the_hidden_states_of_the_module(make_engine, tiny_module, tiny_params, pooling, options):
    """B52: cut, then scaled; a last token that is the padding's; nothing that nobody wrote is read."""
    wanted = PoolingParams(pooling=pooling, **options)
    prompts = [*map(prompt, LENGTHS), [*prompt(16), 0], [0] * 5]
    vectors, _ = embed(make_engine(poison=True), prompts, wanted)
    for ids, vector in zip(prompts, vectors, strict=True):
        assert vector.dtype == np.float32 and len(vector) == (wanted.dimensions or TINY_LLAMA["hidden_size"])
        np.testing.assert_allclose(vector, whole(tiny_module, tiny_params, ids, wanted), atol=1e-4, rtol=1e-4)
        if wanted.normalize:
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_another_family():
    config_json = CASES["gemma2"].config
    family = models.get_family(config_json["model_type"])
    module = family.module(config=family.config_from_hf(config_json), dtype=jnp.dtype("float32"))
    params = models.random_params(module, 3)
    config = EngineConfig(
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        num_kv_blocks=16,
        compilation_cache_dir="",
        warmup=False,
    )
    engine = build_engine(module, params, config, vocab_size=128)
    for pooling in KINDS:
        wanted = PoolingParams(pooling=pooling)
        prompts = [[i % 128 for i in prompt(n)] for n in (3, 40)]
        for ids, vector in zip(prompts, embed(engine, prompts, wanted)[0], strict=True):
            np.testing.assert_allclose(vector, whole(module, params, ids, wanted), atol=1e-4)


@pytest.fixture(scope="module")
def right():
    """Solo vectors, remembered: `right(make_engine, prompt, kind)`."""
    known: dict = {}

    def vector(make_engine, ids, pooling):
        key = (tuple(ids), pooling)
        if key not in known:
            engine = make_engine(caching=False, overlap=False)
            known[key] = embed(engine, [ids], PoolingParams(pooling=pooling))[0][0]
        return known[key]

    return vector


@pytest.mark.parametrize("pooling", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tokens", [8, 9, 16, 64])
def test_any_batch_and_chunking_beside_generation(make_engine, solo, right, pooling, overlap, tokens):
    """B52: neither changes the other."""
    prompts, beside = [prompt(n) for n in [*LENGTHS, 16, 33, 100]], [prompt(5), prompt(40)]
    engine = make_engine(tokens=tokens, overlap=overlap, poison=True)
    vectors, texts = embed(engine, prompts, PoolingParams(pooling=pooling), beside=beside)
    for ids, vector in zip(prompts, vectors, strict=True):
        np.testing.assert_allclose(vector, right(make_engine, ids, pooling), atol=1e-5)
    assert texts == [solo(ids).token_ids for ids in beside]


@pytest.mark.parametrize("pooling", KINDS)
@pytest.mark.parametrize("tokens", [8, 64])
def test_any_state_of_the_prefix_cache(make_engine, right, pooling, tokens):
    """The cache is full of the prompt's beginnings: of other lengths, of text, of itself."""
    engine, ids = make_engine(tokens=tokens), prompt(50)
    expected = right(make_engine, ids, pooling)
    for before in ([ids[:20]], [ids[:33], ids], []):
        vectors, _ = embed(engine, [ids, ids], PoolingParams(pooling=pooling), beside=before)
        np.testing.assert_allclose(vectors, [expected] * 2, atol=1e-5)


@pytest.mark.parametrize("pooling", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("host_blocks", [0, 5, 100], ids=["recompute", "swap some", "swap all"])
def test_preempted(make_engine, solo, right, pooling, overlap, host_blocks):
    """B52: in the middle of their prompts, by text that grows."""
    scheduling = {"num_host_blocks": host_blocks}
    engine = make_engine(blocks=7, tokens=3, seqs=2, overlap=overlap, poison=True, scheduling=scheduling)
    long = replace(GREEDY, max_tokens=60)
    engine.add_request(engine.make_request("text", prompt(30), long))
    prompts = [prompt(60, seed) for seed in range(2)]
    for i, ids in enumerate(prompts):
        engine.add_request(engine.make_request(f"v{i}", ids, PARAMS, pooling=PoolingParams(pooling=pooling)))
    vectors, text = {}, []
    preempted = 0
    while engine.has_work:
        for update in engine.step():
            text += update.new_token_ids
            if update.embedding is not None:
                vectors[update.request_id] = np.frombuffer(update.embedding, "<f4")
        preempted = engine.scheduler.num_preemptions
        engine.scheduler.check_invariants()
    assert preempted, "the pool is too large to test anything"
    assert text == solo(prompt(30), long).token_ids
    for i, ids in enumerate(prompts):
        np.testing.assert_allclose(vectors[f"v{i}"], right(make_engine, ids, pooling), atol=1e-5)


def test_nothing_compiles(make_engine, runner):
    before = runner.recompilations
    embed(make_engine(), [prompt(n) for n in (1, 2, 3, 64, 90)], PoolingParams(pooling="mean"), beside=[prompt(3)])
    assert runner.recompilations == before == 0


def test_the_whole_context(make_engine, right):
    engine = make_engine()
    ids = prompt(MAX_LEN)
    embed(engine, [ids], PoolingParams(pooling="last"))
    with pytest.raises(RequestTooLargeError, match=f"{MAX_LEN + 1} tokens, but the context holds {MAX_LEN}"):
        engine.make_request("v", prompt(MAX_LEN + 1), PARAMS, pooling=PoolingParams())
    for cut, left in ((-1, MAX_LEN), (17, 17)):
        params = SamplingParams(truncate_prompt_tokens=cut)
        request = engine.make_request("v", [*ids, *prompt(9)], params, pooling=PoolingParams(pooling="mean"))
        assert request.prompt_token_ids == ids[:left]


def test_what_a_vector_has_no_use_for(make_engine):
    engine = make_engine()
    for name, value in (("n", 2), ("temperature", 0), ("logprobs", 1), ("prompt_logprobs", 1), ("stop", ["a"])):
        with pytest.raises(InvalidRequestError, match=f"takes no {name}=") as caught:
            engine.make_request("v", prompt(5), SamplingParams(**{name: value}), pooling=PoolingParams())
        assert caught.value.param == name
    params = SamplingParams(timeout=5, max_tokens=1, detokenize=False, output_kind="final")
    assert engine.make_request("v", prompt(5), params, pooling=PoolingParams()).pooling == PoolingParams(pooling="last")


def test_sizes_and_kinds(make_engine):
    engine = make_engine()
    size = engine.hidden_size
    engine.make_request("v", prompt(5), PARAMS, pooling=PoolingParams(dimensions=size))
    with pytest.raises(InvalidRequestError, match=f"dimensions={size + 1} is more than the {size}") as caught:
        engine.make_request("v", prompt(5), PARAMS, pooling=PoolingParams(dimensions=size + 1))
    assert caught.value.param == "dimensions"
    engine.pooling = "mean"
    assert engine.make_request("v", prompt(5), PARAMS, pooling=PoolingParams()).pooling.pooling == "mean"
    engine.pooling = "cls_token"
    with pytest.raises(UnsupportedError, match="'cls_token'"):
        engine.make_request("v", prompt(5), PARAMS, pooling=PoolingParams())
    assert engine.make_request("v", prompt(5), PARAMS, pooling=PoolingParams(pooling="mean"))


def test_a_vocabulary_of_its_own(make_engine):
    with pytest.raises(InvalidRequestError, match=f"{VOCAB}"):
        make_engine().make_request("v", [VOCAB], PARAMS, pooling=PoolingParams())


def test_from_a_core_in_another_process():
    """The front checks what is wanted, and gets the same numbers."""
    wanted = PoolingParams(dimensions=4)

    async def main(client) -> list:
        llm = AsyncLLM(client, TOKENIZER)
        with pytest.raises(InvalidRequestError, match=f"dimensions={HIDDEN_SIZE + 1}"):
            await llm.prepare([5], PARAMS, pooling=PoolingParams(dimensions=HIDDEN_SIZE + 1))
        prepared = await llm.prepare([5, 6, 7], PARAMS, pooling=wanted)
        outputs = [output async for output in llm.stream(prepared)]
        await llm.shutdown()
        return outputs

    client = ProcessClient(EngineConfig(model="echo"), engine=LOAD)
    with contextlib.closing(client):
        client.wait_until_ready()
        (output,) = asyncio.run(main(client))
    assert output.finished and output.finish_reason == "stop" and not output.token_ids
    np.testing.assert_array_equal(output.embedding, wanted.vector(hidden_state([5, 6, 7]), 1))
