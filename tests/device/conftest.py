"""One warm runner of a tiny random Llama, for tests that launch steps by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import models
from jaxpaged.config import EngineConfig
from jaxpaged.device.buckets import BucketTable
from jaxpaged.device.runner import Runner
from tests.device.by_hand import BLOCK, MAX_LEN, ROWS, TOKENS, VOCAB
from tests.engine.tiny import TINY_LLAMA


@pytest.fixture(scope="session")
def runner() -> Runner:
    """Its head has more rows than there are tokens; it tells the log-probabilities of the whole vocabulary."""
    family = models.get_family("llama")
    module = family.module(config=family.config_from_hf(TINY_LLAMA), dtype=jnp.dtype("float32"))
    params = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, models.random_params(module, 0))
    config = EngineConfig(
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS,
        block_size=BLOCK,
        num_kv_blocks=32,
        max_logprobs=-1,
        swap_space=2 * 16 * 2 * 2 * 16 * 4 * 10.5 / (1 << 30),
        attention_implementation="xla",
        strict=True,
    )
    buckets = BucketTable([ROWS], [TOKENS], max_num_seqs=ROWS)
    runner = Runner(module, params, config, vocab_size=VOCAB, buckets=buckets)
    progress: list[tuple[int, int]] = []
    runner.warm_up(lambda done, total: progress.append((done, total)))
    assert progress == [(i, runner.num_programs) for i in range(runner.num_programs + 1)]
    return runner
