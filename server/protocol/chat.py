"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from server.errors import shown
from server.protocol.fields import invalid
from server.protocol.generation import GenerationRequest
from server.protocol.messages import Messages
from server.protocol.refused import NOT_YET_CHAT
from server.protocol.structured import structured_field
from server.protocol.tools import ToolFields

MAX_DOCUMENTS = 1024
MAX_TEMPLATE = 1 << 16  # characters

Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)]


class TemplateFields(BaseModel):
    """What a body may ask of the chat template."""

    chat_template: str | None = Field(
        None, max_length=MAX_TEMPLATE, description="Refused, unless the server trusts its clients' templates."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = Field(
        None, description="Open an assistant turn. Default true, unless the last message is continued."
    )
    continue_final_message: bool | None = Field(None, description="Leave the last message open: it is continued.")

    def check_turn(self) -> None:
        """Raises what `invalid` makes if the last message is to be continued and a new one to be begun."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise invalid("continue_final_message", message)


class ChatCompletionRequest(GenerationRequest, ToolFields, TemplateFields):
    """Body of POST /v1/chat/completions."""

    not_yet = NOT_YET_CHAT

    messages: Messages = Field(description="The conversation.")
    echo: bool | None = Field(None, description="Begin the answer with the last message, if it is the assistant's.")
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer word for `max_tokens`.")
    logprobs: bool | None = Field(None, description="Logprobs of each token.")
    top_logprobs: int | None = Field(None, description="And of this many most likely ones.")
    include_reasoning: bool | None = Field(None, description="Give the model's thoughts. Default true.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much to think, for the chat template; one that knows none is unchanged."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Ignored: no template knows it.")
    documents: Documents | None = Field(None, description="Documents for the chat template, where it knows any.")

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:  # 0 is vLLM's default
            raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs=true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise invalid(
                "max_tokens", f"max_tokens={shown(both[0])} contradicts max_completion_tokens={shown(both[1])}"
            )
        self.check_tools()
        self.check_turn()
        form = structured_field(self)
        if self.forces_call and form is not None:
            raise invalid(form, f"{form} contradicts tool_choice, which demands a call")
        return self
