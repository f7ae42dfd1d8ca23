"""Choices that a user has made."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto.planner.search.fixed import fixed


def test_values_and_other_names() -> None:
    found = fixed(["tp=8", "pp=4,8", "zero=3", "sp=true", "schedule=1f1b,zb-v", "micro=2"])
    assert found == {
        "tp": (8,),
        "pp": (4, 8),
        "mode": ("zero3",),
        "sequence_parallel": (True,),
        "schedule": ("1f1b", "zb-v"),
        "micro_batch": (2,),
    }


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_what_is_wrong_is_told(text: str, said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        fixed([text])
