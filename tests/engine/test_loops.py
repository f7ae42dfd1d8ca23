"""Compiled loops: what several ranks need at once, one of them compiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from ranks import on_ranks
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


def compile_together(path: Path) -> tuple[float, int, int]:
    """The result of a loop that calls another, how often it was compiled here, and how often it was read."""
    loop = load_module(path).sum_of_squares
    dist.barrier()
    total = loop(np.arange(4.0))
    counts = loop.stats
    return total, sum(counts.cache_misses.values()), sum(counts.cache_hits.values())


def test_ranks_that_start_together_compile_a_loop_once(tmp_path: Path) -> None:
    path = tmp_path / "loops_of_a_test.py"
    path.write_text(LOOPS, encoding="utf-8")
    ranks = on_ranks(2, compile_together, path)
    assert [total for total, _, _ in ranks] == [14.0, 14.0]
    assert sorted((compiled, read) for _, compiled, read in ranks) == [(0, 1), (1, 0)]
