"""Files are told apart by words of their names, and of the folders between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.run.data.part_names import mixed_text, parts_of


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["log/train.txt", "log/valid.txt"], ["train", "valid"]),
        (["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"], ["train", "valid", "test"]),
        (["en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000.json.gz"], ["train", "valid"]),
        (["train/part-0.csv", "val/part-0.csv", "more/part-0.csv"], ["train", "valid", None]),
        (["valid_test.csv", "testing/a.csv"], ["valid", "test"]),
        (["a_held_out.csv", "a_heldout2.csv", "a.csv"], ["valid", "valid", None]),
        (["train_test_split.csv", "training.csv"], [None, "train"]),
        (["devices.csv", "latest.csv", "trainer.csv", "evaluate.csv"], [None] * 4),
        (["valid/train.csv", "x/dev.csv"], ["train", "valid"]),  # a file's name before its folder's
        (["/data/test/day_0", "/data/test/day_1"], [None, None]),  # what all share tells nothing apart
        (["valid.txt"], ["valid"]),
        ([], []),
    ],
)
def test_words_of_names(names: list[str], parts: list[str | None]) -> None:
    assert parts_of([Path(name) for name in names]) == parts


@given(
    st.lists(st.sampled_from(["train", "valid", "day", "test_3"]), min_size=1, max_size=5),
    st.sampled_from(["", "/", "/tests/valid/", "../train/"]),
)
def test_what_lies_above_all_files_does_not_count(names: list[str], above: str) -> None:
    paths = [Path(f"{name}.csv") for name in names]
    assert parts_of([Path(above) / "in" / path for path in paths]) == parts_of(
        [Path("in") / p for p in paths]
    )


def test_text_of_both_parts_in_one_stream_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "valid.txt").write_text("b")
    names = [str(tmp_path / f"{part}.txt") for part in ("train", "valid")]
    for sources in (names, [str(tmp_path)]):
        warning = mixed_text(sources, "leave it out")
        assert warning is not None
        assert f"{names[0]} and {names[1]} become one stream" in warning
    assert mixed_text(names[:1], "") is None
    assert mixed_text(["python-stdlib"], "") is None
