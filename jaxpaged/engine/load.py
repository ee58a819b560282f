"""From engine options to a warm engine: read the model, place its weights, build both halves, compile."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxpaged import models
from jaxpaged.checkpoint.load import load_params
from jaxpaged.checkpoint.pooling import model_pooling
from jaxpaged.checkpoint.source import ModelSource, eos_token_ids, open_model
from jaxpaged.config import EngineConfig, resolve
from jaxpaged.core.block_manager import BlockManager
from jaxpaged.core.policy import policy_key
from jaxpaged.core.sampling_params import MAX_EOS_TOKEN_IDS
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.core.step_sizes import StepSizes
from jaxpaged.device import kv_cache
from jaxpaged.device.buckets import Bucket, BucketTable, bucket_table, least_decode_rows
from jaxpaged.device.compilation import use_persistent_cache
from jaxpaged.device.host_memory import keep_freed_memory
from jaxpaged.device.logits_processor import check_processors
from jaxpaged.device.platform import native_bfloat16, platform
from jaxpaged.device.runner import Runner
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import ConfigError, ModelError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.text.tokenizer import Tokenizer

# Called with (stage, done, total); stages are "load" (bytes) and "warm-up" (programs).
Progress = Callable[[str, int, int], None]


def load_serving_engine(config: EngineConfig, progress: Progress | None = None) -> tuple[Engine, Tokenizer]:
    """As `load_engine`, but the engine can serve as soon as a few of its programs are compiled.

    In strict mode it waits for all.
    """
    return load_engine(config, progress, gradually=not config.strict)


def load_engine(
    config: EngineConfig, progress: Progress | None = None, *, gradually: bool = False
) -> tuple[Engine, Tokenizer]:
    """Reads a model by name and builds its engine.

    Args:
      gradually: see `WarmUp`.

    Raises:
      ModelError: the model cannot be found, is of an unknown type, or its tensors do not match.
      ConfigError: an option contradicts the model or the machine.
    """
    config = _with_imports(config)
    source = open_model(config.model, load_format=config.load_format)
    family = models.get_family(str(source.config.get("model_type")))
    model = family.config_from_hf(source.config)
    tokenizer = Tokenizer.from_name(config.tokenizer) if config.tokenizer else Tokenizer.from_source(source)
    cut = config.max_model_len is None
    config = _with_checks(resolve_for(config, source.dtype, model.max_context_len), model.vocab_size)
    vocab_size = min(model.vocab_size, max(tokenizer.vocab_size, 1))
    eos = _stop_ids(source, tokenizer, vocab_size)
    module = family.module(config=model, dtype=jnp.dtype(config.dtype))
    read = partial(_params, family, module, config, source, progress)
    params = read if kv_cache.known_before_weights() else read()
    if cut:
        config = _cut_to_fit(config, model)
    assert config.max_model_len
    engine = build_engine(
        module.clone(config=model.for_context(config.max_model_len)),
        params,
        config,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        pooling=model_pooling(source),
        progress=progress,
        gradually=gradually,
    )
    return engine, tokenizer


def resolve_for(config: EngineConfig, checkpoint_dtype: str, model_max_len: int) -> EngineConfig:
    """`config` with every default filled in for this machine and model."""
    return resolve(
        config,
        platform=platform(),
        native_bfloat16=native_bfloat16(),
        checkpoint_dtype=checkpoint_dtype,
        model_max_len=model_max_len,
    )


def build_engine(
    module: Decoder,
    params: dict | Callable[[], dict],
    config: EngineConfig,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    pooling: str = "last",
    progress: Progress | None = None,
    gradually: bool = False,
) -> Engine:
    """An engine for a module and its params, compiled if `config.warmup`.

    Args:
      params: the weights; or what reads them, in `config.dtype`, while programs are compiled.
      config: resolved options, whose `logits_processors` have been checked.
      vocab_size: ids from there on are neither accepted in prompts nor produced.
      pooling: the model's own way, by name.
      gradually: see `WarmUp`.
    """
    if platform() == "cpu":
        keep_freed_memory()
    runner = _runner(module, params, config, vocab_size)
    with runner.start_warm_up(gradually=gradually) if config.warmup else contextlib.nullcontext() as warm_up:
        if callable(params):
            runner.place(params())
        if warm_up is not None:
            warm_up.finish(_stage(progress, "warm-up"))
    scheduler = _scheduler(runner, config)
    config = dataclasses.replace(config, num_kv_blocks=runner.num_pages - 1)
    return Engine(scheduler, runner, config, vocab_size=vocab_size, eos_token_ids=eos_token_ids, pooling=pooling)


def step_sizes(buckets: BucketTable, unready: Callable[[], Container[Bucket]] = tuple) -> StepSizes:
    """What the scheduler has to know of the buckets; `unready` gives those that cannot be used as of now."""
    return StepSizes(lambda: buckets.mixed_tokens(unready()), buckets.step_cost)


def _runner(module: Decoder, params: dict | Callable[[], dict], config: EngineConfig, vocab_size: int) -> Runner:
    """The device half, its weights placed if they are there."""
    assert config.max_num_seqs and config.max_num_batched_tokens
    least = least_decode_rows(platform(), config.dtype)
    buckets = bucket_table(config.max_num_seqs, config.max_num_batched_tokens, platform(), min_decode_rows=least)
    cache = use_persistent_cache(config.compilation_cache_dir)
    known = models.abstract_params(module) if callable(params) else params
    return Runner(module, known, config, vocab_size=vocab_size, buckets=buckets, cache=cache)


def _scheduler(runner: Runner, config: EngineConfig) -> Scheduler:
    """The host half."""
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
    return Scheduler(
        BlockManager(runner.num_pages - 1, config.block_size, enable_prefix_caching=config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        key=policy_key(config),
        num_host_blocks=runner.num_host_blocks,
        max_num_queued_requests=config.max_num_queued_requests,
        step_sizes=step_sizes(runner.buckets, runner.unready),
    )


def _with_imports(config: EngineConfig) -> EngineConfig:
    """Options whose `logits_processors` are imported where they were named."""
    given = config.logits_processors
    return dataclasses.replace(
        config, logits_processors=tuple(_imported(p) if isinstance(p, str) else p for p in given)
    )


def _with_checks(config: EngineConfig, vocab_size: int) -> EngineConfig:
    """Resolved options whose `logits_processors` are checked."""
    assert config.max_model_len
    processors = check_processors(config.logits_processors, vocab_size, config.max_model_len)
    return dataclasses.replace(config, logits_processors=processors)


def _stop_ids(source: ModelSource, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """The model's end-of-sequence ids; those that can never be produced left out."""
    eos = tuple(i for i in eos_token_ids(source, tokenizer) if i < vocab_size)
    if len(eos) > MAX_EOS_TOKEN_IDS:
        raise ModelError(f"{source.name} has {len(eos)} end-of-sequence ids, more than {MAX_EOS_TOKEN_IDS}: {eos}")
    return eos


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as e:  # whatever the operator's module raises: it is a wrong option
        raise ConfigError(f"logits_processors={path!r} cannot be imported: {e}") from e


def _cut_to_fit(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """`config` with max_model_len no longer than what the KV cache can hold."""
    fits = kv_cache.longest_sequence(config, model)
    assert config.max_model_len
    if fits >= config.max_model_len or fits < 2:  # nothing fits: sizing the pool says so
        return config
    warnings.warn(
        f"max_model_len is {fits}, what the KV cache can hold, instead of {config.max_model_len}", stacklevel=3
    )
    return dataclasses.replace(config, max_model_len=fits)


def _params(
    family: models.ModelFamily,
    module: Decoder,
    config: EngineConfig,
    source: ModelSource,
    progress: Progress | None,
) -> dict:
    """The model's weights, read or (load_format="dummy") drawn."""
    if config.load_format == "dummy":
        return models.random_params(module, config.seed)
    return load_params(
        family.table(module.config),
        models.abstract_params(module),
        source.tensors(),
        dtype=config.dtype,
        progress=_stage(progress, "load"),
    )


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return (lambda done, total: progress(stage, done, total)) if progress else None
