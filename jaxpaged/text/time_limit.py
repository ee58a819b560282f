"""A limit to the time that a function takes, in any thread."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Overdue(BaseException):
    """Raised in the function; not an Exception, which it might catch."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """What the function returns. It is ended between two of its bytecodes: a single long call of C goes on.

    Args:
      seconds: of the processor's time for this thread, where the system tells it: on a busy machine work may wait long.

    Raises:
      TimeoutError: it took longer.
    """
    lock, thread, over = threading.Lock(), threading.get_ident(), threading.Event()
    sent, arrived = False, False
    clock = _clock(thread)
    begin = clock()

    def watch() -> None:
        nonlocal sent
        left = seconds
        while not over.wait(left):
            with lock:
                if over.is_set():
                    return
                used = clock() - begin
                if used >= seconds:
                    sent = True
                    _raise_in(thread, ctypes.py_object(_Overdue))
                    return
            left = max(seconds - used, seconds / 10)  # it may wait for a processor: do not spin

    try:
        try:
            threading.Thread(target=watch, name="jaxpaged-time-limit", daemon=True).start()
            return function()
        except _Overdue:
            arrived = True
            raise
        finally:
            with lock:  # the thread, and so its clock, is there while it is held
                over.set()
            if sent and not arrived:  # it comes now, or never: where it came may have ignored it, as `__del__` does
                _raise_in(thread, None)
    except _Overdue:
        raise TimeoutError(f"it took longer than {seconds} s") from None


def _clock(thread: int) -> Callable[[], float]:
    """Seconds of a running thread; on macOS and Windows those of the wall."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    return functools.partial(time.clock_gettime, time.pthread_getcpuclockid(thread))


def _raise_in(thread: int, error: ctypes.py_object | None) -> None:
    """Has a thread raise an error when it can; None: takes back what has not been raised."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
