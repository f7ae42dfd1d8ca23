"""Criteo-like logs for tests, and a slow reading of them to compare with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

MISSING_NUMBERS = (0.45, 0, 0.2, 0.2, 0.02, 0.2, 0.04, 0, 0.04, 0.45, 0.04, 0.78, 0.2)
MISSING_FEATURES = (*(0.0,) * 18, 0.41, 0.41, 0, 0.8, 0, 0, 0.41, 0.41)


def log_lines(samples: int, seed: int = 0, ids: int = 200) -> list[str]:
    """Lines with the shares of missing values that Criteo's have, a second number from -1 on, popular ids."""
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 600_000, (samples, 13)) // random.integers(1, 100_000, (samples, 13))
    numbers[:, 1] -= 1
    values = (random.zipf(1.4, (samples, 26)) % ids + np.arange(26) * ids).astype(np.uint64)
    values = values * np.uint64(2654435761) % np.uint64(1 << 32)
    labels = random.random(samples) < 0.25
    gone_numbers = random.random((samples, 13)) < np.array(MISSING_NUMBERS)
    gone = random.random((samples, 26)) < np.array(MISSING_FEATURES)
    return [
        "\t".join(
            [
                str(int(labels[i])),
                *("" if none else str(n) for n, none in zip(numbers[i], gone_numbers[i], strict=True)),
                *("" if none else f"{int(v):08x}" for v, none in zip(values[i], gone[i], strict=True)),
            ]
        )
        for i in range(samples)
    ]


def slow_dense(text: str) -> float:
    """A number of a line, transformed, in plain Python."""
    return math.copysign(math.log(1 + abs(int(text))), int(text)) if text else 0.0


def slow_vocabulary(columns: Sequence[Sequence[str]], threshold: int) -> list[dict[str, int]]:
    """Each feature's rows: the most frequent id has row 2; of ids as frequent, the smaller."""
    vocabularies = list[dict[str, int]]()
    for column in columns:
        counts = Counter(value for value in column if value)
        often = sorted((-n, int(value, 16), value) for value, n in counts.items() if n >= threshold)
        vocabularies.append({value: row for row, (_, _, value) in enumerate(often, 2)})
    return vocabularies


def slow_row(vocabulary: dict[str, int], value: str) -> int:
    return vocabulary.get(value, 1) if value else 0
