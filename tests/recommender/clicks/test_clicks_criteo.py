"""The Criteo format against a slow reading, and every way in which a line may be malformed."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clicks_logs import log_lines
from stretto.recommender.clicks.criteo import parse
from stretto.recommender.clicks.raw import Parsed

GOOD = "\t".join(["1", *"0123456789", "11", "-1", "5", *(f"{i:08x}" for i in range(26))])


def slow(line: str, labelled: bool = True) -> tuple[int | None, list[float | None], list[int | None]] | None:
    """A line in plain Python; None for a malformed one."""
    fields = line.split("\t")
    label, rest = (fields[0], fields[1:]) if labelled else (None, fields)
    numbers, values = rest[:13], rest[13:]
    good = len(rest) == 39 and label in (None, "0", "1")
    good &= all(re.fullmatch("(-?[0-9]{1,18})?", number) for number in numbers)
    good &= all(re.fullmatch("([0-9a-fA-F]{8})?", value) for value in values)
    if not good:
        return None
    return (
        None if label is None else int(label),
        [float(int(number)) if number else None for number in numbers],
        [int(value, 16) if value else None for value in values],
    )


def same(parsed: Parsed, lines: list[str], labelled: bool = True) -> None:
    wanted = [row for line in lines if line and (row := slow(line, labelled))]
    chunk = parsed.chunk
    assert chunk.samples == len(wanted)
    assert (chunk.labels is not None) == labelled
    for i, (label, numbers, values) in enumerate(wanted):
        assert chunk.labels is None or chunk.labels[i] == label
        assert [None if math.isnan(n) else n for n in chunk.numbers[i].tolist()] == numbers
        keys = chunk.keys[26 * i : 26 * i + 26].tolist()
        gone = chunk.missing[26 * i : 26 * i + 26].tolist()
        assert [None if none else key for key, none in zip(keys, gone, strict=True)] == values
    assert parsed.lines == len(lines)
    assert parsed.blank == sum(not line for line in lines)
    assert [n for n, _ in parsed.faults] == [
        n for n, line in enumerate(lines, 1) if line and slow(line, labelled) is None
    ]


def test_lines_as_criteo_has_them():
    lines = log_lines(500)
    same(parse(("\n".join(lines) + "\n").encode()), lines)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_blank_lines_and_a_last_line_without_end(end: str, last: bool):
    lines = log_lines(20)
    lines[7] = ""
    lines[0] = ""
    lines[11] = lines[11][: lines[11].rindex("\t") + 1]  # ends with a missing value
    lines[19] = lines[19][: lines[19].rindex("\t") + 1]
    same(parse((end.join(lines) + (end if last else "")).encode()), lines)


CELLS = st.sampled_from(
    [
        "",
        "0",
        "1",
        "2",
        "-1",
        "-",
        "--1",
        "+1",
        "1.5",
        "12345678",
        "-12345678",
        "123456789",
        "999999999999999999",
        "1234567890123456789",
        "1e3",
        " 1",
        "1 ",
        "0x1",
        "00000000",
        "ffffffff",
        "FFFFffff",
        "7fc0ffee",
        "0000000g",
        "1234567",
        "/0000000",
        ":0000000",
        "@0000000",
        "`0000000",
        "\x1100000000"[:8],
        "\xb00000000",
        "0000\x000000",
        "1\xff",
        "\xbf2",
    ]
)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 39), CELLS), max_size=2), min_size=1, max_size=5),
    st.booleans(),
)
def test_any_field_may_be_wrong(changes: list[list[tuple[int, str]]], labelled: bool):
    lines = list[str]()
    for change in changes:
        fields = GOOD.split("\t")
        for column, cell in change:
            fields[column] = cell
        lines.append("\t".join(fields if labelled else fields[1:]))
    same(parse(("\n".join(lines) + "\n").encode("latin-1"), labelled=labelled), lines, labelled)


@given(st.binary(max_size=400))
def test_no_bytes_break_it(data: bytes):
    parsed = parse(data)
    lines = data.split(b"\n")
    assert parsed.lines == len(lines) - (lines[-1] == b"")
    assert parsed.lines == parsed.chunk.samples + parsed.blank + len(parsed.faults)


@given(st.integers(-(10**18) + 1, 10**18 - 1))
def test_every_integer_is_read_right(number: int):
    fields = GOOD.split("\t")
    fields[3] = str(number)
    assert parse("\t".join(fields).encode()).chunk.numbers[0, 2] == float(number)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (GOOD + "\t", "41 columns, not 40"),
        (GOOD[2:], "39 columns, not 40"),
        ("2" + GOOD[1:], "label '2', not 0 or 1"),
        (GOOD[1:], "label '', not 0 or 1"),
        (GOOD.replace("\t11\t", "\t1.1\t"), "I11 is '1.1', not an integer of up to 18 digits"),
        (GOOD.replace("\t11\t", "\t1ÿ\t"), "I11 is '1Ã¿', not an integer of up to 18 digits"),
        (GOOD[:-1], "C26 is '0000001', not 8 hexadecimal digits"),
        (GOOD.replace("00000000", "0000000g"), "C1 is '0000000g', not 8 hexadecimal digits"),
    ],
)
def test_a_fault_is_told_with_its_line(line: str, why: str):
    assert parse(f"{GOOD}\n{line}\n{GOOD}\n".encode(), line=70).faults == [(71, why)]


def test_lines_of_serving_have_no_label():
    parsed = parse(GOOD[2:].encode(), labelled=False)
    assert parsed.chunk.labels is None
    assert np.array_equal(parsed.chunk.keys, np.arange(26))
    assert parse(GOOD.encode(), labelled=False).faults == [(1, "40 columns, not 39")]
