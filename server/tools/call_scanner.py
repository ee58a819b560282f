"""Content with calls in it: what the parsers of all formats share."""

from __future__ import annotations

from collections.abc import Sequence

from server.parsing.deltas import Content
from server.parsing.scanner import Scanner, State
from server.tools.calls import Call


class CallScanner(Scanner):
    """Content with calls in it. Blanks around calls belong to neither, and what began as a call but is none is content.

    Args:
      hidden: markers that are control tokens of the model: they are never content.
    """

    MARKERS: tuple[str, ...] = ()  # texts that may be control tokens

    def __init__(self, hidden: Sequence[str] = ()):
        super().__init__()
        self._hidden = hidden
        self._call: Call | None = None
        self._num_calls = 0
        self._raw: list[str] = []  # of a call that has not begun
        self._blanks: list[str] = []  # that have not been told
        self._after_call = False

    def _say(self, text: str) -> None:
        """Adds content; blanks at its end wait for what follows them."""
        for marker in self._hidden:
            text = text.replace(marker, "")
        said = text.rstrip()
        if said:
            self._deltas.append(Content("".join(self._blanks) + said))
            self._blanks.clear()
            self._after_call = False
        if len(said) < len(text):
            self._blanks.append(text[len(said) :])

    def _start_call(self, call: Call) -> None:
        self._call, self._state = call, self._read_call

    def _read_call(self, text: str, i: int) -> int:
        call = self._call
        assert call is not None
        was_begun = call.begun
        end = call.feed(text, i, self._deltas)
        if not call.begun:
            self._raw.append(text[i:end])
        elif not was_begun:
            self._num_calls += 1
            self._raw.clear()
        if call.done or call.failed:
            self._call = None
            self._state = self._after_call_of(call)
            if call.begun:
                self._blanks.clear()
                self._after_call = True
            else:
                self._give_up()
        return end

    def _after_call_of(self, call: Call) -> State:
        """The state after a call that is done or has failed."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """What was read is no call."""
        raw, self._raw = "".join(self._raw), []
        self._say(raw)

    def _end(self, rest: str) -> None:
        self._raw.append(rest)
        if self._call is None or not self._call.begun:
            self._give_up()
        if not self._after_call and self._blanks:
            self._deltas.append(Content("".join(self._blanks)))
