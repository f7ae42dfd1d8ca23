"""Combinations of settings from words of a command line."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto.run.compare.combinations import combinations, file_name, matching, short_names, values


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1", ["1"]),
        ("1,2", ["1", "2"]),
        (" ddp , zero3 ", ["ddp", "zero3"]),
        ("[1,5],[3,3]", ["[1,5]", "[3,3]"]),
        ("[0.9,0.95]", ["[0.9,0.95]"]),
        ('"949,50,1"', ['"949,50,1"']),
        ("'a,b',\"c]\",{C1: {split: row, ranks: all}}", ["'a,b'", '"c]"', "{C1: {split: row, ranks: all}}"]),
        ("", [""]),
    ],
)
def test_commas_separate_values_outside_brackets_and_quotes(text: str, parts: list[str]) -> None:
    assert values(text) == parts


def test_the_product_of_all_values_in_order() -> None:
    combined = combinations(["layout.tp=1,2", "train.seed=3", "dp.mode=ddp,zero3"])
    assert [combination.overrides for combination in combined] == [
        ["layout.tp=1", "train.seed=3", "dp.mode=ddp"],
        ["layout.tp=1", "train.seed=3", "dp.mode=zero3"],
        ["layout.tp=2", "train.seed=3", "dp.mode=ddp"],
        ["layout.tp=2", "train.seed=3", "dp.mode=zero3"],
    ]
    assert short_names(combined) == ["tp=1 mode=ddp", "tp=1 mode=zero3", "tp=2 mode=ddp", "tp=2 mode=zero3"]


def test_names_keep_the_section_where_the_rest_is_not_unique() -> None:
    combined = combinations(["dp.mode=ddp,zero1", "recompute.mode=none,full"])
    assert short_names(combined)[-1] == "dp.mode=zero1 recompute.mode=full"
    assert short_names(combinations(["layout.tp=2"])) == ["as configured"]
    assert short_names(combinations([])) == ["as configured"]


def test_the_baseline_is_one_combination() -> None:
    combined = combinations(["layout.tp=1,2", "dp.mode=ddp,zero3"])
    names = short_names(combined)
    assert matching("tp=2 mode=ddp", combined, names) == 2
    assert matching("dp.mode=zero3 layout.tp=1", combined, names) == 1
    with pytest.raises(StrettoError, match="is more than one of the combinations") as caught:
        matching("tp=2", combined, names)
    assert caught.value.hint == "one of: tp=2 mode=ddp, tp=2 mode=zero3"
    with pytest.raises(StrettoError, match="'tp=4' is none of the combinations"):
        matching("tp=4", combined, names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layout.tp"], "not of the form"),
        (["layout.tp=1,,2"], "has an empty value"),
        (["layout.tp=1", "layout.tp=2"], r"layout\.tp is given twice"),
        (["layout.dp=1,layout.pp=2"], r"has 'layout\.pp=2' as a value of layout\.dp"),
    ],
)
def test_bad_words_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        combinations(arguments)


def test_names_of_files() -> None:
    assert file_name("tp=2 mode=zero3", "0123456789abcdef") == "tp=2+mode=zero3.01234567"
    assert file_name("stages=[1,5]", "0123456789") == "stages=-1-5-.01234567"
