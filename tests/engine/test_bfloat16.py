"""The engine in bfloat16, whose pool is kept as bits on CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.device.buckets import BucketTable
from jaxpaged.device.runner import Runner
from jaxpaged.engine.engine import Engine
from jaxpaged.layers.attention import DenseContext
from tests.engine.tiny import BLOCK, MAX_LEN, VOCAB, prompt, run


@pytest.fixture(scope="module")
def bf16_runner(tiny_module, tiny_params, tiny_config):
    """One decode and one mixed program: every schedule runs the same two, so rows can be compared bit by bit."""
    config = dataclasses.replace(
        tiny_config,
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_kv_blocks=64,
    )
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_params)
    module = tiny_module.clone(dtype=jnp.dtype("bfloat16"))
    runner = Runner(module, params, config, vocab_size=VOCAB, buckets=BucketTable([2], [16], max_num_seqs=2))
    runner.warm_up()
    return runner


def make_engine(runner: Runner, **options) -> Engine:
    manager = BlockManager(20, BLOCK, **options)
    scheduler = Scheduler(manager, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=MAX_LEN)
    return Engine(scheduler, runner, runner.config, vocab_size=VOCAB)


def test_alone_together_and_from_the_cache(bf16_runner):
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
    prompts = [prompt(40), prompt(7), prompt(33)]
    alone = [run(make_engine(bf16_runner, enable_prefix_caching=False), [p], params)[0] for p in prompts]
    engine = make_engine(bf16_runner)
    for answers in (run(engine, prompts, params), run(engine, prompts, params)):
        for answer, expected in zip(answers, alone, strict=True):
            assert answer.token_ids[0] == expected.token_ids[0]
            assert np.isfinite([entry.logprob for entry in answer.logprobs]).all()
    assert run(engine, [prompts[0]], params)[0].num_cached_tokens == 32


def test_the_first_token_is_that_of_dense_attention(bf16_runner):
    ids = jnp.asarray(prompt(30), jnp.int32)

    @jax.jit
    def dense(params):
        hidden, _ = bf16_runner.module.apply({"params": params}, ids, jnp.arange(30), DenseContext())
        return bf16_runner.module.apply({"params": params}, hidden[-1:], method="logits")[0]

    logprobs = jax.nn.log_softmax(dense(bf16_runner.params))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    entry = run(make_engine(bf16_runner), [ids.tolist()], params)[0].logprobs[0]
    spread = float(jnp.std(logprobs))
    np.testing.assert_allclose(entry.top_logprobs, logprobs[jnp.array(entry.top_ids)], atol=0.1 * spread)


def test_the_pool_is_written_in_place(bf16_runner):
    for program in bf16_runner.programs.values():
        analysis = program.memory_analysis()
        assert analysis.alias_size_in_bytes >= bf16_runner.kv_pages.nbytes
    if jax.default_backend() == "cpu":
        assert bf16_runner.kv_pages.dtype == jnp.uint16
