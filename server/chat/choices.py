"""The choices of a chat completion as JSON, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxpaged.engine.output import CompletionOutput, RequestOutput
from server.logprobs import LogprobFormat
from server.protocol.chat import ChatCompletionRequest


class ChatChoices:
    """Builds the `choices` array for one conversation, streamed or whole."""

    def __init__(self, body: ChatCompletionRequest, form: LogprobFormat):
        self._body, self._form = body, form
        self._echo = _own_last_text(body.messages) if body.echo else ""
        self._begun: set[int] = set()

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the model's thoughts so far; None: thoughts are not told apart."""
        return None

    def whole(self, output: RequestOutput) -> list[dict[str, Any]]:
        """All choices, once they have ended."""
        return [self._choice(completion) for completion in output.outputs]

    def pieces(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """What a delta adds, a piece a chunk: for each choice first its role, then text, at last why it ended."""
        for completion in output.outputs:
            if completion.index not in self._begun:
                self._begun.add(completion.index)
                yield self._piece(completion.index, {"role": "assistant", "content": "", "refusal": None})
                if self._echo:
                    yield self._piece(completion.index, {"content": self._echo})
            beside = {"logprobs": self._logprobs(completion), **self._token_ids(completion)}
            for delta in self._deltas(completion):
                yield {**self._piece(completion.index, delta), **beside}
                beside = {}  # once
            if completion.finish_reason is not None:
                end = {"finish_reason": self._finish_reason(completion), "stop_reason": completion.stop_reason}
                yield {**self._piece(completion.index, {}), **end}

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What is said of the prompt, beside the choices."""
        said: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            said["prompt_logprobs"] = self._form.prompt(output.prompt_logprobs or [], self._body.prompt_logprobs)
        if self._body.return_token_ids:
            said["prompt_token_ids"] = output.prompt_token_ids
        return said

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        message = self._message(completion)  # before its reason to end, which may be what it says
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": self._finish_reason(completion),
            "stop_reason": completion.stop_reason,
            **self._token_ids(completion),
        }

    def _message(self, completion: CompletionOutput) -> dict[str, Any]:
        text = self._echo + completion.text
        return {"role": "assistant", "content": text, "refusal": None, "annotations": []}

    def _deltas(self, completion: CompletionOutput) -> Sequence[dict[str, Any]]:
        """What a completion's delta adds to the message, a piece a chunk."""
        if completion.text or completion.logprobs or (self._body.return_token_ids and completion.token_ids):
            return ({"content": completion.text},)
        return ()

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        return completion.finish_reason

    @staticmethod
    def _piece(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        return self._form.chat(completion.logprobs, last_is_hidden=completion.last_token_hidden)

    def _token_ids(self, completion: CompletionOutput) -> dict[str, Any]:
        return {"token_ids": completion.token_ids} if self._body.return_token_ids else {}


def _own_last_text(messages: list[Any]) -> str:
    """The text of the last message if it is the assistant's, which the answer goes on with. Messages are checked."""
    last = messages[-1]
    if last["role"] != "assistant":
        return ""
    content = last.get("content") or last.get("refusal") or ""
    return content if isinstance(content, str) else "\n".join(part[part["type"]] for part in content)
