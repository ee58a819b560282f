"""Tiny models, one per family and variant: configs as published checkpoints spell them, and weights from their names.

No weights are stored: both sides make them from the tensor's name, so a golden file is ids, logits and shapes.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent / "goldens"


@dataclass(frozen=True)
class GoldenCase:
    """A model and a prompt.

    Attributes:
      config: config.json as it would be published.
      prompt_len: tokens of the prompt.
      context_len: longest sequence of the engine that should give Hugging Face's logits; None: the model's own.

    A variant differs from its family's main case in constants only: one program is enough to test it.
    """

    config: dict[str, Any]
    prompt_len: int = 40
    context_len: int | None = None
    variant: bool = False


_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _case(
    model_type: str, *, prompt_len: int = 40, context_len: int | None = None, variant: bool = False, **config: Any
) -> GoldenCase:
    return GoldenCase({"model_type": model_type, **_TINY, **config}, prompt_len, context_len, variant)


def _phi3(**config: Any) -> dict[str, Any]:
    scaling = {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
    }
    sizes = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 16, "rope_scaling": scaling}
    return sizes | config


CASES: dict[str, GoldenCase] = {
    "llama": _case("llama"),
    "llama_bias_tied": _case("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=32),
    "llama_llama3": _case(
        "llama",
        variant=True,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama_linear": _case("llama", variant=True, rope_scaling={"type": "linear", "factor": 4.0}),
    "llama_dynamic": _case(
        "llama",
        variant=True,
        rope_scaling={"type": "dynamic", "factor": 2.0},
        max_position_embeddings=24,
        context_len=40,
    ),
    "llama_dynamic_within": _case("llama", variant=True, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "llama_yarn": _case(
        "llama",
        variant=True,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "mistral_window": _case("mistral", sliding_window=7),
    "qwen2": _case(
        "qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": _case("qwen3", head_dim=128),
    "gemma2": _case(
        "gemma2",
        num_hidden_layers=3,
        head_dim=32,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        sliding_window=6,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        tie_word_embeddings=True,
    ),
    "gemma3_text": _case(
        "gemma3_text",
        num_hidden_layers=4,
        head_dim=32,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24,
        sliding_window=6,
        sliding_window_pattern=3,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        tie_word_embeddings=True,
    ),
    "phi3_long": _case("phi3", **_phi3(sliding_window=15)),
    "phi3_short": _case("phi3", prompt_len=14, context_len=16, variant=True, **_phi3()),
    "olmo2": _case("olmo2"),
}


def make_weight(name: str, shape: tuple[int, ...], *, norm_mean: float) -> np.ndarray:
    """float32 of `shape`, uniform, the same for the same name everywhere.

    Norms lie around `norm_mean`; matrices keep the size of what they multiply, so that every part of a model matters.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    unit = np.random.Generator(np.random.PCG64(seed)).random(shape) * 2 - 1
    if "norm" in name:
        return (norm_mean + 0.5 * unit).astype(np.float32)
    if name.endswith("bias"):
        return (0.5 * unit).astype(np.float32)
    return (unit * (3.0 / shape[-1]) ** 0.5).astype(np.float32)


def make_prompt(name: str, case: GoldenCase) -> np.ndarray:
    """i32[prompt_len] token ids."""
    seed = int.from_bytes(hashlib.sha256(f"prompt of {name}".encode()).digest()[:8], "little")
    unit = np.random.Generator(np.random.PCG64(seed)).random(case.prompt_len)
    return (unit * case.config["vocab_size"]).astype(np.int32)


def norm_mean(config: dict[str, Any]) -> float:
    """What a norm's stored weights lie around: Gemma adds 1 to them."""
    return 0.0 if config["model_type"].startswith("gemma") else 1.0


@dataclass(frozen=True)
class Golden:
    """What Hugging Face answered.

    Attributes:
      saved_config: the config as transformers writes it back (`rope_parameters` from version 5 on).
      shapes: of every tensor in the checkpoint.
      token_ids, logits: i32[T], float32 [T, V].
    """

    saved_config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    token_ids: np.ndarray
    logits: np.ndarray

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint."""
        mean = norm_mean(self.saved_config)
        return {name: make_weight(name, shape, norm_mean=mean) for name, shape in self.shapes.items()}


def read_golden(name: str) -> Golden:
    """The stored golden of case `name`."""
    meta = json.loads((GOLDENS / f"{name}.json").read_text())
    arrays = np.load(GOLDENS / f"{name}.npz")
    shapes = {tensor: tuple(shape) for tensor, shape in meta["shapes"].items()}
    return Golden(meta["config"], shapes, arrays["token_ids"], arrays["logits"])


def write_golden(name: str, golden: Golden) -> None:
    """Stores it; `read_golden` gives it back."""
    GOLDENS.mkdir(exist_ok=True)
    meta = {"config": golden.saved_config, "shapes": golden.shapes}
    (GOLDENS / f"{name}.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(GOLDENS / f"{name}.npz", token_ids=golden.token_ids, logits=golden.logits)
