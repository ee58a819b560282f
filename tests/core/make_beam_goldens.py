"""Writes `beam_goldens.json` by transformers' beam search: run from the repository's root where torch is.

python -m tests.core.make_beam_goldens
"""

import json

import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.core.beam_cases import GOLDENS, Case, Toy, draw_cases


class _ToyModel(PreTrainedModel, GenerationMixin):
    config_class = PretrainedConfig

    def __init__(self, toy: Toy):
        super().__init__(PretrainedConfig(vocab_size=toy.vocab))
        self.table = torch.nn.Parameter(torch.from_numpy(toy.logits()))

    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=self.table[torch.arange(input_ids.shape[1]), input_ids])

    def prepare_inputs_for_generation(self, input_ids, **_):
        return {"input_ids": input_ids}


def search(case: Case) -> list[tuple[list[int], float]]:
    """What transformers finds: tokens without prompt and padding, and the score."""
    config = GenerationConfig(
        num_beams=case.beams,
        num_return_sequences=case.n,
        max_new_tokens=case.max_tokens,
        min_new_tokens=case.min_tokens or None,
        early_stopping=case.early_stopping,
        length_penalty=case.length_penalty,
        eos_token_id=list(case.toy.ending) or None,
        pad_token_id=case.toy.vocab,
        do_sample=False,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = _ToyModel(case.toy).generate(torch.tensor([[0]]), generation_config=config)
    answers = []
    for row, indices, score in zip(found.sequences[:, 1:], found.beam_indices, found.sequences_scores, strict=True):
        answers.append((row[: int((indices >= 0).sum())].tolist(), float(score)))
    return answers


if __name__ == "__main__":
    GOLDENS.write_text("[\n" + ",\n".join(json.dumps(search(case)) for case in draw_cases()) + "\n]\n")
