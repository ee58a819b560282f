"""Writes the small checkpoints that these tests read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from jaxpaged.checkpoint.tensor import LazyTensor

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def rng_array(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, math.prod(shape)]).normal(size=shape).astype(dtype)


def lazy(array: np.ndarray) -> LazyTensor:
    return LazyTensor(array.shape, array.dtype, lambda: array.copy())


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A GGUF file; tensors are float32 arrays, bfloat16 ones, or (quantized bytes, type)."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        add = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add.get(type(value), writer.add_array)(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        elif value.dtype == ml_dtypes.bfloat16:
            writer.add_tensor(name, value.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Metadata of a two-layer model with 4 query heads, 2 key heads of 8; `changes` go under the architecture."""
    facts = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 8,
        **changes,
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in facts.items() if value is not None},
    }


def write_safetensors(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> Path:
    """A safetensors file byte by byte, so that it can be wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path
