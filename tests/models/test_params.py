"""Parameters without a checkpoint: shapes, mesh axes, random values; and what a compiled step does with them."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from jaxpaged.layers.attention import DenseContext
from jaxpaged.models import abstract_params, get_family, param_specs, random_params
from jaxpaged.models.decoder import Decoder
from tests.models.golden_cases import CASES
from tests.models.paged import QUICK_COMPILE, dense_logits


def make_module(name: str = "llama", dtype=jnp.float32) -> Decoder:
    family = get_family(CASES[name].config["model_type"])
    return family.module(config=family.config_from_hf(CASES[name].config), dtype=dtype)


def test_abstract_params_are_plain_shapes():
    params = abstract_params(make_module(dtype=jnp.bfloat16))
    assert params["layers_1"]["attn"]["qkv"] == jax.ShapeDtypeStruct((2, 4, 16, 64), jnp.bfloat16)
    assert params["layers_1"]["mlp"]["gate_up"].shape == (2, 96, 64)
    assert params["lm_head"].shape == params["embed"].shape == (128, 64)
    assert "lm_head" not in abstract_params(make_module("qwen2"))  # tied


@pytest.mark.parametrize("name", ["llama_bias_tied", "olmo2"])
def test_every_parameter_has_mesh_axes(name: str):
    module = make_module(name)
    specs = param_specs(module)
    ranks = jax.tree.map(lambda leaf: len(leaf.shape), abstract_params(module))
    assert jax.tree.map(len, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)) == ranks
    assert specs["layers_0"]["attn"]["qkv"] == PartitionSpec("tp", None, None, None)
    assert specs["layers_0"]["attn"]["o"] == PartitionSpec(None, "tp")


def test_random_params_repeat_and_differ_by_seed():
    module = make_module("gemma2", jnp.bfloat16)
    first, again, other = random_params(module, 1), random_params(module, 1), random_params(module, 2)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, abstract_params(module))
    embed = np.asarray(first["embed"], np.float32)
    assert embed.std() == pytest.approx(0.02, rel=0.05) and first["embed"].dtype == jnp.bfloat16
    assert not np.array_equal(embed, np.asarray(other["embed"], np.float32))
    qkv = [np.asarray(first[f"layers_{i}"]["attn"]["qkv"], np.float32) for i in range(2)]
    assert not np.array_equal(*qkv)
    assert (np.asarray(first["final_norm"], np.float32) == 0).all()  # 1 is added to Gemma's norms


def test_random_params_work_under_jit():
    module = make_module()
    traced = jax.jit(lambda: random_params(module, 3), compiler_options=QUICK_COMPILE)()
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-8)  # XLA may fuse the scaling: one bit
    jax.tree.map(close, traced, random_params(module, 3))


def test_gradients_flow_through_dense_attention():
    """The derivative along a random direction equals the difference quotient, and no weight is left out."""
    module = make_module("gemma2")
    params = jax.tree.map(lambda leaf: leaf * 5, random_params(module, 0))
    ids = jnp.arange(12, dtype=jnp.int32)

    def loss(params):
        logits = jax.nn.log_softmax(dense_logits(module, params, ids))
        return -jnp.mean(jnp.take_along_axis(logits[:-1], ids[1:, None], axis=-1))

    value_and_grad = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK_COMPILE)
    _, grads = value_and_grad(params)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)

    def along(step: float) -> jax.Array:
        return value_and_grad(jax.tree.map(lambda p, d: p + step * d, params, direction))[0]

    slope = sum(float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (grads, direction)), strict=True))
    assert (along(1e-3) - along(-1e-3)) / 2e-3 == pytest.approx(slope, rel=2e-2)


def test_packed_segments_equal_separate_sequences():
    module = make_module()
    params = random_params(module, 0)
    ids = np.random.default_rng(0).integers(0, 128, 20).astype(np.int32)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def hidden(ids, positions, segments):
        return module.apply({"params": params}, ids, positions, DenseContext(segments))[0]

    lengths = [8, 12]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    packed = hidden(ids, positions, np.repeat([0, 1], lengths))
    other = np.concatenate([(ids[:8] + 1) % 128, ids[8:]])  # another first sequence does not change the second
    np.testing.assert_allclose(packed[8:], hidden(other, positions, np.repeat([0, 1], lengths))[8:], atol=1e-6)
    assert np.abs(packed[8:] - hidden(ids, positions, np.zeros(20, int))[8:]).max() > 1e-3


def test_a_layer_is_four_products_and_weights_are_used_where_they_lie():
    """qkv, out, gate-up, down, and attention's own two; nothing of a weight's size is copied or transposed."""
    module = make_module()
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    run = jax.jit(lambda params, ids: module.apply({"params": params}, ids, ids, DenseContext())[0])
    lowered = run.lower(abstract_params(module), ids)
    text = lowered.as_text()
    assert text.count("stablehlo.dot_general") == 2 * (4 + 2)
    assert text.count("stablehlo.cosine") == 1  # once a step, not once a layer
    smallest = min(leaf.size for leaf in jax.tree.leaves(abstract_params(module)["layers_0"]) if leaf.ndim > 1)
    moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", lowered.compile().as_text())
    assert all(math.prod(map(int, shape.split(","))) < smallest for shape in moved), moved


@pytest.mark.parametrize("name", sorted(CASES))
def test_one_layer_stands_for_all(name: str):
    """What `abstract_params` makes of one traced layer is what all of them would be."""
    module, token = make_module(name), jax.ShapeDtypeStruct((1,), jnp.int32)
    whole = jax.eval_shape(module.init, jax.random.key(0), token, token, DenseContext())["params"]
    assert abstract_params(module) == nn.meta.unbox(whole)
