"""Checkpoint tables in Hugging Face's tensor names: the parts that families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxpaged.checkpoint.table import Assemble, CheckpointTable, Weight
from jaxpaged.models.config import ModelConfig

LLAMA_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Norms of a pre-norm block: our name -> Hugging Face's."""


def decoder_table(
    config: ModelConfig,
    *,
    norms: Mapping[str, str] = LLAMA_NORMS,
    fused: bool = False,
    ignored: Sequence[str] = (),
) -> CheckpointTable:
    """The table of a model whose checkpoint looks like Llama's.

    Args:
      norms: of a block, our name -> Hugging Face's.
      fused: the checkpoint has `qkv_proj` and `gate_up_proj` (Phi-3) instead of separate tensors.
      ignored: more regular expressions of tensors that are rightly unused.
    """
    prefix = config.checkpoint_prefix
    weights = [
        Weight("embed", (f"{prefix}model.embed_tokens.weight",)),
        Weight("final_norm", (f"{prefix}model.norm.weight",)),
    ]
    ignore = [r"rotary_emb\.inv_freq$", *ignored]
    if config.tie_word_embeddings:
        ignore.append(r"lm_head\.weight$")
    else:
        weights.append(Weight("lm_head", (f"{prefix}lm_head.weight",)))
    for i in range(config.num_layers):
        ours, theirs = f"layers_{i}", f"{prefix}model.layers.{i}"
        weights += [Weight(f"{ours}/{a}", (f"{theirs}.{b}.weight",)) for a, b in norms.items()]
        weights += _attention(config, f"{ours}/attn", f"{theirs}.self_attn", fused)
        weights += _mlp(config, f"{ours}/mlp", f"{theirs}.mlp", fused)
    return CheckpointTable(tuple(weights), tuple(ignore))


def _attention(config: ModelConfig, ours: str, theirs: str, fused: bool) -> list[Weight]:
    kv, g, h = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
    names = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    assemble = split_and_fuse_qkv(kv, g, h) if fused else fuse_qkv(kv, g, h)
    weights = [
        Weight(f"{ours}/qkv", tuple(f"{theirs}.{name}.weight" for name in names), assemble),
        Weight(f"{ours}/o", (f"{theirs}.o_proj.weight",)),
    ]
    if config.qkv_bias:
        weights.append(Weight(f"{ours}/qkv_bias", tuple(f"{theirs}.{name}.bias" for name in names), assemble))
    if config.out_bias:
        weights.append(Weight(f"{ours}/o_bias", (f"{theirs}.o_proj.bias",)))
    if config.qk_norm:
        full = config.qk_norm == "full"
        shapes = {"q_norm": (kv, g, h), "k_norm": (kv, h)} if full else {"q_norm": (h,), "k_norm": (h,)}
        weights += [Weight(f"{ours}/{a}", (f"{theirs}.{a}.weight",), reshape(*shape)) for a, shape in shapes.items()]
    return weights


def _mlp(config: ModelConfig, ours: str, theirs: str, fused: bool) -> list[Weight]:
    names = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    assemble = halves if fused else stack
    weights = [
        Weight(f"{ours}/gate_up", tuple(f"{theirs}.{name}.weight" for name in names), assemble),
        Weight(f"{ours}/down", (f"{theirs}.down_proj.weight",)),
    ]
    if config.mlp_bias:
        weights.append(Weight(f"{ours}/gate_up_bias", tuple(f"{theirs}.{name}.bias" for name in names), assemble))
        weights.append(Weight(f"{ours}/down_bias", (f"{theirs}.down_proj.bias",)))
    return weights


def fuse_qkv(kv: int, g: int, h: int) -> Assemble:
    """q [K*G*H, ...], k and v [K*H, ...] -> [K, G+2, H, ...]: each KV head beside its queries."""

    def assemble(tensors: Sequence[np.ndarray]) -> np.ndarray:
        q, k, v = tensors
        rest = q.shape[1:]
        parts = [q.reshape(kv, g, h, *rest), k.reshape(kv, 1, h, *rest), v.reshape(kv, 1, h, *rest)]
        return np.concatenate(parts, axis=1)

    return assemble


def split_and_fuse_qkv(kv: int, g: int, h: int) -> Assemble:
    """One tensor [(K*G + 2K) * H, ...], all queries, then all keys, then all values -> [K, G+2, H, ...]."""

    def assemble(tensors: Sequence[np.ndarray]) -> np.ndarray:
        (qkv,) = tensors
        return fuse_qkv(kv, g, h)(np.split(qkv, [kv * g * h, kv * (g + 1) * h]))

    return assemble


def stack(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """gate and up, each [F, ...] -> [2, F, ...]."""
    return np.stack(tensors)


def halves(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """gate above up in one tensor [2F, ...] -> [2, F, ...]; a view."""
    (tensor,) = tensors
    return tensor.reshape(2, tensor.shape[0] // 2, *tensor.shape[1:])


def reshape(*shape: int) -> Assemble:
    """One tensor, seen with `shape`; a view."""

    def assemble(tensors: Sequence[np.ndarray]) -> np.ndarray:
        (tensor,) = tensors
        return tensor.reshape(shape)

    return assemble
