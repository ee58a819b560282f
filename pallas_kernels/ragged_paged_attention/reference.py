"""The specification of ragged paged attention: one query at a time, over its row's whole page table, in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pool import to_float32


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    layer: jax.Array,
    sinks: jax.Array | None,
    k_scale: float | jax.Array | None,
    v_scale: float | jax.Array | None,
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    decode_only: bool,
) -> jax.Array:
    """See `pallas_kernels.ragged_paged_attention.api`; the arguments are taken as checked."""
    del decode_only  # holds for any batch
    tokens, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[3] // 2
    q, kv_lens, page_indices, cu_q_lens = map(jnp.asarray, (q, kv_lens, page_indices, cu_q_lens))
    pages = jnp.asarray(kv_pages)[layer[0]]

    def attend(token: jax.Array) -> jax.Array:
        rows = jnp.arange(kv_lens.shape[0])
        owners = (rows < num_seqs[0]) & (cu_q_lens[:-1] <= token) & (token < cu_q_lens[1:])
        row = jnp.argmax(owners)
        position = kv_lens[row] - (cu_q_lens[row + 1] - token)

        kv = to_float32(pages[page_indices[row]]).reshape(-1, kv_heads, 2, head_dim)
        key_positions = jnp.arange(kv.shape[0])
        seen = owners.any() & (key_positions <= position)
        if sliding_window is not None:
            seen &= key_positions > position - sliding_window
        kv = jnp.where(seen[:, None, None, None], kv, 0)  # also the values: 0 * NaN is NaN
        k = kv[:, :, 0] * (1 if k_scale is None else k_scale)
        v = kv[:, :, 1] * (1 if v_scale is None else v_scale)

        queries = q[token].astype(jnp.float32).reshape(kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("kgh,ckh->kgc", queries, k, precision="highest") * sm_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, -jnp.inf)
        sink = jnp.full(heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
        logits = jnp.concatenate([scores, sink.reshape(kv_heads, -1, 1)], axis=-1)
        weights = jnp.where(owners.any(), jax.nn.softmax(logits, axis=-1), 0)[..., :-1]
        return jnp.einsum("kgc,ckh->kgh", weights, v, precision="highest").reshape(heads, head_dim)

    return lax.map(attend, jnp.arange(tokens)).astype(q.dtype)
