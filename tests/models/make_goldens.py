"""Writes `goldens/` from Hugging Face's models: run from the repository's root where torch and transformers are.

python -m tests.models.make_goldens [case ...]
"""

import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.golden_cases import CASES, Golden, make_prompt, make_weight, norm_mean, write_golden


def hf_model(config: dict) -> torch.nn.Module:
    """The model in float32 with the weights of `make_weight`; a tied head shares the embedding's."""
    options = {name: value for name, value in config.items() if name != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **options)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = make_weight(name, tuple(parameter.shape), norm_mean=norm_mean(config))
            parameter.copy_(torch.from_numpy(weight))
    return model


def hf_logits(model: torch.nn.Module, token_ids: np.ndarray) -> np.ndarray:
    """float32 [T, V]."""
    with torch.no_grad():
        return model(torch.from_numpy(token_ids[None].astype(np.int64)), use_cache=False).logits[0].numpy()


def make_golden(name: str) -> Golden:
    """Runs case `name`."""
    case = CASES[name]
    token_ids = make_prompt(name, case)
    model = hf_model(case.config)
    shapes = {tensor: tuple(parameter.shape) for tensor, parameter in model.named_parameters()}
    logits = hf_logits(model, token_ids)
    return Golden(model.config.to_dict(), shapes, token_ids, logits)


if __name__ == "__main__":
    for case_name in sys.argv[1:] or CASES:
        write_golden(case_name, make_golden(case_name))
        print(case_name)
