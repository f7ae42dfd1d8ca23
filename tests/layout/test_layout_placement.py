"""Which pipeline rank holds which stage."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto.layout import place
from stretto.layout.placement import PLACEMENTS


def test_placements() -> None:
    assert place("linear", 3) == (0, 1, 2)
    assert place("linear", 3, 2) == (0, 0, 1, 1, 2, 2)
    assert place("loop", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert place("vee", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert place("zigzag", 3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_rank_holds_as_many_stages(name: str) -> None:
    for ranks in (1, 2, 5):
        placed = place(name, ranks, 2)
        assert [placed.count(rank) for rank in range(ranks)] == [2] * ranks


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "says"),
    [
        ("loup", 2, 1, "'loup'"),
        ("vee", 2, 3, "chunks=3"),
        ("loop", 0, 1, "ranks=0"),
        ("loop", 1, 0, "chunks=0"),
    ],
)
def test_what_is_refused(name: str, ranks: int, chunks: int, says: str) -> None:
    with pytest.raises(StrettoError, match=says):
        place(name, ranks, chunks)
