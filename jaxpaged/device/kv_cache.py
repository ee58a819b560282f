"""The KV page array: its shape, and how many pages fit."""

from __future__ import annotations

import os
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from pallas_kernels import storage_dtype
from pallas_kernels.padding import power_of_two

CPU_POOL_BYTES = 1 << 30  # of host memory, unless told otherwise; fixed, so that compiled programs can be reused
_GRANULE = 64  # pages; what is free varies a little: this keeps the shape, and with it the programs, equal


class CacheShape(Protocol):
    """The part of a model's config that the cache depends on."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def page_bytes(model: CacheShape, page_size: int, dtype: str, platform: str | None = None) -> int:
    """Bytes of one page over all layers; `platform` as `jax.default_backend()` names it, None means that one."""
    heads, head_dim, itemsize = 2 * model.num_kv_heads, model.head_dim, jnp.dtype(dtype).itemsize
    if row_major(platform):  # in tiles of up to 8 x 128 words of 32 bits, which several narrow heads share
        heads = max(power_of_two(heads), 4 // itemsize) if heads <= 8 else -(-heads // 8) * 8
        head_dim = -(-head_dim // 128) * 128
    return model.num_layers * page_size * heads * head_dim * itemsize


def row_major(platform: str | None = None) -> bool:
    """Whether the pool must be held in row-major order, which XLA does by itself elsewhere.

    On TPUs XLA orders the axes such that it pads least. Kernels take row-major arrays, and a step would copy the pool.
    """
    return (platform or jax.default_backend()) == "tpu"


def pages_format() -> Format | None:
    """How the pool lies in this device's memory, as `jax.jit` takes it; None: as XLA likes."""
    if not row_major():
        return None
    return Format(Layout((0, 1, 2, 3, 4)), SingleDeviceSharding(jax.devices()[0]))


def abstract_pages(
    model: CacheShape, num_pages: int, page_size: int, dtype: str, platform: str | None = None
) -> jax.ShapeDtypeStruct:
    """A pool `[L, P, page_size, 2K, H]`: head 2k holds the keys of KV head k, head 2k + 1 its values.

    Where XLA cannot update an array of `dtype` in place, the pool holds its bits as integers.
    """
    shape = (model.num_layers, num_pages, page_size, 2 * model.num_kv_heads, model.head_dim)
    return jax.ShapeDtypeStruct(shape, storage_dtype(dtype, platform))


def empty_pages(pool: jax.ShapeDtypeStruct) -> jax.Array:
    """A pool of this shape and dtype on this device, zeroed."""
    order = pages_format()
    if order is None:
        return jnp.zeros(pool.shape, pool.dtype)
    return jax.jit(partial(jnp.zeros, pool.shape, pool.dtype), out_shardings=order)()


def known_before_weights() -> bool:
    """Whether the pool's size is known before the weights are placed. Elsewhere it is what they leave free."""
    return jax.default_backend() == "cpu"


def num_pages(config: EngineConfig, model: CacheShape, *, step_bytes: int) -> int:
    """Pages of the pool, page 0 (scratch) included.

    Args:
      config: resolved options.
      step_bytes: temporaries of the largest step, from the compiler.

    Raises:
      ConfigError: what was asked for, or is free, holds no sequence of `max_model_len` (`num_kv_blocks` may be so few);
        or it is more than all memory.
    """
    assert config.max_model_len is not None and config.max_num_seqs is not None
    page = page_bytes(model, config.block_size, config.kv_cache_dtype)
    per_sequence = -(-config.max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        asked, pages = f"num_kv_blocks={config.num_kv_blocks}", config.num_kv_blocks + 1
    else:
        given = config.kv_cache_bytes is not None
        asked = f"kv_cache_bytes={config.kv_cache_bytes}" if given else "the memory left for the KV cache"
        pages = min(_room(config, model, step_bytes), per_sequence * config.max_num_seqs + 1)
        if pages < per_sequence + 1:
            raise ConfigError(
                f"{asked} holds {max(pages, 0)} blocks of {page} bytes, but one sequence of "
                f"max_model_len={config.max_model_len} needs {per_sequence + 1}, of which one is scratch: "
                f"give {'more' if given else 'kv_cache_bytes'} or lower max_model_len"
            )
    if (memory := _memory_bytes()) is not None and pages * page > memory:
        raise ConfigError(f"{asked} makes a KV cache of {pages * page} bytes; the memory has {memory}")
    return pages


def longest_sequence(config: EngineConfig, model: CacheShape) -> int:
    """Tokens of the longest sequence that the pool can hold once the weights are placed."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks * config.block_size
    free = 0 if config.kv_cache_bytes is not None else _free_bytes(config, 0)
    return max(_room(config, model, step_bytes=free // 8) - 1, 0) * config.block_size


def _room(config: EngineConfig, model: CacheShape, step_bytes: int) -> int:
    """Pages that the memory holds: all that fit in what was asked for, or nearly all that fit in what is free."""
    page = page_bytes(model, config.block_size, config.kv_cache_dtype)
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // page
    pages = _free_bytes(config, step_bytes) // page
    return pages - pages % _GRANULE if pages > _GRANULE else pages


def _memory_bytes() -> int | None:
    """All memory that JAX has of the device, or all of the machine's if it is a CPU; None if it does not tell."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")


def _free_bytes(config: EngineConfig, step_bytes: int) -> int:
    """Device memory left for the pool."""
    device, memory = jax.devices()[0], _memory_bytes()
    if memory is None:
        raise ConfigError(f"device {device} does not tell its memory: give kv_cache_bytes or num_kv_blocks")
    if device.platform == "cpu":
        return min(CPU_POOL_BYTES, memory // 4)  # its temporaries come from the rest
    in_use = device.memory_stats()["bytes_in_use"]
    return int(memory * config.gpu_memory_utilization) - in_use - step_bytes
