"""The whole step of a model by shapes alone, to be compiled for a device that need not be there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpaged import models
from jaxpaged.config import EngineConfig, engine_config, resolve
from jaxpaged.core.sampling_params import logprob_columns
from jaxpaged.device import kv_cache
from jaxpaged.device.buckets import Bucket, ResultSizes
from jaxpaged.device.decode_program import decode_arguments, make_decode
from jaxpaged.device.options import empty_options
from jaxpaged.device.slots import empty_slots
from jaxpaged.device.step_program import (
    FORWARD_DONATED,
    SAMPLE_DONATED,
    StepOptions,
    compiler_options,
    forward_arguments,
    make_forward,
    make_sample,
    make_sample_plain,
    sample_arguments,
    sample_plain_arguments,
)
from jaxpaged.errors import ConfigError, ModelError, ModelNotFoundError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder

CONFIGS = Path(models.__file__).with_name("configs.json")  # of well-known models: what config.json says of their shapes
POOL_BYTES = 16 << 30  # beyond what 32 bits can count, as in production


class AbstractProgram(NamedTuple):
    """What `jax.jit(function, donate_argnums).lower(*args).compile(compiler_options)` needs.

    Attributes:
      args: pytrees of ShapeDtypeStructs.
      row_major: the arguments that are held in row-major order, which XLA would not choose: see `kv_cache.row_major`.
      may_spill: the beginnings of names of kernels whose spilled registers are no fault of ours.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...]
    row_major: tuple[int, ...]
    compiler_options: dict[str, str | bool]
    may_spill: tuple[str, ...]


class AbstractStep(NamedTuple):
    """The programs of a step.

    Attributes:
      forward: of params, KV pages, slots and the packed batch; sample: of slots, options, logits, rows and masks.
      sample_plain: of slots, logits and rows: instead of `sample` where no row uses a `Feature`.
      decode: of params, KV pages, slots, options and the packed batch: several steps in one; None of a mixed step.
      num_layers: of the model; launches of layer i of `forward` stem from ".../layers_{i}/...".
      weight_bytes: of the model with all of its layers, however few of them are in the programs.
    """

    forward: AbstractProgram
    sample: AbstractProgram
    sample_plain: AbstractProgram
    decode: AbstractProgram | None
    num_layers: int
    weight_bytes: int


def abstract_step(
    model: str | Mapping[str, Any],
    *,
    rows: int,
    tokens: int | None = None,
    platform: str = "gpu",
    implementation: str | None = None,
    num_layers: int | None = None,
    pool_bytes: int | None = None,
    memory: int | None = None,
    **options: Any,
) -> AbstractStep:
    """The step that an engine on such a device compiles for one bucket.

    Args:
      model: a config as Hugging Face's config.json has it, the path of one or of its folder, or a name in `CONFIGS`.
      rows: request rows of the bucket.
      tokens: tokens of a mixed step; None: a decode step, with one token a row.
      platform: "gpu", "tpu" or "cpu".
      implementation: of the kernels; None: the platform's own.
      num_layers: fewer than the model has.
      pool_bytes: of the KV pages, rounded down to whole pages; None: POOL_BYTES, or what the device has room for.
      memory: bytes of the device, of which weights and KV pages may take nine tenths; None: enough.
      options: of the engine, see `EngineConfig`.

    Raises:
      ConfigError, ModelError: an option or the model's config is wrong, see the message.
      ValueError: a step has no rows, or a mixed one no more tokens than rows.
    """
    _check_shape(rows, tokens)
    hf = _with_layers(hf_config(model), num_layers)
    family = models.get_family(hf.get("model_type", ""))
    config = family.config_from_hf(hf)
    engine = resolve(
        engine_config("", **{"dtype": "bfloat16", "max_num_seqs": max(rows, 256), **options}),
        platform=platform,
        native_bfloat16=True,
        checkpoint_dtype="bfloat16",
        model_max_len=config.max_context_len,
    )
    assert engine.max_model_len
    config = config.for_context(engine.max_model_len)
    module = family.module(config=config, dtype=jax.numpy.dtype(engine.dtype))
    step_options = StepOptions(
        page_size=engine.block_size,
        vocab_size=config.vocab_size,
        max_logprobs=logprob_columns(engine.max_logprobs, config.vocab_size),
        implementation=implementation or {"cpu": "xla"}.get(platform, platform),
    )
    bucket = Bucket(tokens or rows, rows)
    params = models.abstract_params(module)
    pool_bytes = _room(params, memory) if pool_bytes is None else pool_bytes
    pool, slots, wide = _abstract_state(engine, config, platform, pool_bytes)
    state = params, pool, slots, wide
    forward, decode = _forwards(module, step_options, bucket, state, engine.max_decode_steps, platform)
    sample, plain = _samplers(step_options, slots, wide, rows, config.vocab_size, platform)
    whole = weight_bytes(params if num_layers is None else _abstract_params(model, engine.dtype))
    return AbstractStep(forward, sample, plain, decode, config.num_layers, whole)


def _check_shape(rows: int, tokens: int | None) -> None:
    if rows < 1:
        raise ValueError(f"a step has at least one row, got rows={rows}")
    if tokens is not None and tokens <= rows:
        raise ValueError(f"a mixed step has more tokens than rows, got tokens={tokens} and rows={rows}")


def _abstract_state(engine: EngineConfig, config: ModelConfig, platform: str, pool_bytes: int) -> tuple[Any, Any, Any]:
    """KV pages, slots and options."""
    assert engine.max_num_seqs and engine.max_model_len
    pages = pool_bytes // kv_cache.page_bytes(config, engine.block_size, engine.kv_cache_dtype, platform)
    pool = kv_cache.abstract_pages(config, pages, engine.block_size, engine.kv_cache_dtype, platform)
    max_pages = -(-engine.max_model_len // engine.block_size)
    slots = jax.eval_shape(partial(empty_slots, engine.max_num_seqs, engine.max_model_len, max_pages))
    return pool, slots, jax.eval_shape(partial(empty_options, engine.max_num_seqs, config.vocab_size))


def _forwards(
    module: Decoder,
    options: StepOptions,
    bucket: Bucket,
    state: tuple[Any, Any, Any, Any],
    max_decode_steps: int,
    platform: str,
) -> tuple[AbstractProgram, AbstractProgram | None]:
    """`forward` and `decode`.

    Args:
      state: params, KV pages, slots and options.
    """
    params, pool, slots, _ = state
    sizes = ResultSizes(logits=bucket.rows, hidden=bucket.tokens)
    forward = AbstractProgram(
        function=make_forward(module, options, bucket, sizes),
        args=forward_arguments(params, pool, slots, bucket, options.page_size),
        donate_argnums=FORWARD_DONATED,
        row_major=(1,) if kv_cache.row_major(platform) else (),
        compiler_options=compiler_options(platform),
        may_spill=(),
    )
    if not bucket.decode_only:
        return forward, None
    decode = make_decode(module, options, bucket, sizes, max(2, max_decode_steps))
    return forward, forward._replace(function=decode, args=decode_arguments(*state, bucket, options.page_size))


def _samplers(
    options: StepOptions, slots: Any, wide: Any, rows: int, vocab_size: int, platform: str
) -> tuple[AbstractProgram, AbstractProgram]:
    """`sample` and `sample_plain`."""
    sample = AbstractProgram(
        function=make_sample(options),
        args=sample_arguments(slots, wide, rows, vocab_size),
        donate_argnums=SAMPLE_DONATED,
        row_major=(),
        compiler_options=compiler_options(platform),
        may_spill=("sort_",),  # XLA's own, used where there is no device; on one it calls a library
    )
    args = sample_plain_arguments(slots, rows, vocab_size)
    return sample, sample._replace(function=make_sample_plain(options), args=args, may_spill=())


def weight_bytes(params: Any) -> int:
    """Bytes of a pytree of arrays or of shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def _abstract_params(model: str | Mapping[str, Any], dtype: str) -> Any:
    hf = hf_config(model)
    family = models.get_family(hf.get("model_type", ""))
    return models.abstract_params(family.module(config=family.config_from_hf(hf), dtype=jax.numpy.dtype(dtype)))


def _room(params: Any, memory: int | None) -> int:
    """Bytes for KV pages beside the weights on a device of so much memory, at most POOL_BYTES."""
    if memory is None:
        return POOL_BYTES
    weights = weight_bytes(params)
    room = memory * 9 // 10 - weights
    if room < memory // 100:
        raise ConfigError(f"weights of {weights:,} bytes leave no room for KV pages on a device of {memory:,} bytes")
    return min(POOL_BYTES, room)


def hf_config(model: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a config.json, see `abstract_step`.

    Raises ModelNotFoundError where there is none, ModelError where it is no JSON object.
    """
    if isinstance(model, Mapping):
        return model
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    known = json.loads(CONFIGS.read_text())
    if not path.is_file():
        if model not in known:
            raise ModelNotFoundError(f"{model!r} is no config.json, no folder with one, and none of {', '.join(known)}")
        return known[model]
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def _with_layers(hf: Mapping[str, Any], num_layers: int | None) -> Mapping[str, Any]:
    """The config of the model's first layers; what it says layer by layer is cut as well."""
    if num_layers is None:
        return hf
    if isinstance(hf.get("text_config"), Mapping):
        return {**hf, "text_config": _with_layers(hf["text_config"], num_layers)}
    whole = hf.get("num_hidden_layers", 0)
    if not 1 <= num_layers <= whole:
        raise ModelError(f"num_layers={num_layers} must be between 1 and the model's {whole}")
    cut = {key: value[:num_layers] for key, value in hf.items() if isinstance(value, list) and len(value) == whole}
    return {**hf, **cut, "num_hidden_layers": num_layers}
