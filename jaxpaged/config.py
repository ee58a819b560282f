"""Engine options: one frozen record, every "auto" filled in once by `resolve`. Imports no jax."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ConfigError, UnsupportedError

DTYPES = ("float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("reference", "xla", "gpu", "tpu")
POLICIES = ("fcfs", "priority", "spf")
_INT32 = 2**31 - 1  # what devices count with
# Least and most of each whole number: what is out of them would fail once the weights are loaded, if at all.
_RANGES = (
    ("max_model_len", 2, _INT32),
    ("max_num_seqs", 1, 2**16),
    ("max_num_batched_tokens", 1, 2**22),
    ("block_size", 1, 2**20),
    ("num_kv_blocks", 1, _INT32),
    ("kv_cache_bytes", 1, 2**50),
    ("max_decode_steps", 1, 1024),
    ("max_logprobs", -1, _INT32),
    ("max_num_queued_requests", 1, _INT32),
    ("tensor_parallel_size", 1, _INT32),
    ("seed", -(2**63), 2**63 - 1),
)


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. None means "choose for me"; `resolve` leaves no None but where it says so.

    Attributes:
      model: a local folder, a `.gguf` file, a Hugging Face name, or "demo".
      tokenizer: where the tokenizer is; None: with the model.
      dtype: of weights and activations; "auto" takes the checkpoint's. On a CPU without instructions for it a
        16-bit type becomes float32, which holds the same weights: else every step would convert all of them. On a TPU
        float16 becomes bfloat16.
      kv_cache_dtype: of the KV cache; "auto" takes `dtype` as asked for, also where weights become float32.
      load_format: "auto" reads the checkpoint; "dummy" makes random weights of the model's config.
      max_model_len: longest sequence, prompt and output together; None: the model's own, cut to what the KV cache
        can hold.
      max_num_seqs: requests that run at once: rows of the largest batch; None: 256, or 32 on a CPU.
      max_num_batched_tokens: tokens of the largest step; None: 8192, or 256 on a CPU.
      block_size: tokens in a KV block (a page on the device); a power of two.
      num_kv_blocks: size of the pool, block 0 (scratch) not counted; None: from `kv_cache_bytes` or free memory.
      kv_cache_bytes: memory for the pool; None: from free memory.
      gpu_memory_utilization: share of device memory that weights, pool and temporaries may take together.
      enable_prefix_caching: share the blocks of common prefixes.
      attention_implementation: one of the kernels by name; None: the platform's best.
      debug_kernels: each step checks the page ids, lengths and slots that it is given; slow.
      overlap: launch a step before the last one's tokens have reached the host.
      max_decode_steps: tokens that requests get at once, as one step of the device, where nothing else is to be done;
        1: one each. More make a larger program and less work for the host, which shows where steps are short; at most
        `block_size`.
      max_decode_seconds: how long such a step may take, while who comes waits and no token is sent.
      seed: of the engine: weights with `load_format` "dummy", and requests that bring no seed.
      max_logprobs: largest `logprobs` a request may ask for; -1: the whole vocabulary, which then may be asked for as
        -1, and which makes every request's log-probabilities dearer.
      logprobs_mode: "raw_logprobs" or "processed_logprobs", for requests that do not say.
      logits_processors: `LogitsProcessor`s that requests may name, or MODULE:NAME to import one.
      scheduling_policy: who goes first: "fcfs", "priority" (a request's `priority`, smaller first), or "spf" (shortest
        prompt first).
      scheduling_key: a function of the `Request` that gives a number, smaller first; in place of a policy.
      ageing: seconds of waiting that make up for one unit of priority or of `scheduling_key`, or for 1,000 tokens of
        prompt, so that nobody waits forever; 0: nothing does.
      swap_space: GiB of host memory for the blocks of preempted requests; 0: they are computed again.
      max_num_queued_requests: refuse more waiting requests than this with QueueFullError; None: no limit.
      tensor_parallel_size: devices that share each layer; only 1 is built yet.
      strict: raise RecompilationError if anything compiles after warm-up.
      warmup: compile every program before the first request; in a server that is not `strict`, what one step needs
        before it and the others after it.
      compilation_cache_dir: where compiled programs persist; None: `~/.cache/jaxpaged/xla`; "": nowhere.
    """

    model: str = ""
    tokenizer: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    attention_implementation: str | None = None
    debug_kernels: bool = False
    overlap: bool = True
    max_decode_steps: int = 1
    max_decode_seconds: float = 0.05
    seed: int = 0
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    logits_processors: tuple[Any, ...] = ()
    scheduling_policy: str = "fcfs"
    scheduling_key: Callable[[Any], float] | None = None
    ageing: float = 10.0
    swap_space: float = 0.0
    max_num_queued_requests: int | None = None
    tensor_parallel_size: int = 1
    strict: bool = False
    warmup: bool = True
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *DTYPES))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("logprobs_mode", self.logprobs_mode, ("raw_logprobs", "processed_logprobs"))
        _one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        _one_of("attention_implementation", self.attention_implementation, (None, *IMPLEMENTATIONS))
        _check_types(self)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ConfigError(f"{name}={value!r} must be an integer of at least {low}")
            if value is not None and value > high:
                raise ConfigError(f"{name}={value!r} must be at most {high}")
        if self.tensor_parallel_size > 1:
            raise UnsupportedError(
                f"tensor_parallel_size={self.tensor_parallel_size}: tensor parallelism is not built yet. Choose a "
                "model that fits one device; data_parallel_size serves more copies of it"
            )
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size={self.block_size} must be a power of two")
        if self.max_decode_steps > self.block_size:
            raise ConfigError(f"max_decode_steps={self.max_decode_steps} must be at most block_size={self.block_size}")
        if self.strict and not self.warmup:
            raise ConfigError("strict=True needs warmup=True: without warm-up every program compiles while serving")
        limits = {"ageing": 1e9, "swap_space": 1e6, "max_decode_seconds": 1e6, "gpu_memory_utilization": 1.0}
        for name, high in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= high:
                raise ConfigError(f"{name}={value!r} must be a number from 0 to {high:g}")
        if not self.gpu_memory_utilization:
            raise ConfigError("gpu_memory_utilization=0 leaves no memory for weights")


def engine_config(model: str, **options: Any) -> EngineConfig:
    """An `EngineConfig` from keyword options; unknown names are refused with the known ones listed."""
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown engine options {unknown}; known: {sorted(known)}")
    return EngineConfig(model=model, **options)


def resolve(
    config: EngineConfig, *, platform: str, native_bfloat16: bool, checkpoint_dtype: str, model_max_len: int
) -> EngineConfig:
    """Fills in every None and "auto" but the pool's size, which needs the device, and the kernels: ops choose them.

    Args:
      platform: "cpu", "gpu" or "tpu".
      native_bfloat16: whether the platform multiplies bfloat16 in hardware.
      checkpoint_dtype: dtype of the stored weights.
      model_max_len: the model's own context length.
    """
    if config.attention_implementation in ("gpu", "tpu") and config.attention_implementation != platform:
        raise ConfigError(
            f"attention_implementation={config.attention_implementation!r} does not run on this {platform}"
        )
    asked = config.dtype
    if asked == "auto":
        asked = checkpoint_dtype if checkpoint_dtype in DTYPES else "float32"
    dtype = asked
    if platform == "cpu" and (asked == "float16" or (asked == "bfloat16" and not native_bfloat16)):
        if asked == config.dtype:
            warnings.warn(f"this CPU has no {asked} instructions: weights become float32, to be faster", stacklevel=2)
        dtype = "float32"
    if platform == "tpu":
        if config.kv_cache_dtype == "float16":
            raise ConfigError("kv_cache_dtype='float16' does not exist on TPUs: use bfloat16 or float32")
        if asked == "float16":
            warnings.warn("TPUs have no float16: weights and KV cache become bfloat16", stacklevel=2)
            asked = dtype = "bfloat16"
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the model's own {model_max_len}")
    seqs = config.max_num_seqs or (32 if platform == "cpu" else 256)
    tokens = config.max_num_batched_tokens or max(seqs, min(256, 64 * seqs) if platform == "cpu" else 8192)
    if tokens < seqs:
        raise ConfigError(f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}")
    return dataclasses.replace(
        config,
        dtype=dtype,
        kv_cache_dtype=asked if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=config.max_model_len or model_max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
    )


def _check_types(config: EngineConfig) -> None:
    """Refuses None where it means nothing, and what is no text, flag, list or function; numbers have limits besides."""
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), str(field.type)
        if value is None and "None" not in kind:
            raise ConfigError(f"{field.name}=None must have a value")
        if kind == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{field.name}={value!r} must be True or False")
        if kind.startswith("str") and not isinstance(value, (str, os.PathLike, type(None))):
            raise ConfigError(f"{field.name}={value!r} must be text")
    if not isinstance(config.logits_processors, (tuple, list)):
        raise ConfigError(f"logits_processors={config.logits_processors!r} must be a list")
    if config.scheduling_key is not None and not callable(config.scheduling_key):
        raise ConfigError(f"scheduling_key={config.scheduling_key!r} must be a function of a request")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(str, allowed))}")
