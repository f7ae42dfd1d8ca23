"""A reduction over two levels holds one level's tensors at a time."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stretto.engine.parallel.data import reduction
from stretto.engine.parallel.data.reduction import Reduction, ShardGroups, reduce_to


class Sent:
    """A collective's handle that keeps its tensors alive, like a backend."""

    def __init__(self, pieces: Tensor) -> None:
        self.pieces = pieces

    def wait(self) -> None:
        pass


def test_the_whole_gradient_is_gone_when_the_second_level_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[weakref.ref[Sent]]()
    alive = list[int]()

    def start(pieces: Tensor, group: Any, out: Tensor | None = None) -> tuple[Tensor, Sent]:
        alive.append(sum(reference() is not None for reference in sent))
        work = Sent(pieces)
        sent.append(weakref.ref(work))
        return pieces[0].clone(), work

    monkeypatch.setattr(reduction, "start_scatter_sum", start)
    pair = SimpleNamespace(size=lambda: 2)
    groups = cast(ShardGroups, SimpleNamespace(levels=[pair, pair, None, None]))
    results = Reduction(reduce_to(torch.arange(8.0), groups, 0, 2)).finish()
    assert results.tolist() == [0.0, 1.0]
    assert alive == [0, 0]
    assert all(reference() is None for reference in sent)
