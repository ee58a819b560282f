"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from server.protocol.fields import invalid
from server.protocol.generation import GenerationRequest
from server.refused import NOT_YET_CHAT

MAX_MESSAGES = 16384


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    not_yet = NOT_YET_CHAT

    messages: list[Any] = Field(
        max_length=MAX_MESSAGES, description="The conversation: objects with `role` and `content`."
    )
    echo: bool | None = Field(None, description="Begin the answer with the last message, if it is the assistant's.")
    max_completion_tokens: int | None = Field(None, description="Most tokens to generate.")
    logprobs: bool | None = Field(None, description="Logprobs of each token.")
    top_logprobs: int | None = Field(None, description="And of this many most likely ones.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = Field(None, description="Open an assistant turn. Default true.")
    continue_final_message: bool | None = Field(None, description="Continue the last message.")

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs=true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise invalid("max_tokens", f"max_tokens={both[0]} contradicts max_completion_tokens={both[1]}")
        return self
