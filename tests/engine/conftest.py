"""One warm runner of a tiny random Llama, shared by all engine tests: compiling is what costs.

Tests vary the host half (pool size, budgets, overlap, caching) around the same programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import models
from jaxpaged.config import EngineConfig
from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.policy import policy_key
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.device.buckets import BucketTable
from jaxpaged.device.runner import Runner
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.load import step_sizes
from tests.engine.tiny import BLOCK, GREEDY, MAX_LEN, POOL, SHIFT, TINY_LLAMA, VOCAB, Answer, run
from tests.engine.workloads import EOS, Answers, Job, Setting, play

MakeEngine = Callable[..., Engine]
BUCKETS = BucketTable([1, 8], [16, 64], max_num_seqs=8)
LARGEST_BUCKETS = BucketTable([8], [64], max_num_seqs=8)


@pytest.fixture(scope="session")
def tiny_module():
    family = models.get_family("llama")
    return family.module(config=family.config_from_hf(TINY_LLAMA), dtype=jnp.dtype("float32"))


@pytest.fixture(scope="session")
def tiny_params(tiny_module):
    # Wide weights make the argmax depend on the whole context: a wrong cache shows at once.
    return jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, models.random_params(tiny_module, 0))


@pytest.fixture(scope="session")
def tiny_config() -> EngineConfig:
    return EngineConfig(
        model="tiny",
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_kv_blocks=POOL,
        max_decode_steps=8,
        max_decode_seconds=1e6,
        max_logprobs=8,
        swap_space=0.001,
        logits_processors=(SHIFT,),
        attention_implementation="xla",
        compilation_cache_dir="",
        strict=True,
        scheduling_policy="priority",  # so that a priority may be given; what heeds it is each engine's key
    )


@pytest.fixture(scope="session")
def runner(tiny_module, tiny_params, tiny_config) -> Runner:
    runner = Runner(tiny_module, tiny_params, tiny_config, vocab_size=VOCAB, buckets=BUCKETS)
    runner.warm_up()
    return runner


@pytest.fixture
def make_engine(runner, tiny_config) -> MakeEngine:
    """An engine around the shared runner; options shrink what the scheduler may use of it."""

    def make(
        *,
        blocks: int = 64,
        tokens: int = 64,
        seqs: int = 8,
        overlap: bool = True,
        max_steps: int = 1,
        caching: bool = True,
        eos: Sequence[int] = (),
        poison: bool = False,
        buckets: BucketTable = BUCKETS,
        scheduling: dict[str, Any] | None = None,
        **block_manager_options,
    ) -> Engine:
        runner.buckets = buckets
        if poison:
            runner.kv_pages = jnp.full_like(runner.kv_pages, jnp.nan)
        manager = BlockManager(blocks, BLOCK, enable_prefix_caching=caching, **block_manager_options)
        scheduler = Scheduler(
            manager,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=MAX_LEN,
            step_sizes=step_sizes(buckets, runner.unready),
            **(scheduling or {}),
        )
        config = dataclasses.replace(tiny_config, overlap=overlap, max_decode_steps=max_steps, num_kv_blocks=blocks)
        return Engine(scheduler, runner, config, vocab_size=VOCAB, eos_token_ids=eos)

    return make


@pytest.fixture
def solo(make_engine) -> Callable[..., Answer]:
    """A request alone on a fresh engine with no prefix cache: the right answer."""

    def run_alone(token_ids, params=GREEDY, **options) -> Answer:
        return run(make_engine(caching=False, overlap=False, max_steps=1, **options), [token_ids], params)[0]

    return run_alone


@pytest.fixture
def make_setting(make_engine) -> Callable[[Setting], Engine]:
    """An engine of a workload; what nobody has written is NaN."""

    def make(setting: Setting) -> Engine:
        config = EngineConfig(scheduling_policy=setting.policy, ageing=10.0)
        return make_engine(
            blocks=setting.blocks,
            tokens=setting.tokens,
            seqs=setting.seqs,
            overlap=setting.overlap,
            max_steps=setting.max_steps,
            caching=setting.caching,
            eos=EOS,
            poison=True,
            buckets=LARGEST_BUCKETS if setting.largest_buckets else BUCKETS,
            scheduling={"key": policy_key(config), "num_host_blocks": setting.swap_blocks},
        )

    return make


@pytest.fixture(scope="session")
def _answers_alone() -> dict[str, Answers]:
    return {}


@pytest.fixture
def solo_job(make_engine, _answers_alone) -> Callable[[Job], Answers]:
    """A job alone on a fresh engine with room for everything; remembered."""

    def run_alone(job: Job) -> Answers:
        job = dataclasses.replace(job, arrival=0, abort=None)
        if (key := repr(job)) not in _answers_alone:
            engine = make_engine(caching=False, overlap=False, max_steps=1, eos=EOS, poison=True)
            _answers_alone[key] = play(engine, (job,))
        return _answers_alone[key]

    return run_alone
