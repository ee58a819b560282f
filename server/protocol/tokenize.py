"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.errors import shown
from server.protocol.chat import MAX_MESSAGES, MAX_TEMPLATE, ChatCompletionRequest
from server.protocol.fields import invalid
from server.protocol.tools import MAX_TOOLS, Tool
from server.refused import first_refused

MAX_TOKENS = 1 << 20
# Fields of vLLM -> values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}
_OF_CHAT = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: a `prompt` or `messages`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(None, description="A served model name; absent: the one that is served.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[Any] | None = Field(None, max_length=MAX_MESSAGES, description="Or a conversation.")
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add its own to a text, default true. Those of a chat, the template writes."
    )
    return_token_strs: bool | None = Field(None, description="Give the tokens as the vocabulary has them, too.")
    add_generation_prompt: bool | None = Field(None, description="Open an assistant turn. Default true.")
    continue_final_message: bool | None = Field(None, description="Leave the last message open.")
    chat_template: str | None = Field(
        None, max_length=MAX_TEMPLATE, description="Refused, unless the server trusts its clients' templates."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model is told of."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        refused = first_refused(data, _NOT_YET)
        if refused is not None:
            context = {"param": refused, "shown": shown(data[refused])}
            raise PydanticCustomError("unsupported", "{param}={shown} is not supported", context)
        return {name: value for name, value in data.items() if name not in _NOT_YET}

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "exactly one of prompt and messages is needed")
        if self.messages is None:
            for name in _OF_CHAT:
                if getattr(self, name) is not None:
                    raise invalid(name, f"{name} is only allowed with messages")
            return self
        if self.add_special_tokens:
            raise invalid("add_special_tokens", "add_special_tokens=true: the chat template writes them itself")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        return self

    def chat(self) -> ChatCompletionRequest:
        """The chat request with the same prompt; it may be longer than the context."""
        fields = {name: getattr(self, name) for name in _OF_CHAT}
        return ChatCompletionRequest(messages=self.messages or [], truncate_prompt_tokens=-1, **fields)


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="A served model name; absent: the one that is served.")
    tokens: list[int] = Field(max_length=MAX_TOKENS, description="Token ids.")
