"""Every implementation of the kernels inside a model: what it wrote in one step is what it reads in the next."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.attention import DenseContext
from jaxpaged.models import llama
from tests.models.paged import PagedModel, dense_logits

NEW_TOKENS = 20
CONFIG = llama.config_from_hf(
    {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 64,
    }
)


@pytest.fixture(scope="module")
def model():
    """A module and weights wide enough for its greedy tokens to depend on the whole context."""
    module = llama.Llama(CONFIG, dtype=jnp.float32)
    ids = jnp.zeros(1, jnp.int32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), ids, ids, DenseContext())["params"]
    random = np.random.default_rng(0)

    def draw(x: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.ones(x.shape, np.float32) if len(x.shape) == 1 else random.normal(size=x.shape, scale=0.3)

    return module, jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)


@pytest.fixture(scope="module")
def recomputed(model):
    """Greedy tokens, the whole sequence computed anew for each."""
    module, params = model
    logits = jax.jit(lambda ids: dense_logits(module, params, ids))
    tokens = list(np.random.default_rng(3).integers(0, CONFIG.vocab_size, 11))
    for _ in range(NEW_TOKENS):
        padded = np.zeros(32, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(np.argmax(logits(jnp.asarray(padded))[len(tokens) - 1])))
    assert len(set(tokens[11:])) > 5, "the text must not be trivial"
    return tokens


@pytest.mark.parametrize("implementation", ["reference", "xla", "gpu", "tpu"])
def test_cached_greedy_tokens_equal_full_recomputation(model, recomputed, implementation):
    """The prompt goes in as two chunks, then one token at a time, beside another sequence."""
    paged = PagedModel(*model, tokens=12, implementation=implementation)
    prompt, other = np.array(recomputed[:11]), np.arange(5)
    paged.feed([(1, other)])
    paged.feed([(0, prompt[:7])])
    logits = paged.feed([(1, other[:1]), (0, prompt[7:])])[1][-1]
    tokens = [int(np.argmax(logits))]
    while len(tokens) < NEW_TOKENS:
        tokens.append(int(np.argmax(paged.feed([(0, np.array(tokens[-1:])), (1, other[1:2])], decode=True)[0][-1])))
    assert tokens == recomputed[11:]
