"""DeepSeek V3, R1 and V3.1.

V3 and R1 write a type, a name, and the arguments in a fenced block; V3.1 the name and the arguments alone:

    <|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>NAME
    ```json
    {...}
    ```<|tool▁call▁end|><|tool▁calls▁end|>

    <|tool▁calls▁begin|><|tool▁call▁begin|>NAME<|tool▁sep|>{...}<|tool▁call▁end|><|tool▁calls▁end|>
"""

from __future__ import annotations

from server.parsing.json_value import BLANKS
from server.parsing.scanner import Markers, State
from server.tools.call_scanner import CallScanner
from server.tools.calls import Call, NamedCall

# The bars are full-width and the blanks are no spaces.
CALLS, CALL, SEPARATOR, END, CALLS_END = (
    f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")
    for name in ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end")
)
FENCE = "```json"
MAX_HEAD = 512  # characters between the beginning of a call and its arguments


class DeepSeekV3Parser(CallScanner):
    """Calls between markers."""

    MARKERS = (CALLS, CALL, SEPARATOR, END, CALLS_END)
    _markers = Markers(*MARKERS)
    _is_open = False  # calls have begun: the markers around them are none of the text
    _in_fence = False
    _head: list[str]
    _head_size = 0

    def _begin(self, text: str, i: int) -> int:
        at, marker = self._markers.find(text, i)
        self._say_between(text[i:at])
        if marker in (CALLS, CALL):
            self._raw.append(marker)
            if marker == CALL:
                self._head, self._head_size = [], 0
                self._state = self._read_head
        elif marker and not self._is_open:
            self._say_between(marker)
        self._is_open &= marker != CALLS_END
        return at + len(marker)

    def _say_between(self, text: str) -> None:
        """Content, and before it what was thought to begin calls; blanks may stand between the beginnings."""
        if not self._raw:
            self._say(text)
            return
        self._raw.append(text)
        if text.strip():
            self._give_up()

    def _read_head(self, text: str, i: int) -> int:
        """Up to the arguments."""
        at, marker = self._markers.find(text, i)
        brace = text.find("{", i, at)
        end = brace if brace >= 0 else at
        self._head.append(text[i:end])
        self._raw.append(text[i:end])
        self._head_size += end - i
        if brace < 0 and marker == SEPARATOR and SEPARATOR not in self._head:
            self._head.append(marker)
            self._raw.append(marker)
            return end + len(marker)
        if brace >= 0 or marker or self._head_size > MAX_HEAD:
            name = self._name()
            if brace >= 0 and name:
                self._start_call(NamedCall(self._num_calls, name))
            else:
                self._give_up()
                self._state = self._begin
        return end

    def _name(self) -> str:
        """The name that the head tells; "" if none."""
        before, separator, after = "".join(self._head).partition(SEPARATOR)
        if not separator:
            return ""
        name, fence, rest = after.partition(FENCE)
        self._in_fence = bool(fence)
        if not fence:
            return before.strip() if not after.strip() else ""
        return "" if rest.strip() else name.strip()

    def _after_call_of(self, call: Call) -> State:
        self._is_open |= call.begun
        return self._fence_end if call.done and self._in_fence else self._begin

    def _fence_end(self, text: str, i: int) -> int:
        """After the arguments: the fence that ends them is none of the text."""
        if text[i] in BLANKS or text[i] == "`":
            self._raw.append(text[i])
            if self._raw[-3:] == ["`"] * 3:
                self._raw.clear()
                self._state = self._begin
            return i + 1
        self._give_up()
        self._state = self._begin
        return i
