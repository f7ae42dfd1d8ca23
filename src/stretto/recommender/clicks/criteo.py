"""The Criteo format: a label, 13 integers and 26 features of eight hexadecimal digits a line, between tabs.

An empty field is a missing value. So are the train.txt of the Kaggle competition and the 24 day files of the
Terabyte log; lines of a test set have no label. Eight characters are taken as one 64-bit number, so that all
fields of a block are read at once; digits are combined within the number (SWAR).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.recommender.clicks.raw import Columns, Parsed, ParsedBlock, RawChunk, line_blocks

NUMBERS, FEATURES = 13, 26
COLUMNS = Columns(
    tuple(f"I{i + 1}" for i in range(NUMBERS)),
    tuple(f"C{i + 1}" for i in range(FEATURES)),
    ("hex",) * FEATURES,
    (False,) * FEATURES,
)
_TAB, _LINE, _RETURN, _MINUS = b"\t\n\r-"
_PAD = bytes(8)
_INTEGER = re.compile(rb"-?[0-9]{1,18}")
Uint64 = NDArray[np.uint64]


class CriteoReader:
    """Reads files of lines, plain or gzip.

    Args:
        labelled: True if lines begin with a label.
    """

    columns = COLUMNS
    unread = ()

    def __init__(self, labelled: bool = True) -> None:
        self._labelled = labelled

    def read(self, path: Path, start: int = 0, line: int = 1) -> Iterator[ParsedBlock]:
        """See LogReader."""
        for block in line_blocks(path, start, line):
            parsed = parse(block.data, block.line, self._labelled)
            yield ParsedBlock(parsed, block.end, block.line + parsed.lines)


def is_labelled(path: Path) -> bool:
    """True if the first line that is not blank has a label, by its number of fields."""
    for block in line_blocks(path, size=1 << 16):
        for line in block.data.splitlines():
            if line.strip(b"\r"):
                return line.count(b"\t") + 1 != NUMBERS + FEATURES
    return True


def parse(data: bytes, line: int = 1, labelled: bool = True) -> Parsed:
    """Parse complete lines.

    Args:
        data: the lines; the last may lack its line end.
        line: number of the first line.
        labelled: True if lines begin with a label; False for logs to be scored.
    """
    fields = int(labelled) + NUMBERS + FEATURES
    if data and not data.endswith(b"\n"):
        data += b"\n"
    text = np.frombuffer(_PAD + data + _PAD, np.uint8)
    marks = np.flatnonzero((text == _TAB) | (text == _LINE))
    ends = np.flatnonzero(text[marks] == _LINE)
    begins = np.concatenate([[len(_PAD)], marks[ends] + 1])[:-1]
    widths = np.diff(ends, prepend=-1)
    lengths = marks[ends] - begins
    blank = (lengths == 0) | ((lengths == 1) & (text[begins] == _RETURN))
    good = widths == fields
    if good.all():
        stops = marks.reshape(-1, fields)
    else:
        stops = marks[(ends[good] - fields + 1)[:, None] + np.arange(fields)]
    starts = np.concatenate([begins[good][:, None], stops[:, :-1] + 1], axis=1)
    stops = stops.copy()
    stops[:, -1] -= text[np.maximum(stops[:, -1] - 1, starts[:, -1])] == _RETURN
    # eight bytes from each offset on, without a copy
    windows = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))
    wrong = np.zeros(starts.shape, bool)
    cut = int(labelled) + NUMBERS
    labels = None
    if labelled:
        digits = text[starts[:, 0]] - np.uint8(ord("0"))
        wrong[:, 0] = (stops[:, 0] - starts[:, 0] != 1) | (digits > 1)
        labels = digits & np.uint8(1)
    integers = slice(int(labelled), cut)
    numbers, wrong[:, integers] = _parse_integers(text, windows, starts[:, integers], stops[:, integers])
    keys, missing, wrong[:, cut:] = _parse_hex(windows, starts[:, cut:], stops[:, cut:])
    chunk = RawChunk(
        columns=COLUMNS,
        numbers=numbers,
        keys=keys.reshape(-1),
        missing=missing.reshape(-1),
        lengths=None,
        labels=labels,
    )
    uneven = np.flatnonzero(~good & ~blank).tolist()
    faults = [(line + i, f"{widths[i]} column{'s' * int(widths[i] != 1)}, not {fields}") for i in uneven]
    if wrong.any():
        lines = line + np.flatnonzero(good)
        bad: NDArray[np.bool_] = np.any(wrong, axis=1)
        for i in np.flatnonzero(bad):
            field = int(np.argmax(wrong[i]))
            shown = repr(text[starts[i, field] : stops[i, field]].tobytes()[:20].decode("latin-1"))
            column = field - labelled
            reason = f"C{column + 1 - NUMBERS} is {shown}, not 8 hexadecimal digits"
            if column < 0:
                reason = f"label {shown}, not 0 or 1"
            elif column < NUMBERS:
                reason = f"I{column + 1} is {shown}, not an integer of up to 18 digits"
            faults.append((int(lines[i]), reason))
        chunk = chunk.select(~bad)
    return Parsed(chunk, len(ends), int(blank.sum()), sorted(faults))


def _parse_integers(
    text: NDArray[np.uint8], windows: Uint64, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Decimal integers, NaN for empty fields; and which fields are malformed."""
    minus = (text[starts] == _MINUS) & (stops > starts)
    digits = stops - starts - minus
    # the last eight characters; those before the number's first are made zeros, but a lone minus stays
    mask = (~np.uint64(0)) << (np.uint64(8) * (8 - np.clip(digits, 1, 8)).astype(np.uint64))
    value = (windows[stops - 8] ^ np.uint64(0x3030303030303030)) & mask
    no_digit = ((value + np.uint64(0x7676767676767676)) | value) & np.uint64(0x8080808080808080)
    value = (value * np.uint64(10)) + (value >> np.uint64(8))
    pairs = np.uint64(0x000000FF000000FF)
    value = (
        (value & pairs) * np.uint64(0x000F424000000064)
        + ((value >> np.uint64(16)) & pairs) * np.uint64(0x0000271000000001)
    ) >> np.uint64(32)
    numbers = np.where(minus, -1.0, 1.0) * value.astype(np.float64)
    empty = stops == starts
    numbers[empty] = np.nan
    wrong = ~empty & (no_digit != 0)
    for index in zip(*np.nonzero(digits > 8), strict=True):
        written = text[starts[index] : stops[index]].tobytes()
        wrong[index] = not _INTEGER.fullmatch(written)
        numbers[index] = 0 if wrong[index] else int(written)
    return numbers, wrong


def _parse_hex(
    windows: Uint64, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[Uint64, NDArray[np.bool_], NDArray[np.bool_]]:
    """Values of eight hexadecimal digits, 0 for empty fields; which fields are empty; and which malformed."""
    word = windows[starts]
    letter = (word >> np.uint64(6)) & np.uint64(0x0101010101010101)
    value = (word & np.uint64(0x0F0F0F0F0F0F0F0F)) + letter * np.uint64(9)
    # 0 to 9 are 0x30 to 0x39; a to f are 0x61 to 0x66, and capitals the same without 0x20
    high = (word | (letter << np.uint64(5))) & np.uint64(0xF0F0F0F0F0F0F0F0)
    above_nine = ((value + np.uint64(0x7676767676767676)) >> np.uint64(7)) & np.uint64(0x0101010101010101)
    wrong = (high != np.uint64(0x3030303030303030) + letter * np.uint64(0x30)) | (above_nine != letter)
    wrong |= (value & np.uint64(0x1010101010101010)) != 0
    value = ((value << np.uint64(4)) | (value >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    value = ((value << np.uint64(8)) | (value >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    value = ((value << np.uint64(16)) | (value >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    missing = stops == starts
    wrong = (wrong | (stops - starts != 8)) & ~missing
    value[missing | wrong] = 0
    return value, missing, wrong
