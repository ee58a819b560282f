"""What a model is, read from its Hugging Face config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ModelError, UnsupportedError
from jaxpaged.layers.mlp import ACTIVATIONS
from jaxpaged.layers.rope import RopeConfig, rope_from_hf, with_context_len


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Hashable, so it can be a static argument of a jitted function.

    Attributes:
      model_type: Hugging Face's name of the family.
      max_position_embeddings: the config's context length; see `max_context_len`.
      norm_eps, norm_offset: of every RMS norm; the offset is added to its weight (1 for Gemma).
      activation: a key of `jaxpaged.layers.mlp.ACTIVATIONS`.
      tie_word_embeddings: the logits use the embedding; there is no lm_head.
      ropes: the kinds of rotary embedding in the model, usually one.
      rope_of_layer: index into `ropes` of each layer.
      sliding_windows: of each layer, in tokens; None: all.
      sm_scale: on the attention scores.
      qkv_bias, out_bias, mlp_bias: which projections have biases.
      qk_norm: see `jaxpaged.layers.attention.Attention`.
      attn_soft_cap, final_soft_cap: on attention scores and on logits; None: none.
      embed_scale: on the embeddings; None: none.
      checkpoint_prefix: what the checkpoint's tensor names begin with ("language_model." inside a larger model).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig, ...]
    rope_of_layer: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]
    sm_scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    norm_offset: float = 0.0
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embed_scale: float | None = None
    checkpoint_prefix: str = ""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            _positive(name, getattr(self, name))
        _positive("head_dim", self.head_dim)
        _positive("max_position_embeddings", self.max_position_embeddings)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads={self.num_heads} is no multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"unknown activation {self.activation!r}; known: {', '.join(sorted(ACTIVATIONS))}")
        for window in self.sliding_windows:
            if window is not None:
                _positive("sliding_window", window)
        assert len(self.rope_of_layer) == len(self.sliding_windows) == self.num_layers

    @property
    def max_context_len(self) -> int:
        """Longest sequence the model is meant for, its rope scaling included."""
        return max(self.max_position_embeddings, min(rope.max_context_len for rope in self.ropes))

    def for_context(self, max_model_len: int) -> ModelConfig:
        """The same model in an engine whose longest sequence is `max_model_len` (see `jaxpaged.layers.rope`)."""
        ropes = tuple(with_context_len(rope, max_model_len) for rope in self.ropes)
        return dataclasses.replace(self, ropes=ropes)

    def first_layers(self, count: int) -> ModelConfig:
        """The model's first layers alone."""
        rope_of_layer, windows = self.rope_of_layer[:count], self.sliding_windows[:count]
        return dataclasses.replace(self, num_layers=count, rope_of_layer=rope_of_layer, sliding_windows=windows)


def read_config(hf: Mapping[str, Any], **facts: Any) -> ModelConfig:
    """The fields that config.json names alike in every family; `facts` are the family's own and win.

    Raises ModelError for missing or impossible values, UnsupportedError for features that no family here has.
    """
    refuse_unsupported(hf)
    layers = layer_count(hf)
    hidden, heads = require(hf, "hidden_size"), require(hf, "num_attention_heads")
    _positive("hidden_size", hidden)
    _positive("num_attention_heads", heads)
    head_dim = hf.get("head_dim") or hidden // heads
    max_len = require(hf, "max_position_embeddings")
    _positive("head_dim", head_dim)
    _positive("max_position_embeddings", max_len)
    fields: dict[str, Any] = {
        "model_type": hf.get("model_type"),
        "vocab_size": require(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": require(hf, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_len,
        "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "activation": hf.get("hidden_act") or "silu",
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "rope_of_layer": (0,) * layers,
        "sliding_windows": (None,) * layers,
        "sm_scale": head_dim**-0.5,
    }
    if "ropes" not in facts:
        fields["ropes"] = (rope_from_hf(hf, head_dim=head_dim, max_position_embeddings=max_len),)
    return ModelConfig(**(fields | facts))


def require(hf: Mapping[str, Any], name: str) -> Any:
    """Field `name` of the config; raises ModelError if it is absent or null."""
    value = hf.get(name)
    if value is None:
        raise ModelError(f"config.json of model_type {hf.get('model_type')!r} lacks {name!r}")
    return value


def layer_count(hf: Mapping[str, Any]) -> int:
    """`num_hidden_layers`; raises ModelError unless it is a positive integer."""
    layers = require(hf, "num_hidden_layers")
    _positive("num_hidden_layers", layers)
    return layers


def fill_defaults(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `defaults` where it is silent or null."""
    return {**defaults, **{name: value for name, value in hf.items() if value is not None or name not in defaults}}


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for what would silently give wrong numbers if it were ignored."""
    quantization = hf.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedError(f"quantization_config with quant_method {method!r} is not supported")
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if hf.get(name):
            raise UnsupportedError(f"{name}={hf[name]!r}: mixture-of-experts models are not supported")
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedError("use_bidirectional_attention=True is not supported: only causal models are")


def layer_windows(hf: Mapping[str, Any], layer_types: list[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer from its type, as `layer_types` in config.json.

    Raises ModelError for a wrong count, UnsupportedError for an unknown type.
    """
    layers = layer_count(hf)
    if len(layer_types) != layers:
        raise ModelError(f"layer_types has {len(layer_types)} entries for num_hidden_layers={layers}")
    windows = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(layer_types) - set(windows))
    if unknown:
        raise UnsupportedError(f"layer_types {unknown} are not supported; known: {sorted(windows)}")
    return tuple(windows[kind] for kind in layer_types)


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{name}={value!r} must be a positive integer")
