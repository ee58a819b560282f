"""A toy language model and searches in it, whose answers by transformers are kept in `beam_goldens.json`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

MAX_TOKENS = 12
GOLDENS = Path(__file__).with_name("beam_goldens.json")


@dataclasses.dataclass(frozen=True)
class Toy:
    """A model whose next token depends on the last one and its position; the prompt is token 0.

    So no two sequences are equally likely, which would leave their order to rounding.

    Attributes:
      eager: added to the logits of the ids that end a sequence.
    """

    seed: int
    vocab: int
    ending: tuple[int, ...] = ()
    eager: float = 0.0

    def logits(self) -> np.ndarray:
        """float32 [MAX_TOKENS, vocab, vocab]: by the last token's position, the last token, the next."""
        shape = (MAX_TOKENS, self.vocab, self.vocab)
        logits = np.random.default_rng(self.seed).normal(0, 2, shape).astype(np.float32)
        logits[..., list(self.ending)] += self.eager
        return logits

    def logprobs(self) -> np.ndarray:
        logits = self.logits().astype(np.float64)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Case:
    toy: Toy
    beams: int
    n: int
    max_tokens: int
    min_tokens: int
    early_stopping: bool | str
    length_penalty: float


def draw_cases(count: int = 120) -> list[Case]:
    rng = np.random.default_rng(0)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    cases = []
    for seed in range(count):
        beams, ends = int(rng.integers(2, 6)), int(rng.integers(0, 4))
        vocab = beams + ends + int(rng.integers(0, 4))  # so that there always are enough beams
        ending = tuple(sorted(rng.choice(vocab, ends, replace=False).tolist()))
        max_tokens = int(rng.integers(1, MAX_TOKENS + 1))
        cases.append(
            Case(
                toy=Toy(seed, vocab, ending, pick(-1.0, 0.0, 2.0)),
                beams=beams,
                n=int(rng.integers(1, beams + 1)),
                max_tokens=max_tokens,
                min_tokens=min(max_tokens, pick(0, 0, 3)),
                early_stopping=pick(True, False, "never"),
                length_penalty=pick(-1.0, 0.0, 0.5, 1.0, 1.0, 2.5),
            )
        )
    return cases


def read_goldens() -> list[list[tuple[list[int], float]]]:
    """For each case its sequences and their scores, best first."""
    return json.loads(GOLDENS.read_text())
