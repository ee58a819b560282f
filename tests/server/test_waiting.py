"""Waiting for what a client has asked for."""

from __future__ import annotations

import asyncio
import gc

import pytest
from fastapi import Request

from jaxpaged.errors import QueueFullError
from server.errors import ClientGone
from server.waiting import unless_gone


@pytest.mark.parametrize(("error", "logged"), [(KeyError("oops"), True), (QueueFullError("full"), False)])
def test_what_fails_while_it_is_cancelled_is_logged_if_it_is_our_fault(caplog, error: Exception, logged: bool) -> None:
    """Nobody else would learn of it but Python, in words of its own."""

    async def fails_at_the_end() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise error from None

    async def disconnect() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def main() -> None:
        with pytest.raises(ClientGone):
            await unless_gone(Request({"type": "http"}, disconnect), fails_at_the_end())
        gc.collect()

    asyncio.run(main())
    assert ("oops" in caplog.text) is logged and "never retrieved" not in caplog.text
