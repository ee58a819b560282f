"""Model families, found by Hugging Face's `model_type`: one file each, plain functions to use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from jaxpaged.checkpoint.table import CheckpointTable
from jaxpaged.errors import UnknownModelTypeError
from jaxpaged.layers.attention import DenseContext
from jaxpaged.layers.axes import mesh_spec
from jaxpaged.models import gemma2, gemma3, llama, mistral, olmo2, phi3, qwen2, qwen3
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder


@dataclass(frozen=True)
class ModelFamily:
    """What the engine needs of a family.

    Attributes:
      config_from_hf: reads config.json; raises ModelError or UnsupportedError naming the value it cannot use.
      module: takes `config=` and `dtype=`.
      table: how a checkpoint's tensors become the module's parameters.
    """

    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    module: type[Decoder]
    table: Callable[[ModelConfig], CheckpointTable]


FAMILIES: dict[str, ModelFamily] = {
    "gemma2": ModelFamily(gemma2.config_from_hf, gemma2.Gemma2, gemma2.table),
    "gemma3": ModelFamily(gemma3.config_from_hf, gemma3.Gemma3, gemma3.table),
    "gemma3_text": ModelFamily(gemma3.config_from_hf, gemma3.Gemma3, gemma3.table),
    "llama": ModelFamily(llama.config_from_hf, llama.Llama, llama.table),
    "mistral": ModelFamily(mistral.config_from_hf, mistral.Mistral, mistral.table),
    "olmo2": ModelFamily(olmo2.config_from_hf, olmo2.Olmo2, olmo2.table),
    "phi3": ModelFamily(phi3.config_from_hf, phi3.Phi3, phi3.table),
    "qwen2": ModelFamily(qwen2.config_from_hf, qwen2.Qwen2, qwen2.table),
    "qwen3": ModelFamily(qwen3.config_from_hf, qwen3.Qwen3, qwen3.table),
}
"""Hugging Face's `model_type` -> the family."""


def get_family(model_type: str) -> ModelFamily:
    """The family of a config's `model_type`; raises UnknownModelTypeError."""
    if model_type not in FAMILIES:
        raise UnknownModelTypeError(f"unknown model_type {model_type!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def abstract_params(module: Decoder) -> Any:
    """The parameters' shapes and dtypes: a nested dict of ShapeDtypeStruct. Computes nothing."""
    return nn.meta.unbox(_boxed_params(module))


def param_specs(module: Decoder) -> Any:
    """The mesh axes of every parameter: a PartitionSpec for each leaf of `abstract_params`."""
    specs = nn.get_partition_spec(_boxed_params(module))
    return jax.tree.map(mesh_spec, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def random_params(module: Decoder, seed: int = 0) -> Any:
    """Random parameters on the default device: norms are the identity, the rest uniform with deviation 0.02.

    The same seed gives the same parameters, under jit too but for the last bit.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(module))
    key = jax.random.key(seed)
    values = []
    for index, (path, leaf) in enumerate(leaves):
        if path[-1].key.endswith("norm"):
            values.append(jnp.full(leaf.shape, 1.0 - module.config.norm_offset, leaf.dtype))
        else:
            values.append(_uniform(key, index, leaf.shape, leaf.dtype))
    return jax.tree_util.tree_unflatten(tree, values)


@partial(jax.jit, static_argnums=(2, 3))
def _uniform(key: jax.Array, index: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Compiled once per shape, not once per layer; a third of the time that a normal distribution takes on CPU."""
    bound = 0.02 * 3**0.5
    return jax.random.uniform(jax.random.fold_in(key, index), shape, dtype, -bound, bound)


def _boxed_params(module: Decoder) -> Any:
    """As `module.init` would make them, of which one layer is traced: all have parameters of the same shapes."""
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    one = module.clone(config=module.config.first_layers(1))
    params = dict(jax.eval_shape(one.init, jax.random.key(0), token, token, DenseContext())["params"])
    layer = params.pop("layers_0")
    return params | {f"layers_{i}": layer for i in range(module.config.num_layers)}
