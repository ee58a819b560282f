"""What the device sampled, as records of a step's result."""

from __future__ import annotations

import jax
import numpy as np

from jaxpaged.core.sampling_params import ALL_LOGPROBS
from jaxpaged.core.step import Step, TokenLogprobs
from jaxpaged.device.sampling import Sampled


def sampled_logprobs(step: Step, sampled: Sampled, vocab_size: int) -> list[list[TokenLogprobs]]:
    """The log-probabilities of the rows that want them, cut to what each asked for."""
    tokens, logprobs, ranks = (x.tolist() for x in jax.device_get((sampled.tokens, sampled.logprobs, sampled.ranks)))
    top_ids, top_logprobs, top_ranks = (
        np.asarray(x) for x in (sampled.top_ids, sampled.top_logprobs, sampled.top_ranks)
    )
    rows: list[list[TokenLogprobs]] = []
    sample_index = 0
    for request, samples in zip(step.requests, step.samples, strict=True):
        i, params = sample_index, request.params
        wanted, given = params.num_logprobs, params.logprob_token_ids
        sample_index += samples
        if not samples or wanted is None:
            rows.append([])
            continue
        k = len(given) if given else vocab_size if wanted == ALL_LOGPROBS else wanted
        top = top_ids[i, :k].tolist(), top_logprobs[i, :k].tolist(), top_ranks[i, :k].tolist() if given else None
        rows.append([TokenLogprobs(tokens[i], logprobs[i], ranks[i], *top)])
    return rows
