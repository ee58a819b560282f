"""What a chat request asks of the chat template, of sampling and of the reading of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.chat import chat_template_of, check_template_options, template_knows
from server.chat.parser import ChatParser
from server.chat.reasoning import Prompted, ReasoningFormat, ReasoningParser, prompted, reasoning_format
from server.config import ServerConfig
from server.protocol.chat import ChatCompletionRequest
from server.protocol.tools import NamedChoice
from server.tools.described import described
from server.tools.forced import MAX_CALLS, forced_calls
from server.tools.formats import PLAIN_JSON, ToolFormat, tool_format

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

_PROMPT_END = 32  # tokens: enough for the marks of thoughts, even a token a byte


@dataclass(frozen=True)
class ChatFormats:
    """How the served model writes calls and thoughts.

    Attributes:
      tools, reasoning: the formats; reasoning None: thoughts are content.
      tools_are_named: the operator has named that of the tools.
      control_ids: ids of control tokens by their text.
    """

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    control_ids: dict[str, int]
    tools_are_named: bool

    @classmethod
    def of(cls, config: ServerConfig, tokenizer: Tokenizer) -> ChatFormats:
        """Those that the options name, or that the model's chat template speaks."""
        template = tokenizer.chat_templates
        templates = template.values() if isinstance(template, dict) else [template or ""]
        return cls(
            tool_format(config.tool_call_parser, "\n".join(map(str, templates))),
            reasoning_format(config.reasoning_parser),
            {text: i for i, text in tokenizer.added_tokens.items() if i in tokenizer.special_ids},
            config.tool_call_parser is not None,
        )


class AnswerPlan(NamedTuple):
    """How the answers to one prompt are sampled and read.

    Attributes:
      params: those of the request, with the form of a call that it forces, and the markers that parsers must see.
      before: what the prompt has said of thoughts: a parser starts from there.
    """

    params: SamplingParams
    before: Prompted


class ChatPlan:
    """One request."""

    def __init__(self, body: ChatCompletionRequest, formats: ChatFormats, config: ServerConfig, tokenizer: Tokenizer):
        """
        Raises:
          InvalidRequestError: it asks for what this server or this model's chat template has not.
        """
        self._body, self._formats, self._tokenizer = body, formats, tokenizer
        self._has_tools = body.choice != "none"
        if body.chat_template is not None and not config.trust_request_chat_template:
            raise InvalidRequestError(
                "chat_template is refused: this server does not trust its clients' templates", param="chat_template"
            )
        shows = self._has_tools or not config.exclude_tools_when_tool_choice_none
        self._shown_tools = [tool.for_template() for tool in body.offered_tools] if shows else []
        template = body.chat_template or chat_template_of(tokenizer, self._shown_tools)
        self._speaks_tools = template_knows(template, "tools")
        # What a template without tools speaks is not known: unless the operator says it, plain JSON is asked for.
        is_known = self._speaks_tools or formats.tools_are_named
        self._format = formats.tools if is_known and not body.forces_call else PLAIN_JSON
        self._variables = self._template_variables(template)

    @property
    def parses(self) -> bool:
        """Whether the text of answers must be taken apart."""
        return self._has_tools or self._formats.reasoning is not None

    @property
    def finishes_with_calls(self) -> bool:
        """Whether tool calls set finish_reason `tool_calls`. As in OpenAI's API, a forced named function finishes with
        `stop`."""
        return not isinstance(self._body.choice, NamedChoice)

    @property
    def messages(self) -> Sequence[Any]:
        """The messages for the template."""
        messages = self._body.messages
        return messages if self._speaks_tools else described(messages, self._shown_tools, self._format)

    @property
    def template_options(self) -> dict[str, Any]:
        """Arguments of `render_chat`."""
        body = self._body
        return {
            # An open last message and a new turn exclude each other: wanting the one means not wanting the other.
            "add_generation_prompt": body.add_generation_prompt is not False and not body.continue_final_message,
            "continue_final_message": bool(body.continue_final_message),
            "cut": body.truncate_prompt_tokens is not None,
            "tools": self._shown_tools if self._speaks_tools and self._shown_tools else None,
            "documents": body.documents or None,
            "chat_template": body.chat_template,
            **self._variables,
        }

    def _template_variables(self, template: str) -> dict[str, Any]:
        body = self._body
        given = body.chat_template_kwargs or {}
        check_template_options(given)
        if body.documents and not template_knows(template, "documents"):
            raise InvalidRequestError("documents: the chat template of this model knows none", param="documents")
        effort = body.reasoning_effort
        if effort is None:
            return given
        if template_knows(template, "reasoning_effort"):
            return {"reasoning_effort": effort, **given}
        for switch in ("enable_thinking", "thinking"):
            if template_knows(template, switch):
                return {switch: effort != "none", **given}
        return given

    def of_answers(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> AnswerPlan:
        """How this prompt is to be answered.

        Args:
          params: what the request says itself.

        Raises:
          InvalidRequestError: the parameters contradict the form that answers must have.
        """
        before = Prompted.ENDED
        if not self.parses:
            return AnswerPlan(params, before)
        changes: dict[str, Any] = {}
        form = self._forced(params)
        if self._formats.reasoning is not None:
            before = self._thoughts_before(self._formats.reasoning, prompt_token_ids, forced=form is not None)
            if form is not None and before is not Prompted.ENDED:
                begun = before is Prompted.BEGUN or self._formats.reasoning.always
                marks = ("" if begun else self._formats.reasoning.begin, self._formats.reasoning.end)
                form = msgspec.structs.replace(form, after=marks)
        if form is not params.structured_outputs:
            changes["structured_outputs"] = form
        if shown := [self._formats.control_ids[mark] for mark in self._control_marks(self._marks())]:
            changes["shown_special_ids"] = shown
        return AnswerPlan(msgspec.structs.replace(params, **changes) if changes else params, before)

    def _forced(self, params: SamplingParams) -> Any:
        body = self._body
        if not body.forces_call:
            return params.structured_outputs
        one = isinstance(body.choice, NamedChoice) or body.parallel_tool_calls is False
        return forced_calls([tool.function for tool in body.callable_tools], max_calls=1 if one else MAX_CALLS)

    def _thoughts_before(self, form: ReasoningFormat, prompt_token_ids: Sequence[int], *, forced: bool) -> Prompted:
        if forced and self._control_marks((form.begin, form.end)):
            return Prompted.ENDED  # no grammar yields control tokens, so there can be no thoughts
        if self._body.continue_final_message:
            content = self._body.messages[-1].get("content")
            if isinstance(content, str) and form.begin in content:
                begun = content.rfind(form.begin) > content.rfind(form.end)
                return Prompted.BEGUN if begun else Prompted.ENDED
        end = self._tokenizer.decode(prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
        return prompted(form, end)

    def _marks(self) -> tuple[str, ...]:
        reasoning = self._formats.reasoning
        marks = (reasoning.begin, reasoning.end) if reasoning is not None else ()
        return marks + (self._format.markers if self._has_tools else ())

    def _control_marks(self, marks: Iterable[str]) -> list[str]:
        """Those that are control tokens of this model."""
        return [mark for mark in marks if mark in self._formats.control_ids]

    def parser(self, before: Prompted) -> ChatParser:
        """A parser for one answer.

        Args:
          before: what the prompt has said of thoughts.
        """
        body, reasoning = self._body, self._formats.reasoning
        calls = None
        if self._has_tools:
            names = frozenset(tool.function.name for tool in body.callable_tools)
            hidden = () if body.skip_special_tokens is False else self._control_marks(self._format.markers)
            calls = self._format.make(names, hidden)
        return ChatParser(
            ReasoningParser(reasoning, before) if reasoning is not None else None,
            calls,
            max_calls=1 if body.parallel_tool_calls is False else None,
        )
