"""Synthetic clicks as lines of Criteo's format: label, 13 integers, 26 ids of eight hexadecimal digits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stretto.data.clicks.criteo import FEATURES, NUMBERS
from stretto.data.clicks.synthetic_log import Clicks, SyntheticLog
from stretto.data.clicks.synthetic_random import stream
from stretto.data.clicks.synthetic_truth import MISSING
from stretto.errors import StrettoError

Bytes = NDArray[np.uint8]

_TAB, _LINE = b"\t\n"
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)
_ABSENT_RANK = 1  # the second most popular id of some features is written as a missing value
_ABSENT_EVERY = 4


class Text:
    """Makes lines. Ids get names by a permutation of 32 bits, another for each feature: nothing is lost.

    Raises:
        StrettoError: the log has other columns than the format.
    """

    def __init__(self, log: SyntheticLog) -> None:
        spec = log.spec
        lone = all(feature.most == 1 and not feature.varying for feature in spec.features)
        if (spec.dense, len(spec.features)) != (NUMBERS, FEATURES) or not lone:
            raise StrettoError(
                f"{spec.dense} numbers and {len(spec.features)} features with up to "
                f"{max(feature.most for feature in spec.features)} ids in Criteo's format",
                hint=f"it has {NUMBERS} numbers and {FEATURES} features of one id; a click folder has any",
            )
        starts = [int(stream(spec.seed, "name", i)) & 0xFFFFFFFF for i in range(FEATURES)]
        self._starts = np.array(starts, np.uint32)[:, None]
        self._numbers = [_padded([_written(value) for value in row]) for row in log.numbers.raw.tolist()]

    def lines(self, clicks: Clicks) -> bytes:
        """The samples, each a line."""
        count = len(clicks.labels)
        tabs = np.full((count, 1), _TAB, np.uint8)
        parts: list[Bytes] = [_DIGITS[clicks.labels.astype(np.intp)][:, None]]
        for table, slots in zip(self._numbers, clicks.slots, strict=True):
            parts += [tabs, table[slots]]
        names = clicks.ids.astype(np.uint32) + self._starts
        names = (names ^ (names >> np.uint32(16))) * np.uint32(0x45D9F3B)
        names ^= names >> np.uint32(16)
        for feature, (name, ranks) in enumerate(zip(names, clicks.ranks, strict=True)):
            digits = _DIGITS[(name[:, None] >> _SHIFTS) & np.uint32(15)]
            if feature % _ABSENT_EVERY == 0:
                digits[ranks == _ABSENT_RANK] = 0
            parts += [tabs, digits]
        parts.append(np.full((count, 1), _LINE, np.uint8))
        table = np.concatenate(parts, axis=1)
        return table[table != 0].tobytes()


def _written(value: int) -> bytes:
    return b"" if value == MISSING else str(value).encode()


def _padded(texts: list[bytes]) -> Bytes:
    """A row for each text, with zero bytes behind."""
    longest = max(1, *map(len, texts))
    return np.frombuffer(b"".join(text.ljust(longest, b"\0") for text in texts), np.uint8).reshape(
        -1, longest
    )
