"""Compilations are counted, told, and bounded."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.engine.compiler import Compiler


def doubled(x: Tensor, kind: str) -> Tensor:
    return x + x if kind == "sum" else 2 * x


def test_graphs_are_counted_by_function_and_told_once() -> None:
    compiler = Compiler("eager")
    try:
        assert compiler.news() is None
        for _ in range(3):
            assert compiler(doubled)(torch.ones(3), "sum").tolist() == [2.0] * 3
        first = compiler.news()
        assert first is not None
        assert first.startswith("compiled doubled for all blocks: 1 graph")
        assert compiler.news() is None, "told already"
        with torch.no_grad():
            compiler(doubled)(torch.ones(2, 2), "sum")
        again = compiler.news()
        assert again is not None
        assert again.endswith("doubled of float32 [2, 2] without gradients"), "the cause of another graph"
        assert compiler.graphs == {"doubled": 2}
        for rows in (3, 4, 5):
            compiler(doubled, dynamic=True)(torch.ones(rows, 2), "product")
        assert compiler.graphs == {"doubled": 3}, "one for all sizes"
    finally:
        compiler.close()


def test_beyond_the_limit_a_function_runs_as_it_is_and_says_so() -> None:
    compiler = Compiler("eager", limit=2)
    try:
        for size in range(2, 6):
            assert compiler(doubled)(torch.ones(size), "sum").tolist() == [2.0] * size
        assert compiler.graphs == {"doubled": 2}
        news = compiler.news()
        assert news is not None
        assert "doubled runs uncompiled from now on" in news
        assert "float32 [4]" in news, "what it was called with"
    finally:
        compiler.close()


def test_models_of_one_process_count_their_own_graphs() -> None:
    compilers = [Compiler("eager"), Compiler("eager")]
    for compiler in compilers:
        compiler(doubled)(torch.ones(7), "sum")
        compiler.close()
    assert [compiler.graphs["doubled"] for compiler in compilers] == [1, 1]
