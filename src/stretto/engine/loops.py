"""Loops over the elements of tensors in host memory, compiled by numba if it is installed, and their
threads.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
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
        loop: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable cache folder
        return numba.njit(**options)(function)
    _folders.add(loop.stats.cache_path)
    loop.compile = partial(compile_in_turn, loop.compile, loop.stats.cache_path)
    return loop


_turn = threading.local()  # `taken`: this thread compiles, and with a loop those that it calls
_folders = set[str]()  # of caches
_SERIES_S = 60.0  # a loop that was cached so recently belongs to the same start of a job


def compile_in_turn(compile_loop: Callable[[Any], Any], folder: str, signature: Any) -> Any:
    """Compile a loop, or read it from the cache in `folder`, one process at a time: ranks that start together
    read what the first of them has compiled, which prints that it does.
    """
    from numba.core import event

    if getattr(_turn, "taken", False):
        return compile_loop(signature)
    os.makedirs(folder, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        _turn.taken = True
        listener = event.RecordingListener()
        listener.on_start = lambda event: announce_compilation()  # it is called if the cache has no such loop
        with event.install_listener("numba:compile", listener):
            return compile_loop(signature)
    finally:
        _turn.taken = False
        os.close(lock)


@cache
def announce_compilation() -> None:
    """Print that loops are being compiled, once for the ranks of a job."""
    indices = [index.stat().st_mtime for folder in _folders for index in Path(folder).glob("*.nbi")]
    if max(indices, default=0.0) < time.time() - _SERIES_S:
        print("compiling loops over tables for this machine, once: then they are cached", file=sys.stderr)


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
