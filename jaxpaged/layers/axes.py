"""Weights and their axes: each is declared once, with logical axes; one table says which mesh axis carries them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec

Axes = tuple[str | None, ...]

MESH_AXES: Mapping[str, str | None] = {
    "kv_heads": "tp",  # a KV head with its group of query heads
    "heads": "tp",  # query heads times head dim, grouped by KV head
    "ffn": "tp",
    "vocab": "tp",
    "embed": None,
    "head_dim": None,
}
"""Logical axis -> mesh axis; None is replicated."""


def declare(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    axes: Axes,
    dtype: Any,
    init: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """The parameter `name` of `module`, with its logical axes as metadata.

    Args:
      shape: one size per axis.
      axes: one logical axis (a key of `MESH_AXES`) or None per axis of `shape`.
      init: initializer `(key, shape, dtype)`; by default normal with standard deviation 0.02.
    """
    assert len(shape) == len(axes), (name, shape, axes)
    init = init or nn.initializers.normal(0.02)
    return cast(jax.Array, module.param(name, nn.with_logical_partitioning(init, axes), tuple(shape), dtype))


def mesh_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The mesh axes that carry a weight with these logical axes."""
    return PartitionSpec(*(None if axis is None else MESH_AXES[axis] for axis in axes))
