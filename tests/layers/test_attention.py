"""Attention contexts against a loop over queries, and each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.attention import DenseContext, PagedContext
from jaxpaged.layers.rope import apply_rope

T, N, K, H, R = 12, 4, 2, 8, 4
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 3},
    "soft_cap": {"soft_cap": 0.7},
    "sinks": {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)},
    "all": {"sliding_window": 5, "soft_cap": 1.5, "sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)},
}


def make_inputs(seed: int = 0) -> tuple[jax.Array, ...]:
    """q, k, v, cos, sin."""
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.normal(size=(T, heads, H)), jnp.float32) for heads in (N, K, K))
    angle = rng.normal(size=(T, R // 2))
    return q, k, v, jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def fused(q, k, v, cos, sin) -> tuple:
    """What `attend` takes: q, k and v in one array."""
    return jnp.concatenate([q.reshape(T, K, -1, H), k[:, :, None], v[:, :, None]], axis=2), cos, sin


def looped(q, k, v, cos, sin, segments, *, sm_scale, sliding_window=None, soft_cap=None, sinks=None) -> np.ndarray:
    """The definition, one query at a time."""
    q, k = (np.asarray(apply_rope(x, cos, sin), np.float64) for x in (q, k))
    v, out = np.asarray(v, np.float64), np.zeros((T, N, H))
    for t in range(T):
        seen = [s for s in range(t + 1) if segments[s] == segments[t]]
        if sliding_window is not None:
            seen = [s for s in seen if s > t - sliding_window]
        for n in range(N):
            kv = n // (N // K)
            scores = k[seen, kv] @ q[t, n] * sm_scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[n]))
            out[t, n] = weights @ v[seen, kv] / total
    return out


@pytest.mark.parametrize("segments", [[0] * T, [0] * 5 + [1] * 7])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_dense_equals_the_definition(options: dict, segments: list[int]):
    inputs = make_inputs()
    context = DenseContext(jnp.array(segments) if any(segments) else None)
    out, after = context.attend(*fused(*inputs), layer=0, sm_scale=0.4, **options)
    np.testing.assert_allclose(out, looped(*inputs, segments, sm_scale=0.4, **options), atol=1e-5)
    assert after is context


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_paged_equals_dense(options: dict):
    _, k, v, cos, sin = inputs = make_inputs(1)
    pages = jnp.full((2, 4, 8, 2 * K, H), jnp.nan)
    slots = np.concatenate([np.arange(3 * 8, 4 * 8), np.arange(8, 8 + T - 8)]).astype(np.int32)  # pages 3, 1
    context = PagedContext(
        kv_pages=pages,
        slot_mapping=jnp.asarray(slots),
        kv_lens=jnp.array([T], jnp.int32),
        page_indices=jnp.array([[3, 1]], jnp.int32),
        cu_q_lens=jnp.array([0, T], jnp.int32),
        num_seqs=jnp.array([1], jnp.int32),
    )
    out, after = context.attend(*fused(*inputs), layer=1, sm_scale=0.4, **options)
    expected, _ = DenseContext().attend(*fused(*inputs), layer=1, sm_scale=0.4, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    stored = np.asarray(after.kv_pages[1]).reshape(-1, K, 2, H)[slots]
    np.testing.assert_allclose(stored[:, :, 0], apply_rope(k, cos, sin), atol=1e-6)
    np.testing.assert_array_equal(stored[:, :, 1], v)
    assert np.isnan(after.kv_pages[0]).all()  # another layer's pages are untouched


def test_contexts_pass_through_jit():
    context = PagedContext(*(jnp.zeros(1, jnp.int32) for _ in range(6)), implementation="xla")
    again = jax.jit(lambda c: c)(context)
    assert again.implementation == "xla" and again.decode_only is None
