"""Maps the columns of a log to the label, the dense features and the categorical features."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError, nearest
from stretto.recommender.clicks.arrays import runs
from stretto.recommender.clicks.raw import Columns, RawChunk

Cells = tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.int64] | None]
"""A feature's keys, where they are missing, and how many there are a sample; None: one each."""


@dataclass(frozen=True)
class Named:
    """Names of columns; without `numbers` I1, I2, ... are taken, without `features` C1, C2, ..."""

    label: str = "label"
    numbers: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None

    def of(self, columns: Sequence[str], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The numbers and the features among `columns`.

        Raises:
            StrettoError: a column that is not there, or no features.
        """
        numbers = _numbered(columns, "I") if self.numbers is None else self.numbers
        features = _numbered(columns, "C") if self.features is None else self.features
        for name in (self.label, *numbers, *features):
            if name not in columns:
                near = nearest(name, columns)
                raise StrettoError(
                    f"{where}: no column {name!r}",
                    hint=f"columns are {', '.join(list(columns)[:12])}"
                    + (f"; did you mean {near}?" if near else ""),
                )
        if not features:
            raise StrettoError(
                f"{where}: no features: no column is named C1, C2, ...",
                hint=f"name them: --features {','.join(list(columns)[1:3]) or 'NAME,NAME'}",
            )
        if len({self.label, *numbers, *features}) < 1 + len(numbers) + len(features):
            raise StrettoError(f"{where}: a column is named twice", hint="label, numbers and features differ")
        return tuple(numbers), tuple(features)


def chunk_of(
    columns: Columns,
    labels: NDArray[np.float64],
    numbers: NDArray[np.float64],
    cells: Sequence[Cells],
    wrong: Mapping[int, str],
) -> tuple[RawChunk, list[tuple[int, str]]]:
    """The samples that are as they should be, and (sample, why) of the others.

    `wrong` are those that are known already; beside them those whose label is not 0 or 1 or that have an
    infinite number.
    """
    problems = dict(wrong)
    for i in np.flatnonzero((labels != 0) & (labels != 1)).tolist():
        problems.setdefault(
            i, "the label is missing" if np.isnan(labels[i]) else f"label {labels[i]}, not 0 or 1"
        )
    for i in np.flatnonzero(np.isinf(numbers).any(axis=1)).tolist():
        problems.setdefault(i, "a number is infinite")
    keys, missing, lengths = _interleaved(cells, len(labels))
    chunk = RawChunk(
        columns=columns,
        numbers=numbers,
        keys=keys,
        missing=missing,
        lengths=lengths,
        labels=(labels == 1).astype(np.uint8),
    )
    if problems:
        good = np.ones(len(labels), bool)
        good[list(problems)] = False
        chunk = chunk.kept(good)
    return chunk, sorted(problems.items())


def _interleaved(
    cells: Sequence[Cells], samples: int
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.int64] | None]:
    """Keys, missing and lengths sample by sample, from those of each feature."""
    if all(lengths is None for _, _, lengths in cells):
        keys = np.stack([keys for keys, _, _ in cells], axis=1).reshape(-1)
        return keys, np.stack([missing for _, missing, _ in cells], axis=1).reshape(-1), None
    ones = np.ones(samples, np.int64)
    lengths = np.stack([ones if counts is None else counts for _, _, counts in cells])
    starts = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
    at = runs(np.ascontiguousarray(starts.T), np.ascontiguousarray(lengths.T))
    flat = np.concatenate([keys for keys, _, _ in cells])
    gone = np.concatenate([missing for _, missing, _ in cells])
    return flat[at], gone[at], np.ascontiguousarray(lengths.T)


def _numbered(columns: Sequence[str], letter: str) -> tuple[str, ...]:
    """Columns named as Criteo's are, in the order of their numbers."""
    numbered = [name for name in columns if re.fullmatch(letter + "[0-9]{1,6}", name)]
    return tuple(sorted(numbered, key=lambda name: int(name[1:])))
