"""The thoughts of a model, between `<think>` and `</think>`, told from its answer as they come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from jaxpaged.errors import ConfigError
from server.parsing.deltas import Content, Reasoning
from server.parsing.json_value import BLANKS
from server.parsing.scanner import Markers, Scanner


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its thoughts.

    Attributes:
      begin, end: the marks.
      always: an answer without the first mark begins with thoughts too, unless the prompt has ended them.
    """

    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False


_THINK = ReasoningFormat()
REASONING_FORMATS = {"deepseek_r1": ReasoningFormat(always=True), "qwen3": _THINK, "think": _THINK}


def reasoning_format(name: str | None) -> ReasoningFormat | None:
    """The format of this name.

    Raises:
      ConfigError: there is none.
    """
    if name is None:
        return None
    if name not in REASONING_FORMATS:
        raise ConfigError(f"reasoning_parser={name!r} must be one of {', '.join(REASONING_FORMATS)}")
    return REASONING_FORMATS[name]


class Prompted(Enum):
    """What a prompt has said of thoughts at its end."""

    NOTHING = "nothing"
    BEGUN = "begun"
    ENDED = "ended"


def prompted(form: ReasoningFormat, prompt_end: str) -> Prompted:
    """Read from the end of a prompt: templates begin thoughts, or end them to have none.

    Only blanks may follow a mark: what a user writes before the assistant's turn is none of it.
    """
    text = prompt_end.rstrip()
    if text.endswith(form.begin):
        return Prompted.BEGUN
    return Prompted.ENDED if text.endswith(form.end) else Prompted.NOTHING


class ReasoningParser(Scanner):
    """Thoughts, then content. Newlines beside the marks belong to neither; a text in which thoughts do not end is all
    thoughts.

    Attributes:
      thinking: thoughts have not ended.
      num_bytes: of the text up to where they ended.
    """

    def __init__(self, form: ReasoningFormat, before: Prompted):
        self._begin_mark, self._end_mark = Markers(form.begin), Markers(form.end)
        self._always = form.always or before is Prompted.BEGUN
        self._blanks: list[str] = []  # that have not been told
        self.num_bytes = 0
        super().__init__()
        self.thinking = before is not Prompted.ENDED
        self._told = False
        if not self.thinking:
            self._state = self._content

    def _begin(self, text: str, i: int) -> int:
        """Before thoughts or content."""
        if text[i] in BLANKS:
            self._blanks.append(text[i])
            return i + 1
        at, mark = self._begin_mark.find(text, i)
        if at == i and not mark:
            return i  # it may become one
        if at == i:
            self._count(self._told_blanks() + mark)
            self._state = self._think
            return i + len(mark)
        if self._always:
            blanks = self._told_blanks()
            self._count(blanks)
            self._blanks.append(blanks.lstrip("\n"))
            self._state = self._think
        else:
            self.thinking = False
            self._deltas.append(Content(self._told_blanks()))
            self._state = self._content
        return i

    def _think(self, text: str, i: int) -> int:
        at, mark = self._end_mark.find(text, i)
        thought = text[i:at]
        self._count(thought + mark)
        if not self._told:
            thought = thought.lstrip("\n")
        said = thought.rstrip("\n")
        if said:
            self._deltas.append(Reasoning(self._told_blanks() + said))
            self._told = True
        if self._told:
            self._blanks.append(thought[len(said) :])
        if mark:
            self._blanks.clear()
            self.thinking = False
            self._state = self._after
        return at + len(mark)

    def _after(self, text: str, i: int) -> int:
        """After the thoughts."""
        while i < len(text) and text[i] == "\n":
            i += 1
        if i < len(text):
            self._state = self._content
        return i

    def _content(self, text: str, i: int) -> int:
        self._deltas.append(Content(text[i:]))
        return len(text)

    def _end(self, rest: str) -> None:
        if self._state == self._think:
            self._count(rest)
            self._deltas.append(Reasoning(self._told_blanks() + rest))
        elif self._state == self._begin:
            rest = self._told_blanks() + rest
            self.thinking = self._always
            if self._always:
                self._count(rest)
            self._deltas.append(Reasoning(rest) if self._always else Content(rest))

    def _told_blanks(self) -> str:
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks

    def _count(self, text: str) -> None:
        self.num_bytes += len(text.encode("utf-8", "replace"))
