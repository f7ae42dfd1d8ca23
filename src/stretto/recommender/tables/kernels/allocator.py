"""Keeps freed memory in the process, because each step allocates what the last one freed."""

from __future__ import annotations

import ctypes
import sys

# of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 1 << 25  # the most that it takes for the second


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, instead of giving pages back and faulting them in with each step.

    Blocks of 32 MiB and more still come and go. The process stays as large as it was at its fullest.

    Returns:
        Whether this system can: glibc on Linux.
    """
    if sys.platform != "linux":
        return False
    try:
        set_ = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(set_(_MMAP_THRESHOLD, _LARGEST)) and bool(set_(_TRIM_THRESHOLD, 2**31 - 1))
