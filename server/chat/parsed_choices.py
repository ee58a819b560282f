"""The choices of a chat completion with tools or thoughts: their text is taken apart."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.engine.output import CompletionOutput
from server.chat.choices import ChatChoices
from server.chat.parser import ChatParser, ReasoningTokens, parsed_message
from server.chat.plan import ChatPlan
from server.chat.reasoning import Prompted
from server.logprobs import LogprobFormat
from server.parsing.deltas import CallBegins, Content, Delta, Reasoning
from server.protocol.chat import ChatCompletionRequest

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # all that Mistral's templates take


class ParsedChoices(ChatChoices):
    """Builds the `choices` array for one conversation, streamed or whole."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        form: LogprobFormat,
        plan: ChatPlan,
        before: Prompted,
        tokenizer: Tokenizer,
    ):
        """Args: before: what the prompt has said of thoughts."""
        super().__init__(body, form)
        self._plan, self._before, self._tokenizer = plan, before, tokenizer
        self._parsers: dict[int, ChatParser] = {}
        self._thought: dict[int, ReasoningTokens] = {}
        self._gives_reasoning = body.include_reasoning is not False

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of all choices' thoughts so far; None: thoughts are not told apart."""
        return sum(counter.count for counter in self._thought.values()) if self._thought else None

    def _message(self, completion: CompletionOutput) -> dict[str, Any]:
        message = parsed_message(self._parse(completion))
        calls = [_call(i, {"id": _new_id(), "type": "function"}, *call) for i, call in enumerate(message.calls)]
        content = self._echo + message.content
        only_else = bool(calls or message.reasoning) and not content
        answer: dict[str, Any] = {"role": "assistant", "content": None if only_else else content}
        answer |= {"refusal": None, "annotations": []}
        if self._parsers[completion.index].reasoning is not None and self._gives_reasoning:
            answer["reasoning_content"] = answer["reasoning"] = message.reasoning or None
        if calls:
            answer["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
        return answer

    def _deltas(self, completion: CompletionOutput) -> Sequence[dict[str, Any]]:
        deltas = list(filter(None, map(self._delta, self._parse(completion))))
        shown = completion.logprobs or (self._body.return_token_ids and completion.token_ids)
        return deltas or ([{}] if shown else [])

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        called = self._parsers[completion.index].num_calls > 0 and self._plan.finishes_with_calls
        return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason

    def _parse(self, completion: CompletionOutput) -> list[Delta]:
        """What the text of a completion, or of a delta of it, says."""
        index = completion.index
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._plan.parser(self._before)
            if parser.reasoning is not None:
                self._thought[index] = ReasoningTokens(self._tokenizer, parser.reasoning)
        deltas = parser.feed(completion.text)
        if completion.finish_reason is not None:
            deltas += parser.finish()
        if index in self._thought:
            self._thought[index].add(completion.token_ids)
        return deltas

    def _delta(self, delta: Delta) -> dict[str, Any] | None:
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text, "reasoning": delta.text} if self._gives_reasoning else None
        if isinstance(delta, CallBegins):
            return {"tool_calls": [_call(delta.index, {"id": _new_id(), "type": "function"}, delta.name, "")]}
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _call(index: int, head: dict[str, str], name: str, arguments: str) -> dict[str, Any]:
    return {"index": index, **head, "function": {"name": name, "arguments": arguments}}


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
