"""Writes `goldens/rope.json` from Hugging Face's `ROPE_INIT_FUNCTIONS`; needs torch.

python -m tests.layers.make_rope_goldens
"""

import copy
import json

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.layers.rope_cases import CASES, GOLDENS, RopeCase


def hf_frequencies(case: RopeCase, length: int) -> tuple[list[float], float]:
    """(inverse frequencies, attention factor) for a sequence of `length` tokens."""
    config = LlamaConfig(
        hidden_size=4 * case.head_dim,
        num_attention_heads=4,
        head_dim=case.head_dim,
        max_position_embeddings=case.max_position_embeddings,
        rope_theta=case.theta,
        rope_scaling=copy.deepcopy(case.rope),
        partial_rotary_factor=case.partial,
    )
    kind = config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    inv_freq, attention_factor = compute(config, device="cpu", seq_len=length)
    return [float(x) for x in inv_freq], float(attention_factor)


if __name__ == "__main__":
    answers = {name: {n: hf_frequencies(case, n) for n in case.lengths} for name, case in CASES.items()}
    GOLDENS.parent.mkdir(exist_ok=True)
    GOLDENS.write_text(json.dumps(answers) + "\n")
