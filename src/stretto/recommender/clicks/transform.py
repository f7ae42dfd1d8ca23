"""The transform from raw samples to a model's input, the same for every file and for serving.

Numbers: sign(x) log(1 + |x|), which is log(1 + x) for counts and defined for Criteo's -1; a missing number is
0, and with `flags` a second column says 1 where one was missing. Nothing is taken from a file, such as its
least value, so that days agree with each other and with serving.

Features, each by one of:
vocabulary   an id that was seen `threshold` times or more has a row of its own, more frequent ids first; all
             others share row 1, ids never seen before too; missing values have row 0
hash         row 1 + mixed(id) mod (rows - 1); missing values row 0
raw          id 1 + value mod (2^63 - 1), for tables with `hash` ids; missing values id 0
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.index import TRANSFORM, VOCABULARY, Feature
from stretto.recommender.clicks.raw import Columns, RawChunk, mix
from stretto.recommender.tables.jagged import Jagged

MISSING = 0
RARE = 1
FIRST = 2
"""Rows of a vocabulary: of missing values, of all rare and unknown ids, and of the most frequent id."""


class Vocabulary:
    """Maps key i to row FIRST + i, and every other key to row RARE.

    Mixed keys are spread evenly, so the first bits of one say where in the sorted list it stands, but for a
    few steps: a lookup reads two or three places of memory instead of log2(keys). Memory: 24 to 28 bytes a
    key, and half as much again while it is made.
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
        """The row of each key: int64 of the same length."""
        codes = np.full(len(keys), RARE, np.int64)
        if not len(self._sorted):
            return codes
        wanted = mix(keys)
        at = self._starts[wanted >> self._shift].astype(np.int64)
        left = np.arange(len(keys))
        while len(left):
            inside = at < len(self._sorted)
            left = left[inside]
            at = at[inside]
            wanted = wanted[inside]
            there = self._sorted[at]
            same = there == wanted
            codes[left[same]] = self._rows[at[same]]
            before = there < wanted
            left = left[before]
            at = at[before] + 1
            wanted = wanted[before]
        return codes


FORMAT, VERSION = "stretto-click-transform", 1
Kind = Literal["vocabulary", "hash", "raw"]
_UNBOUNDED = np.uint64((1 << 63) - 1)


@dataclass(frozen=True)
class Transformed:
    """Samples as a click folder has them: see ClickWriter.add."""

    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64] | None


@dataclass(frozen=True, kw_only=True)
class ClickTransform:
    """The transform of raw samples.

    Attributes:
        columns: of the raw samples.
        kind: how ids are mapped to rows, for all features.
        rows: of `hash`: rows of each feature.
        flags: whether a column of its own tells of each number whether it was missing.
        threshold: of `vocabulary`: how often an id was seen that has a row.
        vocabularies: of `vocabulary`: by feature.
    """

    columns: Columns
    kind: Kind
    rows: int | None = None
    flags: bool = False
    threshold: int = 1
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict[str, Vocabulary])

    def __post_init__(self) -> None:
        if self.kind == "hash" and (self.rows is None or self.rows < 2):
            raise StrettoError(
                f"hash into {self.rows} rows", hint="at least 2: one is that of missing values"
            )
        if self.threshold < 1:
            raise StrettoError(f"threshold {self.threshold}", hint="at least 1: every id that was seen")

    @property
    def numbers(self) -> list[str]:
        """Names of the dense columns that come out."""
        names = list(self.columns.numbers)
        return names + [f"{name}.missing" for name in names] if self.flags else names

    @property
    def features(self) -> list[Feature]:
        """The features that come out."""
        return [
            Feature(name, self._rows(name), None if many else 1)
            for name, many in zip(self.columns.features, self.columns.lists, strict=True)
        ]

    def apply(self, raw: RawChunk) -> Transformed:
        """Transform samples.

        Raises:
            StrettoError: samples with other columns than the transform was made for.
        """
        if raw.columns != self.columns:
            raise StrettoError(
                f"a transform of {_columns_text(self.columns)} was given {_columns_text(raw.columns)}",
                hint="read the lines with the columns that the folder was made with",
            )
        ids = np.empty(len(raw.keys), np.int64)
        for number, name in enumerate(self.columns.features):
            at = raw.places(number)
            rows = self._lookup(name, np.ascontiguousarray(raw.keys[at]))
            rows[raw.missing[at]] = MISSING
            ids[at] = rows
        return Transformed(self._dense(raw.numbers), ids, raw.lengths)

    def batch(self, raw: RawChunk) -> ClickBatch:
        """Transform samples into a batch; labels are 0 where the source has none."""
        done = self.apply(raw)
        features, samples = len(self.columns.features), raw.samples
        labels = np.zeros(samples, np.float32) if raw.labels is None else raw.labels.astype(np.float32)
        if done.lengths is None:
            ids = np.ascontiguousarray(done.ids.reshape(samples, features).T).reshape(features, samples, 1)
            jagged = Jagged.fixed(list(torch.from_numpy(ids)))
        else:
            places = [raw.places(number) for number in range(features)]
            ids = np.concatenate([done.ids[at] for at in places])
            jagged = Jagged(torch.from_numpy(ids), torch.from_numpy(np.ascontiguousarray(done.lengths.T)))
        return ClickBatch(torch.from_numpy(done.dense), jagged, torch.from_numpy(labels))

    def to_files(self) -> dict[str, bytes | NDArray[Any]]:
        """The content of its files: the JSON, and the vocabularies' keys, uint64 in row order."""
        keys = [self.vocabularies[name].keys for name in self.columns.features if self.kind == "vocabulary"]
        flat = np.concatenate([np.zeros(0, np.uint64), *keys]).astype("<u8")
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "columns": asdict(self.columns),
            **{name: getattr(self, name) for name in ("kind", "rows", "flags", "threshold")},
            "sizes": [len(each) for each in keys],
            "crc32": zlib.crc32(flat.data),
        }
        return {TRANSFORM: (json.dumps(body, indent=1) + "\n").encode(), VOCABULARY: flat}

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> ClickTransform:
        """From `transform.json` and `vocabulary.bin`, in a click folder or alone.

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
        if not isinstance(body, dict) or (body.get("format"), body.get("version")) != (FORMAT, VERSION):
            raise StrettoError(f"{path}: not a transform of version {VERSION}", hint="make the folder again")
        try:
            return _from_body(body, data)
        except (KeyError, TypeError, ValueError) as error:
            raise StrettoError(
                f"{path}: a field is missing or wrong ({error})", hint="copy it again"
            ) from None

    def _rows(self, name: str) -> int | None:
        return self.vocabularies[name].rows if self.kind == "vocabulary" else self.rows

    def _lookup(self, name: str, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        if self.kind == "vocabulary":
            return self.vocabularies[name].lookup(keys)
        if self.kind == "raw":
            return (keys % _UNBOUNDED).astype(np.int64) + 1
        assert self.rows is not None
        return (mix(keys) % np.uint64(self.rows - 1)).astype(np.int64) + 1

    def _dense(self, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
        missing = np.isnan(numbers)
        values = np.copysign(np.log1p(np.abs(numbers)), numbers)
        values[missing] = 0
        values = np.concatenate([values, missing], axis=1) if self.flags else values
        return values.astype(np.float32)


def _from_body(body: Mapping[str, Any], data: bytes) -> ClickTransform:
    if zlib.crc32(data) != body["crc32"] or len(data) != 8 * sum(body["sizes"]):
        raise ValueError(f"{VOCABULARY} is damaged or of another transform")
    columns = Columns(**{name: tuple(value) for name, value in body["columns"].items()})
    if body["kind"] not in ("vocabulary", "hash", "raw"):
        raise ValueError(f"kind {str(body['kind'])[:40]!r}")
    vocabularies = dict[str, Vocabulary]()
    if body["kind"] == "vocabulary":
        keys = np.frombuffer(data, "<u8").astype(np.uint64)
        parts = np.split(keys, np.cumsum(body["sizes"])[:-1])
        vocabularies = {name: Vocabulary(part) for name, part in zip(columns.features, parts, strict=True)}
    kept = {name: body[name] for name in ("kind", "rows", "flags", "threshold")}
    return ClickTransform(columns=columns, **kept, vocabularies=vocabularies)


def _columns_text(columns: Columns) -> str:
    return f"{len(columns.numbers)} numbers and {len(columns.features)} features ({columns.features[0]}, ...)"
