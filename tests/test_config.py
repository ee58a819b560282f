import warnings

import pytest

from jaxpaged.config import EngineConfig, engine_config, resolve
from jaxpaged.errors import ConfigError

WHOLE_NUMBERS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks", "kv_cache_bytes",
    "max_logprobs", "max_num_queued_requests", "tensor_parallel_size",
)  # fmt: skip


def resolved(config=EngineConfig(), **facts):  # noqa: B008 - frozen
    facts = {"platform": "cpu", "native_bfloat16": True, "checkpoint_dtype": "bfloat16", "model_max_len": 2048} | facts
    return resolve(config, **facts)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_kernels_of_another_platform_are_refused(platform):
    with pytest.raises(ConfigError, match=f"'gpu' does not run on this {platform}"):
        resolved(EngineConfig(attention_implementation="gpu"), platform=platform)
    assert resolved(EngineConfig(attention_implementation="xla"), platform=platform).attention_implementation == "xla"


def test_nothing_is_left_open_but_the_pool():
    config = resolved()
    assert config.dtype == "bfloat16"
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (2048, 32, 256)
    assert resolved(platform="gpu").max_num_seqs == 256


@pytest.mark.parametrize(
    ("asked", "stored", "native", "expected"),
    [
        ("auto", "bfloat16", True, "bfloat16"),
        ("auto", "bfloat16", False, ("float32", "bfloat16")),
        ("auto", "float32", True, "float32"),
        ("auto", "float16", False, ("float32", "float16")),
        ("auto", "float8_e4m3fn", True, "float32"),
        ("bfloat16", "float32", True, "bfloat16"),
    ],
)
def test_dtype(asked, stored, native, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = resolved(EngineConfig(dtype=asked), checkpoint_dtype=stored, native_bfloat16=native)
    expected = expected if isinstance(expected, tuple) else (expected, expected)
    assert (config.dtype, config.kv_cache_dtype) == expected


def test_kv_cache_dtype_by_hand():
    config = resolved(EngineConfig(dtype="float32", kv_cache_dtype="bfloat16"))
    assert (config.dtype, config.kv_cache_dtype) == ("float32", "bfloat16")
    with pytest.raises(ConfigError, match="fp3"):
        EngineConfig(kv_cache_dtype="fp3")


@pytest.mark.parametrize(("asked", "stored"), [("auto", "float16"), ("float16", "float32")])
def test_float16_becomes_bfloat16_on_a_tpu(asked, stored):
    with pytest.warns(UserWarning, match="TPUs have no float16"):
        config = resolved(EngineConfig(dtype=asked), platform="tpu", checkpoint_dtype=stored)
    assert (config.dtype, config.kv_cache_dtype) == ("bfloat16", "bfloat16")
    assert resolved(EngineConfig(dtype=asked), platform="gpu", checkpoint_dtype="float16").dtype == "float16"
    with pytest.raises(ConfigError, match="kv_cache_dtype='float16' does not exist on TPUs"):
        resolved(EngineConfig(kv_cache_dtype="float16"), platform="tpu")


def test_bfloat16_without_hardware_says_what_it_does():
    with pytest.warns(UserWarning, match="no bfloat16 instructions"):
        config = resolved(EngineConfig(dtype="bfloat16"), native_bfloat16=False)
    assert (config.dtype, config.kv_cache_dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "int4"),
        ({"block_size": 12}, "12"),
        ({"block_size": 0}, "0"),
        ({"max_decode_steps": 17, "block_size": 16}, "max_decode_steps=17 must be at most block_size=16"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"kv_cache_bytes": 1.5}, "1.5"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
        ({"gpu_memory_utilization": float("nan")}, "nan"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization='0.5' must be a number"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0"),
        ({"enable_prefix_caching": "false"}, "enable_prefix_caching='false' must be True or False"),
        *(({name: None}, f"{name}=None must") for name in ("overlap", "seed", "block_size", "max_decode_steps")),
        ({"tokenizer": 3}, "tokenizer=3 must be text"),
        ({"seed": "x"}, "seed='x'"),
        ({"seed": 2**70}, f"seed={2**70}"),
        ({"logits_processors": "a:b"}, "logits_processors='a:b' must be a list"),
        ({"scheduling_key": 3}, "scheduling_key=3"),
        ({"attention_implementation": "magic"}, "magic"),
        ({"strict": True, "warmup": False}, "strict"),
        ({"max_seqs": 3}, r"max_seqs.*max_num_seqs"),
        *(({name: 10**18}, rf"{name}={10**18} must be at most \d+$") for name in WHOLE_NUMBERS),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        engine_config("demo", **options)


def test_options_that_contradict():
    with pytest.raises(ConfigError, match=r"max_model_len=4096 exceeds.*2048"):
        resolved(EngineConfig(max_model_len=4096))
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=8.*max_num_seqs=16"):
        resolved(EngineConfig(max_num_seqs=16, max_num_batched_tokens=8))
