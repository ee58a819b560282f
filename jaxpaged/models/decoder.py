"""The stack that all families share: embedding, blocks, final norm, logits."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

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


class Residual(NamedTuple):
    """The residual stream between two parts of the stack: `x`, to which `delta` is still to be added.

    What a part computes is left to the next one, which adds it together with its norm.

    Attributes:
      x, delta: [T, D]; no delta is zero.
      delta_weight: [D], of the norm that delta gets before it is added; None: it is added as it is.
    """

    x: jax.Array
    delta: jax.Array | None = None
    delta_weight: jax.Array | None = None


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

    def norm_weight(self, name: str) -> jax.Array:
        """The weight [D] of the RMS norm `name`."""
        c = self.config
        return declare_norm(self, name, (c.hidden_size,), self.dtype, offset=c.norm_offset)

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        """x [T, D] under the RMS norm `name`."""
        weight = self.norm_weight(name)
        with jax.named_scope(name):
            return rms_norm(x, weight, self.config.norm_eps, offset=self.config.norm_offset)

    def add_norm(self, name: str, residual: Residual, context: AttentionContext) -> tuple[jax.Array, jax.Array]:
        """The sum of the residual stream [T, D], and that under the RMS norm `name`."""
        with jax.named_scope(name):
            return add_norm(residual, self.norm_weight(name), self.config, context)

    def __call__(
        self, residual: Residual, cos: jax.Array, sin: jax.Array, context: AttentionContext
    ) -> tuple[Residual, AttentionContext]:
        """The layer's sum with the residual stream, of which the last addition is left to whoever comes next.

        Args:
          residual: without delta for the first layer.
          cos, sin: float32 [T, R/2].
          context: what the tokens attend to.

        Returns:
          The residual stream and the context for the next layer.
        """
        raise NotImplementedError


def add_norm(
    residual: Residual, weight: jax.Array, config: ModelConfig, context: AttentionContext
) -> tuple[jax.Array, jax.Array]:
    """The sum of the residual stream [T, D], and that under the RMS norm of `weight` [D]."""
    x, delta, delta_weight = residual
    eps, offset = config.norm_eps, config.norm_offset
    if delta is None:
        return x, rms_norm(x, weight, eps, offset=offset)
    return context.add_rms_norm(x, delta, weight, eps, offset=offset, delta_weight=delta_weight)


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
        residual = Residual(x)
        for i, layer in enumerate(self.layers):
            cos, sin = angles[c.rope_of_layer[i]]
            residual, context = layer(residual, cos, sin, context)
        with jax.named_scope("final_norm"):
            return add_norm(residual, self.final_norm, c, context)[1], context

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> float32 [..., V], soft cap applied."""
        head = self.embed if self.config.tie_word_embeddings else self.lm_head
        with jax.named_scope("logits"):
            return unembed(hidden, head, soft_cap=self.config.final_soft_cap)
