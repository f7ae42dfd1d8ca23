"""Writes synthetic clicks to files: a click folder, or text in Criteo's format.

Both contain the same samples. A click folder stores them as a `SyntheticClicks` source returns them; text has
untransformed dense features, hexadecimal ids and empty fields for missing values, like a real log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError, nearest
from stretto.recommender.clicks.build import check_source
from stretto.recommender.clicks.criteo import FEATURES, NUMBERS
from stretto.recommender.clicks.folder import ClickFolder, open_if_current
from stretto.recommender.clicks.index import CategoricalFeature
from stretto.recommender.clicks.synthetic.draws import stream
from stretto.recommender.clicks.synthetic.log import Clicks, Split, SyntheticClicks, SyntheticLog
from stretto.recommender.clicks.synthetic.spec import SyntheticSpec
from stretto.recommender.clicks.synthetic.truth import MISSING, BayesOptimalTally
from stretto.recommender.clicks.writer import ClickWriter
from stretto.run.config.sources import is_click_folder
from stretto.run.data.commit import PartialFolder

Bytes = NDArray[np.uint8]

_TAB, _LINE = b"\t\n"
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)
_ABSENT_RANK = 1  # the second most popular id of some features is written as a missing value
_ABSENT_EVERY = 4


class CriteoText:
    """Formats samples as Criteo's lines. A permutation of 32-bit numbers per feature maps ids to names.

    Raises:
        StrettoError: the columns of the log do not match the format.
    """

    def __init__(self, log: SyntheticLog) -> None:
        spec = log.spec
        single = all(feature.max_hot == 1 and not feature.varying for feature in spec.features)
        if (spec.dense, len(spec.features)) != (NUMBERS, FEATURES) or not single:
            raise StrettoError(
                f"{spec.dense} numbers and {len(spec.features)} features with up to "
                f"{max(feature.max_hot for feature in spec.features)} ids in Criteo's format",
                hint=f"it has {NUMBERS} numbers and {FEATURES} features of one id; a click folder has any",
            )
        starts = [int(stream(spec.seed, "name", i)) & 0xFFFFFFFF for i in range(FEATURES)]
        self._starts = np.array(starts, np.uint32)[:, None]
        self._numbers = list[Bytes]()
        for row in log.numbers.raw.tolist():
            texts = [b"" if value == MISSING else str(value).encode() for value in row]
            width = max(1, *map(len, texts))
            padded = b"".join(text.ljust(width, b"\0") for text in texts)
            self._numbers.append(np.frombuffer(padded, np.uint8).reshape(-1, width))

    def lines(self, clicks: Clicks) -> bytes:
        """The samples, one line each."""
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


Format = Literal["folder", "criteo"]
FORMATS = ("folder", "criteo")
METADATA = ".synthetic.json"  # metadata of a text log; hidden, so that only log files are listed
SAVED = 1 << 22
"""Samples between durable saves of a click folder."""
_RECIPE = 2  # increment whenever the same spec would produce different files
_SOURCE = "synthetic"  # in the index of a click folder
_SPLITS: tuple[Split, ...] = ("train", "valid")

Report = Callable[[int, int], None]
"""Progress callback: samples done, samples in total."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A log on disk.

    Attributes:
        bytes: total size of the log's files.
        best: the fields of `BayesOptimal` by split; empty splits are omitted.
        reused: True if an existing log was reused.
    """

    path: Path
    form: Format
    samples: int
    bytes: int
    best: dict[str, dict[str, Any]]
    reused: bool


def write(spec: SyntheticSpec, path: Path, form: str = "folder", report: Report | None = None) -> Written:
    """Write the log of a spec: a click folder with the splits `train` and `valid`, or train.txt and valid.txt
    in Criteo's format. An existing log of the same spec is reused.

    Memory use does not depend on the size of the log, and `path` appears only once the log is complete. An
    interrupted click folder is resumed.

    Raises:
        StrettoError: unknown format, columns that the format cannot represent, or other content at `path`.
    """
    if form not in FORMATS:
        close = nearest(form, FORMATS)
        hint = f"did you mean {close}?" if close else "folder is what stretto trains on; criteo is text"
        raise StrettoError(f"format {form!r}: allowed are folder and criteo", hint=hint)
    try:
        write_form = _write_criteo if form == "criteo" else _write_folder
        return write_form(spec, path, report)
    except OSError as error:
        raise StrettoError(
            f"{path}: cannot be written: {error.strerror or error}", hint="make room, or name another --out"
        ) from None


def fingerprint(spec: SyntheticSpec) -> str:
    """Hash of a spec, equal for equal specs."""
    text = json.dumps({**spec.as_dict(), "recipe": _RECIPE}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write_folder(spec: SyntheticSpec, path: Path, report: Report | None) -> Written:
    key = fingerprint(spec)
    if (existing := open_if_current(path, key)) is not None:
        return _describe_folder(existing, reused=True)
    _check_free(path, is_click_folder(path))
    check_source(path, [_SOURCE], "name another --out")
    log = SyntheticLog(spec)
    features = [CategoricalFeature(f.name, f.rows, None if f.varying else f.max_hot) for f in spec.features]
    varying = any(feature.varying for feature in spec.features)
    numbers = [f"I{i + 1}" for i in range(spec.dense)]
    best = dict[str, dict[str, Any]]()
    with ClickWriter(path, features, numbers, key=key, source=[_SOURCE], resume=True) as writer:
        done = saved = writer.samples  # above 0 when resuming an interrupted write
        for split in _parts(log):
            tally, (first, last) = BayesOptimalTally(), log.span(split)
            if done <= first:
                writer.mark(split)
            for offset, clicks in log.chunks(first, last):
                tally.add(clicks.logits, clicks.labels)
                if first + offset >= done:
                    # ids in sample-major order, and by feature within a sample
                    dense = np.take_along_axis(log.numbers.values, clicks.slots, 1).T
                    ids, lengths = clicks.ids.T, None
                    if varying:
                        lengths = clicks.lengths.T
                        valid = [
                            np.arange(feature.max_hot) < clicks.lengths[i][:, None]
                            for i, feature in enumerate(spec.features)
                        ]
                        ids = ids[np.concatenate(valid, axis=1)]
                    writer.add(dense, clicks.labels, ids, lengths)
                    if writer.samples - saved >= SAVED:
                        saved = writer.samples
                        writer.save({"samples": saved})
                if report is not None:
                    report(first + offset + len(clicks.labels), spec.samples)
            best[split] = tally.result().as_dict()
        folder = writer.commit(
            histograms=SyntheticClicks(spec, "train", log).popularity(),
            held_parts=len(writer.parts) - 1,
            extra={"best": best, "synthetic": _describe(spec)},
        )
    return _describe_folder(folder, reused=False)


def _write_criteo(spec: SyntheticSpec, path: Path, report: Report | None) -> Written:
    key = fingerprint(spec)
    existing = _read_metadata(path)
    if existing is not None and existing["key"] == key:
        return _describe_text(path, existing, reused=True)
    _check_free(path, existing is not None)
    log = SyntheticLog(spec)
    text = CriteoText(log)
    metadata: dict[str, Any] = {"key": key, "samples": spec.samples, "best": {}, "files": {}}
    with PartialFolder(path) as partial:
        for split in _parts(log):
            name = f"{split}.txt"
            tally = BayesOptimalTally()
            (first, last) = log.span(split)
            with (partial.path / name).open("wb") as file:
                for offset, clicks in log.chunks(first, last):
                    tally.add(clicks.logits, clicks.labels)
                    file.write(text.lines(clicks))
                    if report is not None:
                        report(first + offset + len(clicks.labels), spec.samples)
                metadata["files"][name] = file.tell()
            metadata["best"][split] = tally.result().as_dict()
        metadata["synthetic"] = _describe(spec)
        (partial.path / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
        partial.commit(lambda other: (_read_metadata(other) or {}).get("key") == key)
    return _describe_text(path, metadata, reused=False)


def _parts(log: SyntheticLog) -> Iterator[Split]:
    """The splits that have samples."""
    return (split for split in _SPLITS if len(range(*log.span(split))))


def _describe(spec: SyntheticSpec) -> dict[str, Any]:
    """All fields of the spec except `features`, which a click folder already describes."""
    return {name: value for name, value in spec.as_dict().items() if name != "features"}


def _check_free(path: Path, replaceable: bool) -> None:
    if path.exists() and not replaceable and not (path.is_dir() and not any(path.iterdir())):
        raise StrettoError(
            f"{path}: exists already, and is not a log of this format", hint="name another --out"
        )


def _describe_folder(folder: ClickFolder, reused: bool) -> Written:
    size = sum(sums.bytes for sums in folder.index.files.values())
    return Written(
        path=folder.path,
        form="folder",
        samples=folder.samples,
        bytes=size,
        best=folder.index.extra["best"],
        reused=reused,
    )


def _describe_text(path: Path, metadata: dict[str, Any], reused: bool) -> Written:
    return Written(
        path=path,
        form="criteo",
        samples=metadata["samples"],
        bytes=sum(metadata["files"].values()),
        best=metadata["best"],
        reused=reused,
    )


def _read_metadata(path: Path) -> dict[str, Any] | None:
    """Read the metadata of a text log at `path`; None unless all files exist with their recorded sizes."""
    try:
        content: object = json.loads((path / METADATA).read_text(encoding="utf-8"))
        metadata = cast("dict[str, Any]", content)
        if all((path / name).stat().st_size == size for name, size in metadata["files"].items()):
            return metadata
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None
