"""Attention: a module that makes q, k, v, and a context that says what they attend to.

The context is an argument that travels through the layers, so one model serves from a paged cache (`PagedContext`)
and is scored or trained without any (`DenseContext`). Another cache is another class with `attend`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from jaxpaged.layers.axes import Axes, declare
from jaxpaged.layers.linear import project
from jaxpaged.layers.norm import declare_norm, rms_norm
from jaxpaged.layers.rope import apply_rope
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.write_kv import HeadNorm, write_kv


class AttentionContext(Protocol):
    """What the tokens of a step attend to. A pytree, so that it passes through jit."""

    def attend(
        self,
        qkv: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        *,
        layer: int,
        sm_scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        head_norm: HeadNorm | None = None,
    ) -> tuple[jax.Array, AttentionContext]:
        """Rotates q and k, remembers k and v, attends.

        Args:
          qkv: [T, K, G + 2, H] of each KV head its queries, key and value, before rotation.
          cos, sin: float32 [T, R/2], for the first R of H dims.
          layer: index of the layer, from 0.
          sm_scale: on the scores, before anything else.
          sliding_window: a token sees this many tokens, itself included; None: all before it.
          soft_cap: scores become soft_cap * tanh(scores / soft_cap).
          sinks: float32 [N], one more score per head that takes weight and gives no value.
          head_norm: norm of queries and keys before their rotation.

        Returns:
          [T, K * G, H], and the context for the next layer.
        """
        ...

    def add_rms_norm(
        self,
        x: jax.Array,
        delta: jax.Array,
        weight: jax.Array,
        eps: float,
        *,
        offset: float = 0.0,
        delta_weight: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """x + delta, both [T, D], and that under an RMS norm, see `pallas_kernels.add_rms_norm`.

        Here because the context knows whether the step is for serving or must be differentiable.
        """
        ...


@struct.dataclass
class PagedContext:
    """Rows of a step over the paged KV cache. Shapes and meanings are those of `ragged_paged_attention`.

    Attributes:
      kv_pages: [L, P, page_size, 2K, H].
      slot_mapping: i32[T], page * page_size + offset that token t is written to; padding writes to page 0.
      kv_lens, page_indices, cu_q_lens, num_seqs: i32[S], i32[S, max_pages], i32[S+1], i32[1].
      decode_only: a promise that no row has more than one query; None: promised where T == S.
      implementation: of the ops; None: the platform's best.
      interpret: Pallas implementations are interpreted, as tests on a CPU need.
      debug: the ops check what their integer arrays hold.
    """

    kv_pages: jax.Array
    slot_mapping: jax.Array
    kv_lens: jax.Array
    page_indices: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array
    decode_only: bool | None = struct.field(pytree_node=False, default=None)
    implementation: str | None = struct.field(pytree_node=False, default=None)
    interpret: bool = struct.field(pytree_node=False, default=False)
    debug: bool = struct.field(pytree_node=False, default=False)

    def attend(
        self,
        qkv: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        *,
        layer: int,
        sm_scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        head_norm: HeadNorm | None = None,
    ) -> tuple[jax.Array, PagedContext]:
        """See `AttentionContext.attend`; the pool is written in place when its buffer is donated."""
        index = jnp.array([layer], jnp.int32)  # data, not a static index: all layers share one compiled kernel
        with jax.named_scope("write_kv"):
            q, kv_pages = write_kv(
                qkv,
                cos,
                sin,
                self.kv_pages,
                self.slot_mapping,
                index,
                head_norm=head_norm,
                implementation=self.implementation,
                interpret=self.interpret,
                debug=self.debug,
            )
        with jax.named_scope("attend"):
            out = ragged_paged_attention(
                q,
                kv_pages,
                self.kv_lens,
                self.page_indices,
                self.cu_q_lens,
                self.num_seqs,
                index,
                sm_scale=sm_scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                sinks=sinks,
                decode_only=self.decode_only,
                implementation=self.implementation,
                interpret=self.interpret,
                debug=self.debug,
            )
        return out, dataclasses.replace(self, kv_pages=kv_pages)

    def add_rms_norm(
        self,
        x: jax.Array,
        delta: jax.Array,
        weight: jax.Array,
        eps: float,
        *,
        offset: float = 0.0,
        delta_weight: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """See `AttentionContext.add_rms_norm`."""
        return add_rms_norm(
            x,
            delta,
            weight,
            eps=eps,
            offset=offset,
            delta_weight=delta_weight,
            implementation=self.implementation,
            interpret=self.interpret,
        )


@struct.dataclass
class DenseContext:
    """Causal attention among the step's own tokens: no cache, differentiable, for scoring and training.

    Attributes:
      segment_ids: i32[T]; tokens attend only within their own segment, so several sequences can lie in one row.
        None: one sequence.
    """

    segment_ids: jax.Array | None = None

    def attend(
        self,
        qkv: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        *,
        layer: int,
        sm_scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        head_norm: HeadNorm | None = None,
    ) -> tuple[jax.Array, DenseContext]:
        """See `AttentionContext.attend`; memory grows with T^2."""
        del layer
        with jax.named_scope("attend"):
            qkv = qkv if head_norm is None else head_norm(qkv)
            q, k, v = qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[-1]), qkv[:, :, -2], qkv[:, :, -1]
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            mask = _causal_mask(q.shape[0], sliding_window, self.segment_ids)
            out = _dense_attention(q, k, v, mask, sm_scale=sm_scale, soft_cap=soft_cap, sinks=sinks)
        return out, self

    def add_rms_norm(
        self,
        x: jax.Array,
        delta: jax.Array,
        weight: jax.Array,
        eps: float,
        *,
        offset: float = 0.0,
        delta_weight: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """See `AttentionContext.add_rms_norm`; no Pallas kernel, which could not be differentiated."""
        return add_rms_norm(x, delta, weight, eps=eps, offset=offset, delta_weight=delta_weight, implementation="xla")


def _causal_mask(length: int, sliding_window: int | None, segment_ids: jax.Array | None) -> jax.Array:
    """bool [T, T]: whether query (row) sees key (column)."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    mask = distance >= 0
    if sliding_window is not None:
        mask &= distance < sliding_window
    if segment_ids is not None:
        mask &= segment_ids[:, None] == segment_ids[None, :]
    return mask


def _dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    sm_scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """q [T, N, H], k, v [T, K, H], mask bool [T, T]; scores and weights in float32."""
    t, n, h = q.shape
    kv = k.shape[1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "tkgh,skh->kgts", q.reshape(t, kv, n // kv, h), k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:  # one more column of scores, dropped after the softmax
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv, n // kv, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :t].astype(v.dtype)
    return jnp.einsum("kgts,skh->tkgh", weights, v, precision=precision).reshape(t, n, h)


class Attention(nn.Module):
    """Grouped-query attention with one fused q, k, v product.

    Attributes:
      layer: index of the layer.
      hidden_size, num_heads, num_kv_heads, head_dim: D, N, K, H.
      sm_scale, sliding_window, soft_cap: see `AttentionContext.attend`.
      qkv_bias, out_bias: whether the projections have biases.
      qk_norm: "head": RMS norm of every q and k head (Qwen3, Gemma 3); "full": of all heads together (OLMo 2).
      norm_eps, norm_offset: of these norms, see `rms_norm`.
    """

    layer: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    sliding_window: int | None = None
    soft_cap: float | None = None
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, context: AttentionContext
    ) -> tuple[jax.Array, AttentionContext]:
        """x [T, D] -> ([T, D], the context for the next layer)."""
        with jax.named_scope("qkv"):
            qkv = self._qkv(x)
        out, context = context.attend(
            qkv,
            cos,
            sin,
            layer=self.layer,
            sm_scale=self.sm_scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            head_norm=self._head_norm(),
        )
        width = self.num_heads * self.head_dim
        o = declare(self, "o", (self.hidden_size, width), ("embed", "heads"), self.dtype)
        bias = declare(self, "o_bias", (self.hidden_size,), ("embed",), self.dtype) if self.out_bias else None
        with jax.named_scope("out"):
            return project(out.reshape(-1, width), o, bias), context

    def _qkv(self, x: jax.Array) -> jax.Array:
        """x [T, D] -> [T, K, G + 2, H]."""
        kv, g, h = self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim
        shape, axes = (kv, g + 2, h), ("kv_heads", None, "head_dim")
        weight = declare(self, "qkv", (*shape, self.hidden_size), (*axes, "embed"), self.dtype)
        bias = declare(self, "qkv_bias", shape, axes, self.dtype) if self.qkv_bias else None
        y = project(x, weight, bias)
        if self.qk_norm != "full":
            return y
        q = self._norm(y[:, :, :g], self._norm_weight("q_norm", (kv, g, h), axes))
        k = self._norm(y[:, :, g], self._norm_weight("k_norm", (kv, h), ("kv_heads", "head_dim")))
        return jnp.concatenate([q, k[:, :, None], y[:, :, g + 1 :]], axis=2)

    def _head_norm(self) -> HeadNorm | None:
        if self.qk_norm != "head":
            return None
        q, k = (self._norm_weight(name, (self.head_dim,), ("head_dim",)) for name in ("q_norm", "k_norm"))
        return HeadNorm(q, k, self.norm_eps, self.norm_offset)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self.norm_eps, offset=self.norm_offset)

    def _norm_weight(self, name: str, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        return declare_norm(self, name, shape, self.dtype, offset=self.norm_offset, axes=axes)
