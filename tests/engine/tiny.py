"""A tiny random Llama's config, and how tests run requests through an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import RequestUpdate, TokenLogprobs
from jaxpaged.device.logits_processor import LogitsContext, LogitsProcessor
from jaxpaged.engine.engine import Engine

VOCAB, MAX_LEN, BLOCK, POOL = 256, 128, 16, 512
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def _shift(logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Favours every seventh token, which ones depends on the whole sequence."""
    place = jnp.sum(context.token_ids) + context.num_tokens - context.num_prompt_tokens
    return logits + context.arguments["by"] * ((jnp.arange(len(logits)) + place) % 7 == 0)


SHIFT = LogitsProcessor("shift", _shift, {"by": 1.0})
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@dataclasses.dataclass
class Answer:
    """All that an engine said about one request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    embedding: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0

    def take(self, update: RequestUpdate) -> None:
        assert self.finish_reason is None, "an update after the last one"
        self.token_ids += update.new_token_ids
        self.logprobs += update.logprobs or []
        self.prompt_logprobs += update.prompt_logprobs or []
        self.embedding += np.frombuffer(update.embedding or b"", "<f4").tolist()
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        self.num_cached_tokens = update.num_cached_tokens


def run(engine: Engine, prompts: Sequence[Sequence[int]], params=GREEDY, *, each_step=None) -> list[Answer]:
    """Runs the prompts together to their end; answers in order. `params`: one for all, or one a prompt."""
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    answers = {}
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        answers[f"r{i}"] = Answer()
        engine.add_request(engine.make_request(f"r{i}", prompt, p))
    steps = 0
    while engine.has_work:
        for update in engine.step():
            answers[update.request_id].take(update)
        engine.scheduler.check_invariants()
        steps += 1
        assert steps < 5000, "no progress"
        if each_step:
            each_step(engine)
    return list(answers.values())


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(0, VOCAB, length).tolist()
