"""Compiled loops: what several ranks need at once, one of them compiles."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from ranks import on_ranks
from stretto.engine import loops
from stretto.user_file import load_module

pytest.importorskip("numba", reason="pip install -e '.[fast]'")

LOOPS = """
from stretto.engine.loops import jit


@jit
def square(x):
    return x * x


@jit
def sum_of_squares(values):
    total = 0.0
    for value in values:
        total += square(value)
    return total
"""


def compile_together(path: Path) -> tuple[float, int, int, str]:
    """The result of a loop that calls another, how often it was compiled and read, and what was printed."""
    loops._folders.clear()  # those of tables may have been compiled a moment ago
    loop = load_module(path).sum_of_squares
    dist.barrier()
    with redirect_stderr(StringIO()) as printed:
        total = loop(np.arange(4.0))
    counts = loop.stats
    return total, sum(counts.cache_misses.values()), sum(counts.cache_hits.values()), printed.getvalue()


def test_ranks_that_start_together_compile_a_loop_once(tmp_path: Path) -> None:
    path = tmp_path / "loops_of_a_test.py"
    path.write_text(LOOPS, encoding="utf-8")
    ranks = on_ranks(2, compile_together, path)
    assert [total for total, *_ in ranks] == [14.0, 14.0]
    announced = "compiling loops over tables for this machine, once: then they are cached\n"
    assert sorted(counts for _, *counts in ranks) == [[0, 1, ""], [1, 0, announced]]
