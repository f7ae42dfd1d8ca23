"""`index.json` of a click folder: a description of its contents, with sizes and checksums of its files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from stretto.errors import StrettoError
from stretto.run.config.sources import INDEX, LABELS
from stretto.run.data.checksum import FileSums
from stretto.versions import CLICKS

FORMAT, VERSION = CLICKS.name, CLICKS.version
DENSE = "dense.bin"
IDS = "ids.bin"
LENGTHS = "lengths.bin"
OFFSETS = "offsets.bin"
WEIGHTS = "weights.bin"
TRANSFORM, VOCABULARY = "transform.json", "vocabulary.bin"
NAMES = {INDEX, DENSE, LABELS, IDS, LENGTHS, OFFSETS, WEIGHTS, TRANSFORM, VOCABULARY}
ID_BYTES = {"uint32": 4, "int64": 8}
_REBUILD = "make the folder again"


@dataclass(frozen=True)
class CategoricalFeature:
    """A categorical feature of a log.

    Attributes:
        rows: exclusive upper bound of the ids, or None if they are unbounded, for tables with `hash` ids.
        hot: ids of every sample, or None if their number varies (and may be 0).
    """

    name: str
    rows: int | None
    hot: int | None = 1


@dataclass(frozen=True)
class LookupHistogram:
    """The lookups of a feature's ids, as counted in a log.

    Attributes:
        hot: mean number of ids in a sample.
        ids: number of distinct ids among the counted `lookups`.
        buckets: (number of ids, their share of the lookups), the most popular first; shares sum to 1.
    """

    hot: float
    ids: int
    lookups: int
    buckets: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class ClickIndex:
    """The description of a click folder.

    Attributes:
        numbers: names of the dense columns.
        features: the categorical columns.
        dtype: dtype of the ids in their file.
        weighted: True if each id has a weight.
        samples, positives: number of samples, and of samples with label 1.
        parts: (name, samples) of each source file in order, e.g. days.
        held_parts: number of parts at the end that are held out by their names.
        popularity: histogram of each feature's lookups.
        lines: numbers of lines of the source: read, kept, blank, malformed.
        key: fingerprint of the source and the settings; empty if there is none.
        source: the files and folders that the user named.
        extra: additions by the writer of the folder, e.g. the best possible entropy of synthetic clicks.
        chunk, files: checksums of each file per `chunk` bytes.
    """

    numbers: list[str]
    features: list[CategoricalFeature]
    dtype: str
    weighted: bool
    samples: int
    positives: int
    parts: list[tuple[str, int]]
    popularity: dict[str, LookupHistogram]
    lines: dict[str, int]
    key: str
    source: list[str]
    chunk: int
    held_parts: int = 0
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    files: dict[str, FileSums] = field(default_factory=dict[str, FileSums])

    @property
    def jagged(self) -> bool:
        """True if the number of ids varies from sample to sample."""
        return any(feature.hot is None for feature in self.features)

    @property
    def width(self) -> int:
        """Ids of a sample, if their number does not vary."""
        return sum(feature.hot or 0 for feature in self.features)

    def to_bytes(self) -> bytes:
        """The file's content; `crc32` covers all other fields."""
        body: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps({**body, "crc32": _crc32(body)}, indent=1) + "\n").encode()


def _crc32(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_index(folder: Path) -> ClickIndex:
    """Read and check `index.json`.

    Raises:
        StrettoError: not a click folder, of another version, corrupt.
    """
    path = folder / INDEX
    try:
        parsed: object = json.loads(path.read_bytes())
    except OSError:
        raise StrettoError(
            f"{folder}: not a click folder (no readable {INDEX})",
            hint="make one: stretto data clicks SOURCE --out DIR, or stretto data synth-clicks --out DIR",
        ) from None
    except (ValueError, RecursionError):
        raise StrettoError(f"{path}: corrupt: not JSON", hint=_REBUILD) from None
    body = cast(dict[str, Any], parsed) if isinstance(parsed, dict) else {}
    if body.get("format") != FORMAT:
        raise StrettoError(
            f"{path}: format {str(body.get('format'))[:80]!r}, not {FORMAT!r}", hint="name a click folder"
        )
    CLICKS.check(body.get("version"), str(path))
    if body.pop("crc32", None) != _crc32(body):
        raise StrettoError(f"{path}: corrupt: its own checksum does not match", hint=_REBUILD)
    try:
        fields = {name: body[name] for name in ClickIndex.__dataclass_fields__ if name != "held_parts"}
        fields["held_parts"] = body.get("held_parts", 0)  # older folders hold out no parts by their names
        fields["features"] = [CategoricalFeature(**feature) for feature in body["features"]]
        fields["parts"] = [(str(name), int(count)) for name, count in body["parts"]]
        fields["popularity"] = {name: histogram_from(each) for name, each in body["popularity"].items()}
        fields["files"] = {
            name: FileSums(int(sums["bytes"]), list(sums["crc32"])) for name, sums in body["files"].items()
        }
        index = ClickIndex(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise StrettoError(f"{path}: a field is missing or wrong ({error})", hint=_REBUILD) from None
    _check_consistent(index, path)
    return index


def histogram_from(body: Mapping[str, Any]) -> LookupHistogram:
    """Read a histogram from JSON."""
    buckets = [(int(ids), float(share)) for ids, share in body["buckets"]]
    return LookupHistogram(float(body["hot"]), int(body["ids"]), int(body["lookups"]), buckets)


def expected_bytes(index: ClickIndex, ids: int) -> dict[str, int]:
    """Return the size that each file of samples must have, with `ids` ids in total."""
    sizes = {
        DENSE: 4 * len(index.numbers) * index.samples,
        LABELS: index.samples,
        IDS: ID_BYTES[index.dtype] * ids,
    }
    if index.jagged:
        sizes |= {LENGTHS: 2 * len(index.features) * index.samples, OFFSETS: 8 * (index.samples + 1)}
    if index.weighted:
        sizes[WEIGHTS] = 4 * ids
    return sizes


def _check_consistent(index: ClickIndex, path: Path) -> None:
    """Raise StrettoError if a field contradicts another."""
    files = index.files
    if index.dtype not in ID_BYTES or IDS not in files:
        raise StrettoError(f"{path}: field 'dtype' or 'files' is wrong", hint=_REBUILD)
    ids = files[IDS].bytes // ID_BYTES[index.dtype] if index.jagged else index.samples * index.width
    sizes = expected_bytes(index, ids)
    rules = {
        "samples": index.samples > 0,
        "positives": 0 <= index.positives <= index.samples,
        "parts": sum(count for _, count in index.parts) == index.samples,
        "held_parts": 0 <= index.held_parts <= max(0, len(index.parts) - 1),
        "chunk": index.chunk > 0,
        "files": sizes.keys() <= files.keys() <= NAMES,
        "popularity": index.popularity.keys() == {feature.name for feature in index.features},
        **{f"files.{name}.bytes": name in files and files[name].bytes == sizes[name] for name in sizes},
    }
    for name, good in rules.items():
        if not good:
            raise StrettoError(f"{path}: field {name!r} contradicts another", hint=_REBUILD)
