"""The stack that all families share: embedding, blocks, final norm, logits."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpaged.layers.attention import Attention, AttentionContext
from jaxpaged.layers.axes import declare
from jaxpaged.layers.embed import embed_tokens, unembed
from jaxpaged.layers.mlp import MLP
from jaxpaged.layers.norm import declare_norm, rms_norm
from jaxpaged.layers.rope import rope_angles
from jaxpaged.models.config import ModelConfig


class Block(nn.Module):
    """One layer: what a family's residual structure is. Subclasses write `__call__` from these parts."""

    config: ModelConfig
    layer: int
    dtype: Any = jnp.bfloat16

    def attention(self) -> Attention:
        """The block's attention, parameters under "attn"."""
        c = self.config
        return Attention(
            layer=self.layer,
            hidden_size=c.hidden_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            sm_scale=c.sm_scale,
            qkv_bias=c.qkv_bias,
            out_bias=c.out_bias,
            qk_norm=c.qk_norm,
            norm_eps=c.norm_eps,
            norm_offset=c.norm_offset,
            sliding_window=c.sliding_windows[self.layer],
            soft_cap=c.attn_soft_cap,
            dtype=self.dtype,
            name="attn",
        )

    def mlp(self) -> MLP:
        """The block's feed-forward layer, parameters under "mlp"."""
        c = self.config
        return MLP(c.hidden_size, c.intermediate_size, c.activation, c.mlp_bias, self.dtype, name="mlp")

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        """x [T, D] under the RMS norm `name`."""
        c = self.config
        weight = declare_norm(self, name, (c.hidden_size,), self.dtype, offset=c.norm_offset)
        with jax.named_scope(name):
            return rms_norm(x, weight, c.norm_eps, offset=c.norm_offset)

    def add_norm(
        self, name: str, x: jax.Array, delta: jax.Array | None, context: AttentionContext
    ) -> tuple[jax.Array, jax.Array]:
        """x + delta, both [T, D], and that under the RMS norm `name`; no delta is zero."""
        if delta is None:
            return x, self.norm(name, x)
        c = self.config
        weight = declare_norm(self, name, (c.hidden_size,), self.dtype, offset=c.norm_offset)
        with jax.named_scope(name):
            return context.add_rms_norm(x, delta, weight, c.norm_eps, offset=c.norm_offset)

    def __call__(
        self, x: jax.Array, delta: jax.Array | None, cos: jax.Array, sin: jax.Array, context: AttentionContext
    ) -> tuple[jax.Array, jax.Array, AttentionContext]:
        """The layer leaves its last addition to the next one, which does it together with its norm.

        Args:
          x, delta: [T, D] each; the residual stream is their sum (the first layer gets no delta).
          cos, sin: float32 [T, R/2].
          context: what the tokens attend to.

        Returns:
          x and delta for the next layer, and its context.
        """
        raise NotImplementedError


class Decoder(nn.Module):
    """A decoder-only language model; a family is a subclass that names its `Block`.

    Layers are unrolled: a scan over stacked weights copies every weight slice each step on GPU.
    """

    config: ModelConfig
    dtype: Any = jnp.bfloat16
    block: ClassVar[type[Block]] = Block

    def setup(self) -> None:
        c = self.config
        self.embed = declare(self, "embed", (c.vocab_size, c.hidden_size), ("vocab", "embed"), self.dtype)
        self.layers = [self.block(config=c, layer=i, dtype=self.dtype) for i in range(c.num_layers)]
        self.final_norm = declare_norm(self, "final_norm", (c.hidden_size,), self.dtype, offset=c.norm_offset)
        if not c.tie_word_embeddings:
            self.lm_head = declare(self, "lm_head", (c.vocab_size, c.hidden_size), ("vocab", "embed"), self.dtype)

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, context: AttentionContext
    ) -> tuple[jax.Array, AttentionContext]:
        """Hidden states after the final norm.

        Args:
          token_ids: i32[T], each in [0, vocab_size).
          positions: i32[T], of each token in its own sequence.
          context: what the tokens attend to.

        Returns:
          [T, D] in the module's dtype, and the context with this step's keys and values.
        """
        c = self.config
        with jax.named_scope("embed"):
            x = embed_tokens(self.embed, token_ids, scale=c.embed_scale)
        with jax.named_scope("rope"):  # once per kind, not per layer
            angles = [rope_angles(rope, positions) for rope in c.ropes]
        delta = None
        for i, layer in enumerate(self.layers):
            cos, sin = angles[c.rope_of_layer[i]]
            x, delta, context = layer(x, delta, cos, sin, context)
        with jax.named_scope("final_norm"):
            if delta is None:
                return rms_norm(x, self.final_norm, c.norm_eps, offset=c.norm_offset), context
            return context.add_rms_norm(x, delta, self.final_norm, c.norm_eps, offset=c.norm_offset)[1], context

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> float32 [..., V], soft cap applied."""
        head = self.embed if self.config.tie_word_embeddings else self.lm_head
        with jax.named_scope("logits"):
            return unembed(hidden, head, soft_cap=self.config.final_soft_cap)
