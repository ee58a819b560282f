"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from server.protocol.body import Body
from server.protocol.chat import ChatCompletionRequest, TemplateFields
from server.protocol.fields import invalid
from server.protocol.messages import Messages
from server.protocol.refused import NOT_YET_TOKENIZE
from server.protocol.tools import MAX_TOOLS, Tool, distinct_names

MAX_TOKENS = 1 << 20
_OF_CHAT = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")


class TokenizeRequest(Body, TemplateFields):
    """Body of POST /tokenize: a `prompt` or `messages`."""

    not_yet = NOT_YET_TOKENIZE

    prompt: str | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="Or a conversation.")
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add its own to a text, default true. Those of a chat, the template writes."
    )
    return_token_strs: bool | None = Field(None, description="Give the tokens as the vocabulary has them, too.")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        None, description="Functions that the model is told of."
    )

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
        self.check_turn()
        distinct_names(self.tools or ())
        return self

    def chat(self) -> ChatCompletionRequest:
        """The chat request with the same prompt; it may be longer than the context. All of it has been checked here."""
        fields = {name: getattr(self, name) for name in _OF_CHAT}
        return ChatCompletionRequest.model_construct(messages=self.messages or [], truncate_prompt_tokens=-1, **fields)


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    tokens: list[int] = Field(max_length=MAX_TOKENS, fail_fast=True, description="Token ids.")
