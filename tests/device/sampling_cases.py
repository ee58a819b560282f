"""Rows to be sampled, and what NumPy makes of them: slow, obvious, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.core.step import Admission
from jaxpaged.device.logits_processor import LogitsContext, LogitsProcessor
from jaxpaged.device.options import Options, admit_options, empty_options, mask_words, pack_options
from jaxpaged.device.sampling import Sampled, sample
from jaxpaged.device.slots import Slots, admit, empty_slots, features, pack_admission

HEAD, VOCAB = 200, 190  # rows of the head, tokens that may be produced
ROWS, MAX_LEN, PAGES = 4, 300, 4
COLUMNS = 160


def _avoid_last(logits: jax.Array, context: LogitsContext) -> jax.Array:
    last = context.token_ids[context.num_tokens - 1]
    return logits.at[last].add(-context.arguments["amount"])


def _favour_two(logits: jax.Array, context: LogitsContext) -> jax.Array:
    ids, output = context.arguments["ids"].astype(jnp.int32), context.num_tokens - context.num_prompt_tokens
    return logits.at[ids].add(context.arguments["by"] * output)


PROCESSORS = (
    LogitsProcessor("avoid_last", _avoid_last, {"amount": 1.5}),
    LogitsProcessor("favour_two", _favour_two, {"ids": (3.0, 5.0), "by": None}),
    LogitsProcessor("unban", lambda logits, context: jnp.zeros_like(logits)),
    LogitsProcessor("by_mean", lambda x, context: x.at[jnp.where(jnp.mean(x[:VOCAB]) > 0, 1, 2)].set(1e3)),
    LogitsProcessor("nan", lambda logits, context: logits * jnp.nan),
)


class NoGrammar:
    """Stands in where only the masks count."""

    finished, error = False, ""

    def accept(self, token_id: int) -> bool:
        return True

    def fill(self, mask: Any) -> None: ...

    def copy(self) -> NoGrammar:
        return self


jit_admit = jax.jit(admit)
jit_admit_options = jax.jit(admit_options)
jit_sample = jax.jit(partial(sample, vocab_size=VOCAB, max_logprobs=COLUMNS, processors=PROCESSORS))


def make_request(
    params: SamplingParams | None = None,
    *,
    prompt: Sequence[int] = (7, 7, 8),
    output: Sequence[int] = (),
    eos: Sequence[int] = (1, 2),
    seed: int = 7,
    index: int = 0,
    **fields: Any,
) -> Request:
    """A request that has produced `output` already; greedy unless `params` say something else."""
    params = params or SamplingParams(temperature=0)
    request = Request("r", prompt, params, max_model_len=MAX_LEN, eos_token_ids=eos, seed=seed, **fields)
    request.all_token_ids += output
    request.index = index
    return request


class Batch:
    """Slots and options of up to `ROWS` requests, admitted as the runner does."""

    def __init__(self) -> None:
        self.slots: Slots = empty_slots(ROWS, MAX_LEN, PAGES)
        self.options: Options = empty_options(ROWS, HEAD, PROCESSORS)
        self.positions = np.zeros(ROWS + 1, np.int32)

    def admit(self, slot: int, request: Request) -> None:
        """Gives a request a slot."""
        packed = pack_admission(Admission(slot, request, [3, 1]), features(request), MAX_LEN, PAGES)
        self.slots = jit_admit(self.slots, packed)
        options = pack_options(request, HEAD, PROCESSORS)
        if options is not None:
            self.options = jit_admit_options(self.options, jnp.int32(slot), options)
        self.positions[slot] = request.num_tokens

    def sample(self, logits: Any, rows: Sequence[int] = range(ROWS), masks: Any = None) -> Sampled:
        """Samples the given slots; `logits` [R, HEAD] or one row for all."""
        index = np.asarray(rows)
        logits = jnp.asarray(np.broadcast_to(np.asarray(logits, np.float32), (ROWS, HEAD)))
        masks = np.full((ROWS, mask_words(HEAD)), -1, np.int32) if masks is None else masks
        return jit_sample(
            logits, self.slots, self.options, jnp.asarray(index), jnp.asarray(self.positions[index]), jnp.asarray(masks)
        )


def sample_rows(logits: Any, *requests: Request, masks: Any = None) -> Sampled:
    """A batch of these requests; the rows beyond are padding."""
    batch = Batch()
    for slot, request in enumerate(requests):
        batch.admit(slot, request)
    rows = [i if i < len(requests) else ROWS for i in range(ROWS)]
    return batch.sample(logits, rows, masks)


def random_logits(seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=HEAD).astype(np.float32) * np.float32(scale)


def adjusted(logits: np.ndarray, request: Request, mask: set[int] | None = None) -> np.ndarray:
    """The logits after everything before the temperature but users' processors."""
    x, params, output = np.array(logits, np.float32), request.params, request.output_token_ids
    x[VOCAB:] = -np.inf
    for allowed in (params.allowed_token_ids, mask):
        if allowed is not None:
            x[[i for i in range(HEAD) if i not in allowed]] = -np.inf
    for *before, last in request.bad_word_ids:
        if not before or output[-len(before) :] == before:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        x[list(request.eos_token_ids | request.stop_token_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    for token in set(request.all_token_ids):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty
        x[token] -= params.frequency_penalty * output.count(token)
    return x


def kept(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """The tokens that min-p, top-k and top-p leave, most likely first."""
    order = [int(i) for i in np.argsort(-logits, kind="stable") if logits[i] > -np.inf]
    scaled = (logits - logits.max()) / np.float32(params.temperature)
    if params.min_p > 0:
        order = [i for i in order if scaled[i] >= np.log(np.float32(params.min_p))]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = np.exp(scaled[order].astype(np.float64))
        before = np.cumsum(mass) - mass
        order = [i for i, m in zip(order, before, strict=True) if m < params.top_p * mass.sum() or i == order[0]]
    return order


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probability of each token, of adjusted logits."""
    ids = kept(logits, params)
    probs = np.zeros(len(logits))
    probs[ids] = np.exp((logits[ids].astype(np.float64) - logits.max()) / params.temperature)
    return probs / probs.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max()
    return x - np.log(np.exp(x).sum())
