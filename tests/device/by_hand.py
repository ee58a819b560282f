"""Requests and steps made by hand, where a scheduler would make them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import Admission, Step
from jaxpaged.device.runner import Runner
from jaxpaged.layers.attention import DenseContext
from jaxpaged.models.decoder import Decoder

VOCAB, MAX_LEN, BLOCK, ROWS, TOKENS = 250, 128, 16, 2, 96


def make_request(runner: Runner, prompt: Sequence[int], *, grammar: Any = None, **params) -> Request:
    """A greedy request, its options packed."""
    sampling = SamplingParams(**({"temperature": 0, "max_tokens": 8} | params))
    request = Request("r", prompt, sampling, max_model_len=MAX_LEN, grammar=grammar)
    request.device_options = runner.pack_options(request)
    return request


def make_step(rows: Sequence[tuple[Request, int, int]], *, admit: bool = True, **fields) -> Step:
    """A step of (request, first token, number of tokens), one after the other in slots and blocks of their own.

    Args:
      admit: each takes its slot, and blocks for the whole context, now; else it has them.
    """
    per_row = MAX_LEN // BLOCK
    blocks = [list(range(1 + row * per_row, 1 + (row + 1) * per_row)) for row in range(len(rows))]
    return Step(
        requests=[request for request, _, _ in rows],
        slots=list(range(len(rows))),
        starts=[start for _, start, _ in rows],
        num_tokens=[count for _, _, count in rows],
        samples=[start + count == request.num_tokens for request, start, count in rows],
        admissions=[Admission(i, rows[i][0], blocks[i]) for i in range(len(rows))] if admit else [],
        total_tokens=sum(count for _, _, count in rows),
        wants_logprobs=any(request.params.num_logprobs is not None for request, _, _ in rows),
        **fields,
    )


def dense_logprobs(runner: Runner, token_ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities [T, VOCAB] after each token, from dense attention."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(_dense(runner.module, runner.params, padded))[: len(token_ids)]


@partial(jax.jit, static_argnums=0)
def _dense(module: Decoder, params: Any, ids: jax.Array) -> jax.Array:
    hidden, _ = module.apply({"params": params}, ids, jnp.arange(len(ids)), DenseContext())
    return jax.nn.log_softmax(module.apply({"params": params}, hidden, method="logits")[:, :VOCAB])


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(0, VOCAB, length).tolist()
