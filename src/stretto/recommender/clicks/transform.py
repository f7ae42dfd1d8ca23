"""The transform from raw samples to a model's input, the same for every file and for serving.

Numbers: sign(x) log(1 + |x|), which is log(1 + x) for counts and defined for Criteo's -1. A missing number is
0, and with `flags` a second column is 1 if the number was missing. Nothing depends on the file (such as its
minimum), so that days agree with each other and with serving.

Features, each by one of:
vocabulary   an id that occurs `threshold` times or more has its own row, more frequent ids first; all other
             ids, new ones too, share row 1; missing values have row 0
hash         row 1 + mixed(id) mod (rows - 1); missing values have row 0
raw          id 1 + value mod (2^63 - 1), for tables with `hash` ids; missing values have id 0
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.index import TRANSFORM, VOCABULARY, CategoricalFeature
from stretto.recommender.clicks.raw import Columns, RawChunk, mix
from stretto.recommender.tables.jagged import Jagged
from stretto.versions import CLICK_TRANSFORM

MISSING = 0
RARE = 1
FIRST = 2
"""Rows of a vocabulary: for missing values, for all rare and unknown ids, and for the most frequent id."""


class Vocabulary:
    """Maps key i to row FIRST + i, and every other key to row RARE.

    Mixed keys are spread evenly, so the high bits of a key give its position in the sorted list to within a
    few steps: a lookup reads two or three memory locations instead of log2(keys). Memory: 24 to 28 bytes per
    key, and half as much again during construction.
    """

    def __init__(self, keys: NDArray[np.uint64]) -> None:
        self.keys = keys
        mixed = mix(keys.astype(np.uint64))
        order = np.argsort(mixed)
        self._sorted = mixed[order]
        self._rows = (order + FIRST).astype(np.int64 if len(keys) > 1 << 31 else np.uint32)
        bits = max(1, len(keys).bit_length())
        self._shift = np.uint64(64 - bits)
        edges = np.arange(1 << bits, dtype=np.uint64) << self._shift
        self._starts = np.searchsorted(self._sorted, edges).astype(
            np.uint32 if len(keys) < 1 << 32 else np.int64
        )

    @property
    def rows(self) -> int:
        return FIRST + len(self.keys)

    def lookup(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row of each key: int64 [keys]."""
        rows = np.full(len(keys), RARE, np.int64)
        if not len(self._sorted):
            return rows
        mixed = mix(keys)
        positions = self._starts[mixed >> self._shift].astype(np.int64)
        pending = np.arange(len(keys))  # indices of the keys that are not found yet
        while len(pending):
            inside = positions < len(self._sorted)
            pending = pending[inside]
            positions = positions[inside]
            mixed = mixed[inside]
            candidates = self._sorted[positions]
            equal = candidates == mixed
            rows[pending[equal]] = self._rows[positions[equal]]
            below = candidates < mixed
            pending = pending[below]
            positions = positions[below] + 1
            mixed = mixed[below]
        return rows


FORMAT, VERSION = CLICK_TRANSFORM.name, CLICK_TRANSFORM.version
Kind = Literal["vocabulary", "hash", "raw"]
_UNBOUNDED = np.uint64((1 << 63) - 1)


class Transformed(NamedTuple):
    """Samples in the layout of a click folder: see ClickWriter.add."""

    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64] | None


@dataclass(frozen=True, kw_only=True)
class ClickTransform:
    """The transform of raw samples.

    Attributes:
        columns: columns of the raw samples.
        kind: how ids are mapped to rows, for all features.
        rows: with `hash`, rows of each feature.
        flags: True if each number has a second column that is 1 if the number was missing.
        threshold: with `vocabulary`, the number of occurrences from which an id has its own row.
        vocabularies: with `vocabulary`, the vocabulary of each feature.
    """

    columns: Columns
    kind: Kind
    rows: int | None = None
    flags: bool = False
    threshold: int = 1
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict[str, Vocabulary])

    def __post_init__(self) -> None:
        if self.kind == "hash" and (self.rows is None or self.rows < 2):
            raise StrettoError(f"hash into {self.rows} rows", hint="at least 2: one is for missing values")
        if self.threshold < 1:
            raise StrettoError(f"threshold {self.threshold}", hint="at least 1: every id of the log")

    @property
    def numbers(self) -> list[str]:
        """Names of the dense columns after the transform."""
        names = list(self.columns.numbers)
        return names + [f"{name}.missing" for name in names] if self.flags else names

    @property
    def features(self) -> list[CategoricalFeature]:
        """The features after the transform."""
        return [
            CategoricalFeature(
                name,
                self.vocabularies[name].rows if self.kind == "vocabulary" else self.rows,
                None if is_list else 1,
            )
            for name, is_list in zip(self.columns.features, self.columns.lists, strict=True)
        ]

    def apply(self, raw: RawChunk) -> Transformed:
        """Transform samples.

        Raises:
            StrettoError: samples with other columns than the transform's.
        """
        if raw.columns != self.columns:
            raise StrettoError(
                f"a transform of {_columns_text(self.columns)} was given {_columns_text(raw.columns)}",
                hint="read the lines with the columns that the folder was made with",
            )
        ids = np.empty(len(raw.keys), np.int64)
        for index, name in enumerate(self.columns.features):
            positions = raw.positions(index)
            keys = np.ascontiguousarray(raw.keys[positions])
            if self.kind == "vocabulary":
                rows = self.vocabularies[name].lookup(keys)
            elif self.kind == "raw":
                rows = (keys % _UNBOUNDED).astype(np.int64) + 1
            else:
                assert self.rows is not None
                rows = (mix(keys) % np.uint64(self.rows - 1)).astype(np.int64) + 1
            rows[raw.missing[positions]] = MISSING
            ids[positions] = rows
        absent = np.isnan(raw.numbers)
        dense = np.copysign(np.log1p(np.abs(raw.numbers)), raw.numbers)
        dense[absent] = 0
        dense = np.concatenate([dense, absent], axis=1) if self.flags else dense
        return Transformed(dense.astype(np.float32), ids, raw.lengths)

    def batch(self, raw: RawChunk) -> ClickBatch:
        """Transform samples into a batch; labels are 0 if the source has none."""
        dense, sample_ids, lengths = self.apply(raw)
        features, samples = len(self.columns.features), raw.samples
        labels = np.zeros(samples, np.float32) if raw.labels is None else raw.labels.astype(np.float32)
        if lengths is None:
            ids = np.ascontiguousarray(sample_ids.reshape(samples, features).T)
            jagged = Jagged.fixed(list(torch.from_numpy(ids.reshape(features, samples, 1))))
        else:
            ids = np.concatenate([sample_ids[raw.positions(index)] for index in range(features)])
            jagged = Jagged(torch.from_numpy(ids), torch.from_numpy(np.ascontiguousarray(lengths.T)))
        return ClickBatch(torch.from_numpy(dense), jagged, torch.from_numpy(labels))

    def to_files(self) -> dict[str, bytes | NDArray[Any]]:
        """Return the contents of its files: the JSON, and the vocabularies' keys, uint64 in row order."""
        keys = [self.vocabularies[name].keys for name in self.columns.features if self.kind == "vocabulary"]
        flat = np.concatenate([np.zeros(0, np.uint64), *keys]).astype("<u8")
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "columns": asdict(self.columns),
            **{name: getattr(self, name) for name in ("kind", "rows", "flags", "threshold")},
            "sizes": [len(feature_keys) for feature_keys in keys],
            "crc32": zlib.crc32(flat.data),
        }
        return {TRANSFORM: (json.dumps(body, indent=1) + "\n").encode(), VOCABULARY: flat}

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> ClickTransform:
        """Read `transform.json` and `vocabulary.bin`, in a click folder or alone.

        Raises:
            StrettoError: a file is missing, of another version, or damaged.
        """
        path = Path(folder) / TRANSFORM
        try:
            body = cast(dict[str, Any], json.loads(path.read_bytes()))
            data = (path.parent / VOCABULARY).read_bytes()
        except OSError as error:
            raise StrettoError(
                f"{error.filename}: cannot be read: {error.strerror}",
                hint="name a folder that stretto data clicks made",
            ) from None
        except (ValueError, RecursionError):
            raise StrettoError(f"{path}: corrupt: not JSON", hint="copy it again") from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise StrettoError(f"{path}: not a click transform", hint="make the folder again")
        CLICK_TRANSFORM.check(body.get("version"), str(path))
        try:
            if zlib.crc32(data) != body["crc32"] or len(data) != 8 * sum(body["sizes"]):
                raise ValueError(f"{VOCABULARY} is damaged or of another transform")
            columns = Columns(**{name: tuple(value) for name, value in body["columns"].items()})
            if body["kind"] not in ("vocabulary", "hash", "raw"):
                raise ValueError(f"kind {str(body['kind'])[:40]!r}")
            vocabularies = dict[str, Vocabulary]()
            if body["kind"] == "vocabulary":
                keys = np.split(np.frombuffer(data, "<u8").astype(np.uint64), np.cumsum(body["sizes"])[:-1])
                for name, feature_keys in zip(columns.features, keys, strict=True):
                    vocabularies[name] = Vocabulary(feature_keys)
            fields = {name: body[name] for name in ("kind", "rows", "flags", "threshold")}
            return cls(columns=columns, **fields, vocabularies=vocabularies)
        except (KeyError, TypeError, ValueError) as error:
            raise StrettoError(
                f"{path}: a field is missing or wrong ({error})", hint="copy it again"
            ) from None


def _columns_text(columns: Columns) -> str:
    return f"{len(columns.numbers)} numbers and {len(columns.features)} features ({columns.features[0]}, ...)"
