"""Loops over the elements of tensors in host memory, compiled by numba if it is installed, and their
threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch


@cache
def has_numba() -> bool:
    """Return True if loops can be compiled."""
    return find_spec("numba") is not None


def jit(function: Any = None, *, inline: bool = False, exact: bool = False) -> Any:
    """Compile at the first call with each combination of types; cached on disk if the cache is writable.

    Unless `exact`, sums may be reordered for vectorisation (`reassoc`), the same way in every run.
    """
    import numba

    if function is None:
        return lambda function: jit(function, inline=inline, exact=exact)
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": False if exact else {"contract", "reassoc", "nsz"},
        "forceinline": inline,
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable cache folder
        return numba.njit(**options)(function)


def in_parts(call: Callable[[int, int], None], count: int, minimum: int = 2) -> None:
    """Call `call(first, last)` for equal parts of [0, count), one per thread of torch's.

    Args:
        minimum: count from which on threads save more than they cost.
    """
    threads = torch.get_num_threads()
    if threads == 1 or count < minimum:
        call(0, count)
        return
    edges = [count * i // threads for i in range(threads + 1)]
    pool = _threads(os.getpid(), threads - 1)
    parts = [pool.submit(call, *part) for part in pairwise(edges[1:])]
    call(edges[0], edges[1])
    for part in parts:
        part.result()


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Return the thread pool of this process; keyed by process because threads do not survive a fork."""
    return ThreadPoolExecutor(count, "loops")
