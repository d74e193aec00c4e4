"""How freed memory returns to the system. To be set before other threads start, hence free of our imports."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt(3)
_THRESHOLD_BYTES = 32 << 20


def share_one_heap() -> None:
    """Makes all threads allocate from one heap whose free end is given back.

    By default glibc gives every thread a heap of its own, and keeps what a pass has freed for as long as it likes: the
    peak was up to twice what a pass really held (`docs/memory.md`). Settings in the environment (`MALLOC_ARENA_MAX`)
    lose against this. Does nothing where the C library is another one.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, value in (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _THRESHOLD_BYTES),
    ):
        mallopt(option, value)
