"""The choices of a completion as JSON, whole or piece by piece."""

from __future__ import annotations

from typing import Any

from jaxpaged.engine.async_llm import PreparedRequest
from jaxpaged.engine.output import CompletionOutput, PositionLogprobs, RequestOutput
from server.logprobs import LogprobFormat
from server.protocol.completions import CompletionRequest


class CompletionChoices:
    """Builds the `choices` array for one prompt, streamed or whole.

    The first piece of each choice has what there is to say of the prompt.
    """

    reasoning_tokens = None

    def __init__(
        self,
        prepared: PreparedRequest,
        body: CompletionRequest,
        form: LogprobFormat,
        *,
        first_index: int,
        prompt_text: tuple[str, list[int]] | None = None,
    ):
        """
        Args:
          prompt_text: the prompt's text, and where its tokens are in it, if it is to be echoed.
          first_index: the index of its first choice in the answer, which holds those of all prompts.
        """
        self._body, self._form, self._first_index = body, form, first_index
        self._params, self._token_ids = prepared.request.params, prepared.request.prompt_token_ids
        self._begun: set[int] = set()
        self._positions: list[PositionLogprobs | None] = [None] * len(self._token_ids)  # until they are known
        self._text, self._offsets = prompt_text or ("", [])

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Nothing: its choices say it."""
        return {}

    def pieces(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of a final output, or what a delta adds to them."""
        self._positions = output.prompt_logprobs or self._positions  # deltas tell them once
        return [self._choice(completion) for completion in output.outputs]

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        first = completion.index not in self._begun
        self._begun.add(completion.index)
        choice = {
            "index": self._first_index + completion.index,
            "text": (self._text if first else "") + completion.text,
            "logprobs": self._logprobs(completion, first),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if first and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._form.prompt(self._positions, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if first:
                choice["prompt_token_ids"] = self._token_ids
        return choice

    def _logprobs(self, completion: CompletionOutput, first: bool) -> dict[str, Any] | None:
        count = self._body.logprobs
        if count is None or completion.logprobs is None:
            return None
        with_top = count != 0 or self._params.logprob_token_ids is not None
        logprobs = self._form.completion(completion.logprobs, with_top=with_top, start=len(self._text))
        if not (first and self._body.echo):
            return logprobs
        return self._form.echoed(self._token_ids, self._offsets, self._positions, count, logprobs)
