from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.run.data.split import parse_ratio, split_tokens

LENGTHS = st.lists(st.integers(1, 1000), min_size=1, max_size=200)
SHARES = st.tuples(*[st.integers(0, 1000)] * 3).filter(any)


@given(LENGTHS, SHARES)
def test_the_splits_cover_the_stream_in_order(lengths: list[int], shares: tuple[int, int, int]):
    offsets = [0, *accumulate(lengths)]
    parts = list(split_tokens(offsets, ",".join(map(str, shares))).values())
    assert [i for part in parts for i in part] == list(range(offsets[-1]))
    for part, share in zip(parts, shares, strict=True):
        assert share or not part


@given(LENGTHS, SHARES)
def test_each_split_is_near_its_share(lengths: list[int], shares: tuple[int, int, int]):
    offsets = [0, *accumulate(lengths)]
    total, longest = offsets[-1], max(lengths)
    parts = split_tokens(offsets, ",".join(map(str, shares)))
    for part, share in zip(parts.values(), shares, strict=True):
        ideal = share / sum(shares) * total
        assert abs(len(part) - ideal) <= longest + 1
        assert ideal / 2 - 1 <= len(part) <= ideal * 1.5 + 1 or share == max(shares)


def test_cuts_fall_between_documents():
    offsets = list(range(0, 100_001, 10))
    splits = split_tokens(offsets, "949,50,1")
    assert splits == {"train": range(94_900), "valid": range(94_900, 99_900), "test": range(99_900, 100_000)}
    offsets = [0, *accumulate([9, 13] * 5000)]
    splits = split_tokens(offsets, "900,50,50")
    assert all(part.start in set(offsets) for part in splits.values())


def test_a_single_document_is_cut_in_two():
    assert split_tokens([0, 1000], "949,50,1") == {
        "train": range(949),
        "valid": range(949, 999),
        "test": range(999, 1000),
    }


def test_shares_of_nothing():
    assert split_tokens([0, 4, 10], "1,0,0") == {
        "train": range(10),
        "valid": range(10, 10),
        "test": range(10, 10),
    }
    assert split_tokens([0, 4, 10], "1,0,1") == {
        "train": range(4),
        "valid": range(10, 10),
        "test": range(4, 10),
    }
    assert len(split_tokens([0, 4, 10], "0,0,3")["test"]) == 10


@pytest.mark.parametrize(
    "ratio",
    ["", "1", "1,1", "1,1,1,1", "a,b,c", "1;1;1", "-1,1,1", "0,0,0", "nan,1,1", "inf,1,1", "1e308,1e308,0"],
)
def test_malformed_ratios(ratio: str):
    with pytest.raises(StrettoError, match="split") as caught:
        parse_ratio(ratio)
    assert repr(ratio) in caught.value.message
    assert "949,50,1" in (caught.value.hint or "")
