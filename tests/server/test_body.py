"""Bodies that are long: nothing that grows with them is done in the event loop."""

from __future__ import annotations

import threading

import pytest

import server.routes.chat
import server.routes.tokenize
from server.body import LONG_BODY
from server.chat.plan import ChatPlan

HELLO = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d" * (LONG_BODY // 2)}}
LONG = [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "g"}}]
SHORT = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(("tools", "beside"), [(SHORT, False), (LONG, True)], ids=["short", "long"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tools_are_taken_in_where_they_hold_nobody_up(start, monkeypatch, path, tools, beside) -> None:
    live, threads = start(engine_options={"max_model_len": 200_000}), []

    class Watched(ChatPlan):
        def __init__(self, *args) -> None:
            threads.append(threading.current_thread())
            super().__init__(*args)

        @property
        def messages(self):
            threads.append(threading.current_thread())
            return super().messages

        def of_answers(self, *args):
            threads.append(threading.current_thread())
            return super().of_answers(*args)

    monkeypatch.setattr(server.routes.chat, "ChatPlan", Watched)
    monkeypatch.setattr(server.routes.tokenize, "ChatPlan", Watched)
    body = {"messages": HELLO, "tools": tools}
    if "chat" in path:
        body |= {"max_tokens": 2, "truncate_prompt_tokens": 9}
    assert live.post(path, **body).status_code == 200
    assert len(threads) == (3 if "chat" in path else 2)
    assert [thread is not live.thread for thread in threads] == [beside] * len(threads)
