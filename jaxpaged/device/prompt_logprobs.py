"""Log-probabilities of prompt tokens, from the hidden states that a forward pass leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.sampling_params import ALL_LOGPROBS
from jaxpaged.core.step import Step, TokenLogprobs
from jaxpaged.device.hidden_rows import CHUNK, HiddenRows
from jaxpaged.device.logprobs import Logprobs, token_logprobs
from jaxpaged.device.program_store import ProgramStore
from jaxpaged.device.step_program import StepOptions, abstract, program_bytes, step_compiler_options
from jaxpaged.models.decoder import Decoder


class PromptLogprobs:
    """Scores the prompt positions of steps, `CHUNK` at a time, which bounds the memory of their logits: one program.

    Args:
      params: the model's, or their shapes and dtypes.
      rows: picks their hidden states.
    """

    def __init__(self, module: Decoder, options: StepOptions, params: Any, rows: HiddenRows, store: ProgramStore):
        self._module, self._options, self._params = module, options, abstract(params)
        self._rows, self._store = rows, store
        self._score: jax.stages.Compiled | None = None

    @property
    def num_programs(self) -> int:
        """Compiled programs, besides those of `rows`."""
        return int(self._score is not None)

    def programs(self) -> list[Callable[[], Any]]:
        """What compiles each program."""
        return [self.score_program]

    def launch(self, params: Any, hidden: jax.Array, step: Step) -> list[Logprobs]:
        """Starts scoring the step's prompt ranges, one after the other, given its hidden states [T, D]."""
        rows, tokens = _positions(step)
        chunks = []
        for start in range(0, len(rows), CHUNK):
            some = slice(start, start + CHUNK)
            padded = np.zeros(CHUNK, np.int32)
            padded[: len(tokens[some])] = tokens[some]
            scores = self.score_program()(params, self._rows.pick(hidden, rows[some]), padded)
            jax.tree.map(lambda x: x.copy_to_host_async(), scores)
            chunks.append(scores)
        return chunks

    def collect(self, step: Step, chunks: list[Logprobs]) -> list[list[TokenLogprobs]]:
        """Waits for what `launch` started: a list for each of the step's prompt ranges."""
        if not chunks:
            return []
        fetched: list[Any] = jax.device_get(chunks)
        scores = Logprobs._make(np.concatenate(arrays) for arrays in zip(*fetched, strict=True))
        ranges, start = [], 0
        for part in step.prompt_ranges:
            request, rows = step.requests[part.row], slice(start, start + part.num_tokens)
            wanted = request.params.prompt_logprobs
            k = self._options.vocab_size if wanted == ALL_LOGPROBS else wanted
            fields = (scores.logprob[rows], scores.rank[rows], scores.top_ids[rows, :k], scores.top_logprobs[rows, :k])
            tokens = request.all_token_ids[part.first : part.first + part.num_tokens]
            columns = (tokens, *(array.tolist() for array in fields))
            ranges.append([TokenLogprobs(*record) for record in zip(*columns, strict=True)])
            start += part.num_tokens
        return ranges

    def score_program(self) -> jax.stages.Compiled:
        """The program `score(params, hidden [CHUNK, D], tokens i32[CHUNK]) -> Logprobs`, compiled once."""
        if self._score is None:
            tokens = jax.ShapeDtypeStruct((CHUNK,), jnp.int32)
            arguments = self._params, self._rows.abstract(), tokens
            self._score = self._store.program(
                "score", arguments, lambda: jax.jit(self._make_score()).lower(*arguments), step_compiler_options()
            )
        return self._score

    def step_bytes(self, num_tokens: int) -> tuple[int, int]:
        """What scoring so many positions takes: bytes that stay until they are collected, and while it runs."""
        results, temporaries = program_bytes(self.score_program())
        return -(-num_tokens // CHUNK) * results, temporaries

    def _make_score(self) -> Callable[..., Logprobs]:
        module, options = self._module, self._options

        def score(params: dict, hidden: jax.Array, tokens: jax.Array) -> Logprobs:
            logits = cast(jax.Array, module.apply({"params": params}, hidden, method="logits"))
            return token_logprobs(logits, tokens, vocab_size=options.vocab_size, columns=options.max_logprobs)

        return score


def _positions(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """For each prompt position of a step: the packed token whose hidden state gives its distribution, and its id."""
    ends = np.cumsum(step.num_tokens)
    rows, tokens = [], []
    for part in step.prompt_ranges:
        row, request = part.row, step.requests[part.row]
        first = int(ends[row]) - step.num_tokens[row] + part.first - 1 - step.starts[row]
        rows.append(np.arange(first, first + part.num_tokens))
        tokens.append(np.array(request.all_token_ids[part.first : part.first + part.num_tokens]))
    return np.concatenate(rows), np.concatenate(tokens)
