"""Delays Ctrl-C while a step swaps donated device arrays for their successors."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds Ctrl-C back until the block is done; a second one comes through at once.

    A step donates device arrays and takes their successors from the result. Python raises KeyboardInterrupt between any
    two instructions, so also between these, and then both are gone. Only the main thread is ever interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, or not Python's
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            handler(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
