"""What a GGUF file means in Hugging Face terms: a config, and tensors under their Hugging Face names.

Three things differ from the Hugging Face checkpoint that llama.cpp converted: in the `llama` architecture the rows of
the query and key projections are interleaved for its kind of rope; Gemma's norm weights have 1 added; and a
tied head is simply absent. All are undone here, so that models know one format only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.checkpoint.gguf_file import ArchitectureMetadata, GGUFFile
from jaxpaged.checkpoint.gguf_rope import ROPE_TENSORS, rope_scaling
from jaxpaged.checkpoint.tensor import LazyTensor
from jaxpaged.errors import CheckpointError, UnknownModelTypeError, UnsupportedError

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORM = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORM = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH_NORM = {**_POST_NORM, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class _Architecture:
    """One value of `general.architecture`.

    Attributes:
      model_type: that of Hugging Face.
      layer: GGUF name -> Hugging Face name, inside a layer.
      extend: adds what only this architecture has to the config.
      interleaved_rope: rows of q and k are permuted.
      norm_offset: what llama.cpp's converter added to norm weights.
    """

    model_type: str
    layer: Mapping[str, str]
    extend: Callable[[ArchitectureMetadata, dict[str, Any]], None]
    interleaved_rope: bool = False
    norm_offset: float = 0.0


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the model had before it was converted, as far as the file tells.

    Raises:
      UnknownModelTypeError: an architecture with no mapping here.
      UnsupportedError: experts, a rope scaling that has no Hugging Face equivalent.
      CheckpointError: needed metadata is missing.
    """
    reader, architecture = ArchitectureMetadata(file), _architecture(file)
    if reader.get("expert_count", 0):
        raise UnsupportedError(f"{file.path}: mixture-of-experts GGUF ({reader.get('expert_count')} experts)")
    heads = reader.need_one("attention.head_count")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else None,
        "hidden_size": reader.need("embedding_length"),
        "num_hidden_layers": reader.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.need_one("attention.head_count_kv")
        if reader.get("attention.head_count_kv")
        else heads,
        "head_dim": reader.get("attention.key_length") or reader.need("embedding_length") // heads,
        "intermediate_size": reader.need_one("feed_forward_length"),
        "max_position_embeddings": reader.need("context_length"),
        "rms_norm_eps": reader.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.get("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(reader),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if config["vocab_size"] is None:
        raise CheckpointError(f"{file.path} has no embedding", missing=["token_embd.weight"])
    config |= _special_ids(file.metadata)
    architecture.extend(reader, config)
    return config


def gguf_tensors(file: GGUFFile) -> dict[str, LazyTensor]:
    """The tensors by Hugging Face name and with Hugging Face meaning; unknown ones keep their GGUF name."""
    architecture, reader = _architecture(file), ArchitectureMetadata(file)
    tensors = {}
    for name, tensor in file.tensors.items():
        if name in ROPE_TENSORS:
            continue  # read into the config
        if architecture.norm_offset and name.endswith("norm.weight"):
            tensor = _add(tensor, -architecture.norm_offset)
        if architecture.interleaved_rope and ".attn_q." in name:
            tensor = _undo_interleaving(tensor, reader.need_one("attention.head_count"))
        if architecture.interleaved_rope and ".attn_k." in name:
            heads = reader.get("attention.head_count_kv") or reader.need_one("attention.head_count")
            tensor = _undo_interleaving(tensor, heads[0] if isinstance(heads, list) else heads)
        tensors[_hf_name(name, architecture)] = tensor
    return tensors


def gguf_dtype(file: GGUFFile) -> str:
    """What the weights are stored as: "float32", "float16", or "bfloat16", which also stands for quantized ones."""
    sizes: dict[str, int] = {}
    for name, kind in file.kinds.items():
        if len(file.tensors[name].shape) > 1:
            sizes[kind] = sizes.get(kind, 0) + file.tensors[name].size
    most = max(sizes, key=sizes.__getitem__, default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _architecture(file: GGUFFile) -> _Architecture:
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnknownModelTypeError(
            f"{file.path} holds the GGUF architecture {name!r}; known: {', '.join(sorted(_ARCHITECTURES))}"
        )
    return _ARCHITECTURES[name]


def _hf_name(name: str, architecture: _Architecture) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in architecture.layer:
        return name
    return f"model.layers.{match[1]}.{architecture.layer[match[2]]}.{match[3]}"


def _add(tensor: LazyTensor, offset: float) -> LazyTensor:
    def read() -> np.ndarray:
        return tensor.read() + np.asarray(offset, tensor.dtype)

    return dataclasses.replace(tensor, read=read, fill=None)


def _undo_interleaving(tensor: LazyTensor, heads: int) -> LazyTensor:
    """Rows (head, pair, half) back to (head, half, pair): llama.cpp rotates neighbours, Hugging Face halves."""
    if tensor.shape[0] % (2 * heads):
        return tensor  # mis-shaped: the loader will say so

    def read() -> np.ndarray:
        rows = tensor.read().reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return rows.swapaxes(1, 2).reshape(tensor.shape)

    return dataclasses.replace(tensor, read=read, fill=None)


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids = {}
    for key, gguf_key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        value = metadata.get(f"tokenizer.ggml.{gguf_key}_token_id")
        if value is not None:
            ids[f"{key}_token_id"] = value
    return ids


def _llama(reader: ArchitectureMetadata, config: dict[str, Any]) -> None:
    config["mlp_bias"] = "blk.0.ffn_up.bias" in reader.file.tensors
    config["head_dim"] = reader.get("attention.key_length") or reader.get("rope.dimension_count", config["head_dim"])
    if reader.get("attention.sliding_window"):
        config |= {"model_type": "mistral", "sliding_window": reader.get("attention.sliding_window")}


def _qwen(reader: ArchitectureMetadata, config: dict[str, Any]) -> None:
    config["use_sliding_window"] = False


def _phi3(reader: ArchitectureMetadata, config: dict[str, Any]) -> None:
    rotary = reader.get("rope.dimension_count", config["head_dim"])
    original = reader.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["partial_rotary_factor"] = rotary / config["head_dim"]
    config["original_max_position_embeddings"] = original
    config["sliding_window"] = reader.get("attention.sliding_window") or None


def _olmo2(reader: ArchitectureMetadata, config: dict[str, Any]) -> None:
    pass


def _gemma2(reader: ArchitectureMetadata, config: dict[str, Any]) -> None:
    _gemma(config, largest=46)
    layers = config["num_hidden_layers"]
    config["sliding_window"] = reader.get("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = reader.get("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = reader.get("final_logit_softcapping", 30.0)
    config["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]


def _gemma3(reader: ArchitectureMetadata, config: dict[str, Any]) -> None:
    _gemma(config, largest=62)
    layers = config["num_hidden_layers"]
    pattern = reader.get("attention.sliding_window_pattern", 6)
    sliding = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(layers)]
    config["sliding_window"] = reader.get("attention.sliding_window", 1024)
    config["layer_types"] = ["sliding_attention" if s else "full_attention" for s in sliding[:layers]]
    config["rope_local_base_freq"] = reader.get("rope.freq_base_swa", 10000.0)
    config["rope_theta"] = reader.get("rope.freq_base", 1_000_000.0)
    config["final_logit_softcapping"] = reader.get("final_logit_softcapping")
    config["attn_logit_softcapping"] = reader.get("attn_logit_softcapping")


def _gemma(config: dict[str, Any], *, largest: int) -> None:
    """GGUF does not say how queries are scaled: like llama.cpp, know the 27B by its number of layers."""
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if config["num_hidden_layers"] == largest else config["head_dim"]
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"


_ARCHITECTURES = {
    "llama": _Architecture("llama", {**_ATTENTION, **_MLP, **_PRE_NORM}, _llama, interleaved_rope=True),
    "qwen2": _Architecture("qwen2", {**_ATTENTION, **_MLP, **_PRE_NORM}, _qwen),
    "qwen3": _Architecture("qwen3", {**_ATTENTION, **_QK_NORM, **_MLP, **_PRE_NORM}, _qwen),
    "gemma2": _Architecture("gemma2", {**_ATTENTION, **_MLP, **_SANDWICH_NORM}, _gemma2, norm_offset=1.0),
    "gemma3": _Architecture(
        "gemma3_text", {**_ATTENTION, **_QK_NORM, **_MLP, **_SANDWICH_NORM}, _gemma3, norm_offset=1.0
    ),
    "phi3": _Architecture("phi3", {**_FUSED, **_PRE_NORM}, _phi3),
    "olmo2": _Architecture("olmo2", {**_ATTENTION, **_QK_NORM, **_MLP, **_POST_NORM}, _olmo2),
}
