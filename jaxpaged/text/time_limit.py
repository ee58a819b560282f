"""A limit to the time that a function takes, in any thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Overdue(BaseException):
    """Raised in the function; not an Exception, which it might catch."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """What the function returns. It is ended between two of its bytecodes: a single long call of C goes on.

    Raises:
      TimeoutError: it took longer.
    """
    lock, thread = threading.Lock(), threading.get_ident()
    running, sent, arrived = True, False, False

    def interrupt() -> None:
        nonlocal sent
        with lock:
            if running:
                sent = True
                _raise_in(thread, ctypes.py_object(_Overdue))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    try:
        try:
            timer.start()
            return function()
        except _Overdue:
            arrived = True
            raise
        finally:
            with lock:
                running = False
            timer.cancel()
            if sent and not arrived:  # it comes now, or never: where it came may have ignored it, as `__del__` does
                _raise_in(thread, None)
    except _Overdue:
        raise TimeoutError(f"it took longer than {seconds} s") from None


def _raise_in(thread: int, error: ctypes.py_object | None) -> None:
    """Has a thread raise an error when it can; None: takes back what has not been raised."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
