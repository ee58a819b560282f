"""What the C library does with memory that is freed: on a CPU, every result of a program is such memory."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_KEPT_BYTES = 1 << 30  # as much freed memory stays with the process


def keep_freed_memory() -> bool:
    """Has freed memory used again, rather than given back to the system and asked for anew. Returns whether it can.

    XLA:CPU allocates what a program returns and its temporaries at each call. glibc maps pieces of 32 MiB and more
    afresh each time, and the system clears them page by page: the logits of 200 rows, 39 MB, took longer to be given
    than to be computed. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(name, value) == 1 for name, value in settings)
