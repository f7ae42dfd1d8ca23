"""Choices that a user has fixed."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto.planner.search.fixed import fixed


def test_values_and_aliases_are_read() -> None:
    values = fixed(["tp=8", "pp=4,8", "zero=3", "sp=true", "schedule=1f1b,zb-v", "micro=2"])
    assert values == {
        "tp": (8,),
        "pp": (4, 8),
        "mode": ("zero3",),
        "sequence_parallel": (True,),
        "schedule": ("1f1b", "zb-v"),
        "micro_batch": (2,),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "no choice"),
        ("tp=0", "not a number"),
        ("sp=perhaps", "perhaps"),
        ("schedule=1f2b", "1f2b"),
        ("width=3", "no choice 'width'"),
        ("memory_gib=40", "recompute=auto"),
        ("memory_gib=-1", "above 0"),
    ],
)
def test_invalid_choices_are_errors(text: str, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        fixed([text])
