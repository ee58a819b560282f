"""A tiny random Llama as a folder, as Hugging Face would save it: config, safetensors, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests import tiny_tokenizers


def save(folder: Path) -> None:
    """Writes the model; wide weights make its greedy text depend on the whole context."""
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.hf.save_pretrained(folder)
    d, f, heads, kv_heads, h = 32, 48, 4, 2, 8
    shapes = {"model.embed_tokens.weight": (tokenizer.vocab_size, d), "model.norm.weight": (d,)}
    for i in range(2):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,)}
        shapes |= {p + "self_attn.q_proj.weight": (heads * h, d), p + "self_attn.k_proj.weight": (kv_heads * h, d)}
        shapes |= {p + "self_attn.v_proj.weight": (kv_heads * h, d), p + "self_attn.o_proj.weight": (d, heads * h)}
        shapes |= {
            p + "mlp.gate_proj.weight": (f, d),
            p + "mlp.up_proj.weight": (f, d),
            p + "mlp.down_proj.weight": (d, f),
        }
    random = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else random.normal(size=shape).astype(np.float32) * 0.3
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
