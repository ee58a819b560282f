import jax.numpy as jnp
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.device import kv_cache
from jaxpaged.errors import ConfigError


class Model:
    num_layers, num_kv_heads, head_dim = 2, 3, 8


def pages(**options) -> int:
    config = EngineConfig(**({"kv_cache_dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4} | options))
    return kv_cache.num_pages(config, Model(), step_bytes=0)


PAGE_BYTES = 2 * 16 * 2 * 3 * 8 * 4


def test_page_bytes_are_those_of_the_array():
    pool = kv_cache.empty_pages(kv_cache.abstract_pages(Model(), 3, 16, "float32"))
    assert pool.shape == (2, 3, 16, 6, 8)
    assert pool.nbytes == 3 * PAGE_BYTES == 3 * kv_cache.page_bytes(Model(), 16, "float32")


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "padded"),
    [
        (3, 64, "bfloat16", 8 * 128),
        (6, 192, "float32", 16 * 256),
        (1, 128, "int8", 4 * 128),
        (1, 96, "float32", 2 * 128),
    ],
)
def test_a_tpu_pads_pages(kv_heads, head_dim, dtype, padded):
    """As its compiler says that it does, for an array in row-major order."""
    model = Model()
    model.num_kv_heads, model.head_dim = kv_heads, head_dim
    expected = 2 * 16 * padded * jnp.dtype(dtype).itemsize
    assert kv_cache.page_bytes(model, 16, dtype, "tpu") == expected
    assert kv_cache.page_bytes(model, 16, dtype, "gpu") == expected * 2 * kv_heads * head_dim // padded


def test_no_more_than_all_rows_can_use():
    assert pages() == 4 * 64 + 1
    assert pages(max_num_seqs=1) == 64 + 1


def test_by_hand():
    assert pages(num_kv_blocks=10) == 11
    assert pages(kv_cache_bytes=200 * PAGE_BYTES) == 200
    assert pages(kv_cache_bytes=70 * PAGE_BYTES, max_model_len=512) == 70


def test_the_longest_sequence_that_fits():
    config = EngineConfig(kv_cache_dtype="float32", kv_cache_bytes=200 * PAGE_BYTES)
    assert kv_cache.longest_sequence(config, Model()) == 199 * 16
    assert kv_cache.longest_sequence(EngineConfig(num_kv_blocks=10), Model()) == 160


def test_too_small_for_one_sequence_says_by_how_much(monkeypatch):
    given = rf"kv_cache_bytes={40 * PAGE_BYTES} holds 40 blocks of {PAGE_BYTES} bytes.*needs 65.*give more"
    with pytest.raises(ConfigError, match=given):
        pages(kv_cache_bytes=40 * PAGE_BYTES)
    monkeypatch.setattr(kv_cache, "CPU_POOL_BYTES", 10 * PAGE_BYTES)
    with pytest.raises(ConfigError, match=r"the memory left for the KV cache holds 10 blocks.*give kv_cache_bytes"):
        pages()


@pytest.mark.parametrize(("name", "value"), [("num_kv_blocks", 2**31 - 1), ("kv_cache_bytes", 2**50)])
def test_larger_than_the_memory_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"{name}={value} makes a KV cache of \d+ bytes; the memory has \d+"):
        pages(max_model_len=2**20, max_num_seqs=2**16, **{name: value})
