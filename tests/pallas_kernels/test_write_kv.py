"""write_kv against numpy, its implementations against each other, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import HeadNorm, write_kv

IMPLEMENTATIONS = ("reference", "xla", "gpu", "tpu")
TOKENS, GROUP, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES, LAYERS, LAYER = 12, 3, 2, 16, 8, 9, 3, 1
LIVE = 10


def make_inputs(seed: int, dtype="float32", pool_dtype="float32", rotary: int = HEAD_DIM) -> list:
    rng = np.random.default_rng(seed)
    angles = rng.uniform(-9, 9, (TOKENS, rotary // 2)).astype(np.float32)
    slots = np.concatenate([rng.permutation(np.arange(PAGE_SIZE, PAGES * PAGE_SIZE))[:LIVE], [3, 3]])
    return [
        jnp.asarray(rng.standard_normal((TOKENS, KV_HEADS, GROUP + 2, HEAD_DIM), np.float32)).astype(dtype),
        jnp.cos(angles),
        jnp.sin(angles),
        jnp.asarray(rng.integers(0, 100, (LAYERS, PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM))).astype(pool_dtype),
        jnp.asarray(slots, jnp.int32),
        jnp.array([LAYER], jnp.int32),
    ]


def split(qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [T, N, H], k and v [T, K, H]."""
    return qkv[:, :, :GROUP].reshape(TOKENS, KV_HEADS * GROUP, HEAD_DIM), qkv[:, :, GROUP], qkv[:, :, GROUP + 1]


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Pairs (i, i + R/2) as complex numbers, turned by exp(i * angle)."""
    half = cos.shape[1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rotary", [0, 8, HEAD_DIM])
def test_rotates_and_writes(rotary, implementation):
    inputs = make_inputs(seed=rotary, rotary=rotary)
    qkv, cos, sin, pool, slots, _ = (np.asarray(x) for x in inputs)
    q, k, v = split(qkv)
    rotated, written = write_kv(*inputs, implementation=implementation, interpret=True)
    np.testing.assert_allclose(rotated, rotate(q, cos, sin), atol=1e-5)

    want = pool.copy()
    rows = want[LAYER].reshape(-1, 2 * KV_HEADS, HEAD_DIM)
    rows[slots[:LIVE], 0::2] = rotate(k, cos, sin)[:LIVE]
    rows[slots[:LIVE], 1::2] = v[:LIVE]
    np.testing.assert_allclose(written[:, 1:], want[:, 1:], atol=1e-5)
    others = [layer for layer in range(LAYERS) if layer != LAYER]
    np.testing.assert_array_equal(np.asarray(written)[others], pool[others])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("rotary", "offset"), [(0, 0.0), (8, 1.0), (HEAD_DIM, 0.0)])
def test_norms_heads_before_the_rotation(rotary, offset, implementation):
    """Queries and keys by weights of their own; values pass."""
    inputs = make_inputs(seed=rotary, rotary=rotary)
    weights = np.random.default_rng(9).standard_normal((2, HEAD_DIM), np.float32)
    norm = HeadNorm(jnp.asarray(weights[0]), jnp.asarray(weights[1]), eps=1e-3, offset=offset)
    rotated, written = write_kv(*inputs, head_norm=norm, implementation=implementation, interpret=True)

    qkv, cos, sin, _, slots, _ = (np.asarray(x) for x in inputs)
    q, k, v = split(qkv)
    q, k = (
        x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * (w + offset) for x, w in zip((q, k), weights, strict=True)
    )
    np.testing.assert_allclose(rotated, rotate(q, cos, sin), atol=2e-5)
    rows = np.asarray(written)[LAYER].reshape(-1, 2 * KV_HEADS, HEAD_DIM)[slots[:LIVE]]
    np.testing.assert_allclose(rows[:, 0::2], rotate(k, cos, sin)[:LIVE], atol=2e-5)
    np.testing.assert_array_equal(rows[:, 1::2], v[:LIVE])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "error"),
    [
        ("bfloat16", "bfloat16", 2**-7),
        ("bfloat16", "uint16", 2**-7),
        ("float16", "float16", 2**-10),
        ("float32", "float8_e4m3fn", 2**-3),
        ("float32", "float8_e5m2", 2**-2),
    ],
)
def test_stores_in_the_dtype_of_the_pool(dtype, pool_dtype, error, implementation):
    inputs = make_inputs(3, dtype, "float32" if pool_dtype == "uint16" else pool_dtype)
    inputs[3] = inputs[3].astype(pool_dtype)
    if implementation == "tpu" and pool_dtype == "float16":
        with pytest.raises(NotImplementedError, match="float16"):
            write_kv(*inputs, implementation=implementation, interpret=True)
        return
    rotated, written = write_kv(*inputs, k_scale=0.5, v_scale=2.0, implementation=implementation, interpret=True)
    assert rotated.dtype == dtype and written.dtype == pool_dtype
    qkv, cos, sin, _, slots, _ = (np.asarray(x, np.float32) for x in inputs)
    _, k, v = split(qkv)
    stored = np.asarray(written)
    stored = (stored.view(jnp.bfloat16) if pool_dtype == "uint16" else stored).astype(np.float32)
    rows = stored[LAYER].reshape(-1, 2 * KV_HEADS, HEAD_DIM)[slots[:LIVE].astype(int)]
    np.testing.assert_allclose(rows[:, 0::2] * 0.5, rotate(k, cos, sin)[:LIVE], rtol=error, atol=0.02)
    np.testing.assert_allclose(rows[:, 1::2] * 2.0, v[:LIVE], rtol=error, atol=0.02)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_is_rounded_and_held_in_range(implementation):
    inputs = make_inputs(4, pool_dtype="int8", rotary=0)
    inputs[0] = jnp.full_like(inputs[0], 1e6).at[0].set(-0.6)
    _, written = write_kv(*inputs, v_scale=1.0, implementation=implementation, interpret=True)
    rows = np.asarray(written)[LAYER].reshape(-1, 2 * KV_HEADS, HEAD_DIM)[np.asarray(inputs[4])]
    assert (rows[0, 1::2] == -1).all() and (rows[1:LIVE, 1::2] == 127).all()


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, None, "qkv must be an array, got None"),
        (0, jnp.zeros((TOKENS, 5 * HEAD_DIM)), r"\(12, 80\)"),
        (0, jnp.zeros((TOKENS, KV_HEADS, 2, HEAD_DIM)), r"\(12, 2, 2, 16\)"),
        (0, jnp.zeros((TOKENS, 3, GROUP + 2, HEAD_DIM)), r"\(3, 16\) and \(2, 16\)"),
        (0, jnp.zeros((TOKENS, KV_HEADS, GROUP + 2, HEAD_DIM), jnp.int32), "int32"),
        (1, jnp.zeros((TOKENS, HEAD_DIM)), r"\(12, 16\)"),
        (2, jnp.zeros((TOKENS, HEAD_DIM // 2), jnp.bfloat16), "bfloat16"),
        (3, jnp.zeros((LAYERS, PAGES, 7, 2 * KV_HEADS, HEAD_DIM)), "7"),
        (3, jnp.zeros((LAYERS, PAGES, PAGE_SIZE, 2 * KV_HEADS, 32)), r"\(2, 16\) and \(2, 32\)"),
        (4, jnp.zeros((TOKENS - 1,), jnp.int32), r"\(11,\)"),
        (4, jnp.zeros((TOKENS,), jnp.uint8), "uint8"),
        (5, jnp.zeros((), jnp.int32), r"\(\)"),
    ],
)
def test_bad_arguments_are_refused_by_value(index, value, message):
    inputs = make_inputs(0)
    inputs[index] = value
    with pytest.raises(ValueError, match=message):
        write_kv(*inputs)


def test_a_norm_of_another_width_is_refused():
    norm = HeadNorm(jnp.ones(HEAD_DIM), jnp.ones(HEAD_DIM - 1), eps=1e-6)
    with pytest.raises(ValueError, match=r"head_norm.k must have shape \(16,\), got \(15,\)"):
        write_kv(*make_inputs(0), head_norm=norm)


def test_missing_implementations_are_named():
    with pytest.raises(NotImplementedError, match="gpu_hopper"):
        write_kv(*make_inputs(0), implementation="gpu_hopper")
