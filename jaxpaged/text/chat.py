"""Messages to token ids through the model's own chat template, rendered in transformers' sandbox."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from jaxpaged.errors import InvalidRequestError
from jaxpaged.text.time_limit import within

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RENDER_SECONDS = 3.0  # for a template
MAX_RENDERED = 64 << 20  # characters
PARTS = ("text", "refusal")  # kinds of parts, and the keys of their texts
MAX_NUMBER, MAX_DEPTH = 10**6, 32  # in template options: templates multiply texts, and count
MAX_NESTED = 200  # lists and objects in one another, in messages, tools and documents: as in a body over HTTP

_FEW_MESSAGES = 256
_PROBE = "qzcontentprobezq"
# Arguments of the renderer that a caller's template options must not take over.
_RESERVED = frozenset(
    {
        *("conversation", "conversations", "messages", "tools", "documents", "chat_template", "bos_token", "eos_token"),
        *("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens", "add_generation_prompt", "tokenizer"),
        *("continue_final_message", "allow_control_tokens", "max_tokens", "cut", "self", "template", "watched"),
    }
)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    continue_final_message: bool = False,
    allow_control_tokens: bool = False,
    max_tokens: int | None = None,
    cut: bool = False,
    **template_options: Any,
) -> list[int]:
    """The prompt of a conversation as token ids, the same as `apply_chat_template(tokenize=True)` gives.

    The template alone decides about BOS; none is added to what it writes.

    Args:
      messages: dicts with `role` (one of ROLES) and `content`: text, or a list of `{"type": "text", "text": ...}`.
        OpenAI's older `function` and `function_call` become `tool` and `tool_calls`, which templates know.
        A template that cannot loop over parts gets them joined by newlines. An assistant's content may be None.
      add_generation_prompt: end with the header of an assistant turn.
      tools: JSON schemas for the template.
      documents: documents for the template.
      chat_template: instead of the model's own.
      continue_final_message: leave the last message open, to be continued.
      allow_control_tokens: let text in messages that spells a control token become one. By default it stays
        text, so that a user cannot end his own turn and speak as the system.
      max_tokens: refuse what by its length cannot fit, before it is tokenized.
      cut: only the last tokens will be used, so what is longer may fit.
      template_options: further variables for the template.

    Raises:
      InvalidRequestError: no template, messages of a wrong form, or the template refuses them.
    """
    template = chat_template or chat_template_of(tokenizer, tools)
    check_template_options(template_options)
    takes_text, takes_parts = _content_forms(tokenizer, template)
    checked = [_message(m, i, takes_text, takes_parts) for i, m in enumerate(_nonempty(messages))]
    mark, specials = "", None
    if not allow_control_tokens and (specials := _special_pattern(tokenizer)) is not None:
        mark = f"\ue000{secrets.token_hex(8)}\ue001"  # unguessable: nobody can forge or meet it
        breaker = _Breaker(specials, mark)
        checked = breaker.broken(checked, "messages")
        tools = breaker.broken(tools, "tools")
        documents = breaker.broken(documents, "documents")
        template_options = breaker.broken(template_options, "chat_template_kwargs")
    text = _render(
        tokenizer,
        template,
        checked,
        # What clients send decides how long a template loops.
        watched=chat_template is not None or bool(template_options) or len(checked) > _FEW_MESSAGES,
        tools=list(tools) if tools else None,
        documents=list(documents) if documents else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **template_options,
    )
    if max_tokens is not None:
        tokenizer.check_length(text.replace(mark, "") if mark else text, max_tokens, cut=cut)
    return _encode(tokenizer, text, mark)


def check_template_options(options: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError if an option is an argument of `render_chat` or of the renderer, not a variable."""
    reserved = sorted(_RESERVED & options.keys())
    if reserved:
        raise InvalidRequestError(f"{reserved} cannot be set as template options", param="chat_template_kwargs")
    _check_option(options, MAX_DEPTH)


def _check_option(value: Any, depth: int) -> None:
    if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise InvalidRequestError(
            f"chat_template_kwargs hold {value!r:.40}; numbers go to {MAX_NUMBER}", param="chat_template_kwargs"
        )
    if isinstance(value, Mapping | list | tuple):
        if not depth:
            raise InvalidRequestError(f"chat_template_kwargs: deeper than {MAX_DEPTH}", param="chat_template_kwargs")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_option(item, depth - 1)


def _render(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]], *, watched: bool, **options: Any
) -> str:
    """Args: watched: with an eye on the time, which costs some."""

    def render() -> Any:
        return tokenizer.hf.apply_chat_template(messages, chat_template=template, tokenize=False, **options)

    try:
        text = within(RENDER_SECONDS, render) if watched else render()
    except Exception as e:  # a template is a program: anything may come out of it, and all of it is about the request
        what = "the chat template refuses the messages" if isinstance(e, jinja2.TemplateError) else "chat template"
        raise InvalidRequestError(f"{what}: {e or type(e).__name__}", param="messages") from e
    assert isinstance(text, str)
    if len(text) > MAX_RENDERED:
        raise InvalidRequestError(
            f"the chat template writes {len(text)} characters, at most {MAX_RENDERED}", param="messages"
        )
    return text


@functools.lru_cache(maxsize=64)
def template_knows(template: str, variable: str) -> bool:
    """Whether a template speaks of a variable."""
    return re.search(rf"\b{variable}\b", template) is not None


def chat_template_of(tokenizer: Tokenizer, tools: Any = None) -> str:
    """The model's template, that for tools if there is one and they are given.

    Raises:
      InvalidRequestError: it has none.
    """
    template, named = tokenizer.chat_template, tokenizer.chat_templates
    if tools and isinstance(named, Mapping):
        template = named.get("tool_use", template)
    if not template:
        raise InvalidRequestError(
            "this model has no chat template: send a rendered prompt to /v1/completions or generate() instead",
            param="messages",
        )
    return template


def _nonempty(messages: Any) -> Sequence[Message]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages must be a list, not {type(messages).__name__}", param="messages")
    if not messages:
        raise InvalidRequestError("messages is empty: it needs at least one message", param="messages")
    return messages


def _message(message: Any, index: int, takes_text: bool, takes_parts: bool) -> dict[str, Any]:
    """A checked copy of a message, its content in a form that the template prints well."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be a dict, not {type(message).__name__}", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role={role!r} must be one of {', '.join(ROLES)}", param=f"{where}.role")
    checked = {key: value for key, value in message.items() if value is not None and key != "content"}
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], f"{where}.tool_calls")
    if "function_call" in checked:
        call = {"type": "function", "function": checked.pop("function_call")}
        checked.setdefault("tool_calls", [_tool_call(call, f"{where}.function_call")])
    if role == "function":
        checked["role"] = "tool"
    if isinstance(checked.get("reasoning"), str):  # templates know it by the older name
        checked.setdefault("reasoning_content", checked["reasoning"])
    content = message.get("content")
    if content is None:
        if role not in ("assistant", "function"):
            raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content")
        content = checked.get("refusal", "")  # a template that prints it must not print "None"
    texts = _texts(content, f"{where}.content")
    if isinstance(content, str):
        checked["content"] = content if takes_text or not takes_parts else [{"type": "text", "text": content}]
    else:
        checked["content"] = [{"type": "text", "text": t} for t in texts] if takes_parts else "\n".join(texts)
    return checked


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, str):
        return [_encodable(content, where)]
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise InvalidRequestError(f"{where} must be text or a list of parts, not {type(content).__name__}", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in PARTS:
            raise InvalidRequestError(f"{where}[{i}] is of type {kind!r}; only 'text' is supported", param=where)
        text = part.get(kind)
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}[{i}].{kind} must be text, not {text!r}", param=where)
        texts.append(_encodable(text, where))
    return texts


def _encodable(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InvalidRequestError(
            f"{where} holds the lone surrogate {text[e.start]!r}, which is no character", param=where
        ) from e
    return text


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """Tool calls with their arguments as objects, which is what templates expect; the wire has them as JSON text.

    A call that was cut off has arguments that are no JSON yet: those stay the text they are, as the model wrote them.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequestError(f"{where} must be a list, not {type(calls).__name__}", param=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} needs a function with a name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {**call, "function": {**function, "arguments": _encodable(arguments, where)}}
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"{where}.function.arguments is no JSON object", param=where)
    return {**call, "function": {**function, "arguments": arguments}}


@functools.lru_cache(maxsize=16)
def _content_forms(tokenizer: Tokenizer, template: str) -> tuple[bool, bool]:
    """Whether the template prints content given as text, and as a list of parts. Found by trying both."""

    def prints(content: Any) -> bool:
        try:
            text = _render(tokenizer, template, [{"role": "user", "content": content}], watched=True)
        except InvalidRequestError:
            return False
        # A list printed as it is would show its quotes.
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    return prints(_PROBE), prints([{"type": "text", "text": _PROBE}])


@functools.lru_cache(maxsize=16)
def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the text of any control token of two characters or more."""
    texts = {str(tokenizer.piece(i)) for i in tokenizer.special_ids}
    longest_first = sorted((t for t in texts if len(t) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


@dataclass(frozen=True)
class _Breaker:
    """Puts `mark` after the first character of whatever `specials` matches: the text of a control token."""

    specials: re.Pattern[str]
    mark: str

    def broken(self, value: Any, param: str, depth: int = MAX_NESTED) -> Any:
        """A copy of `value` with every string in it broken, keys included."""
        if isinstance(value, str):
            return self.specials.sub(lambda m: f"{m[0][0]}{self.mark}{m[0][1:]}", value)
        if not isinstance(value, Mapping | Sequence):
            return value
        if not depth:
            raise InvalidRequestError(f"{param}: deeper than {MAX_NESTED}", param=param)
        if isinstance(value, Mapping):
            return {
                self.broken(key, param) if isinstance(key, str) else key: self.broken(item, param, depth - 1)
                for key, item in value.items()
            }
        return [self.broken(item, param, depth - 1) for item in value]


def _encode(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    """Token ids of a rendered prompt; at a mark the text is cut, so that no token reaches across."""
    if not mark or mark not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    first, *rest = text.split(mark)
    ids = tokenizer.encode(first, add_special_tokens=False)
    # SentencePiece would put a space before each part: encode it after a newline, whose tokens are then dropped.
    newline = tokenizer.encode("\n", add_special_tokens=False)
    for part in rest:
        after = tokenizer.encode("\n" + part, add_special_tokens=False)
        whole = after[: len(newline)] == newline
        ids += after[len(newline) :] if whole else tokenizer.encode(part, add_special_tokens=False)
    return ids
