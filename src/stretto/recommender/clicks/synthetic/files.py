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
from stretto.recommender.clicks.index import Feature
from stretto.recommender.clicks.synthetic.draws import stream
from stretto.recommender.clicks.synthetic.log import Clicks, Split, SyntheticClicks, SyntheticLog
from stretto.recommender.clicks.synthetic.spec import SyntheticSpec
from stretto.recommender.clicks.synthetic.truth import MISSING, BestTally
from stretto.recommender.clicks.writer import ClickWriter
from stretto.run.config.sources import is_click_folder
from stretto.run.data.commit import PartialFolder

Bytes = NDArray[np.uint8]

_TAB, _LINE = b"\t\n"
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)
_ABSENT_RANK = 1  # the second most popular id of some features is written as a missing value
_ABSENT_EVERY = 4


class Text:
    """Formats samples as lines. A 32-bit permutation per feature maps ids to names without collisions.

    Raises:
        StrettoError: the columns of the log do not match the format.
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
        self._numbers = [_padded([_as_text(value) for value in row]) for row in log.numbers.raw.tolist()]

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


def _as_text(value: int) -> bytes:
    return b"" if value == MISSING else str(value).encode()


def _padded(texts: list[bytes]) -> Bytes:
    """One row per text, right-padded with zero bytes."""
    longest = max(1, *map(len, texts))
    return np.frombuffer(b"".join(text.ljust(longest, b"\0") for text in texts), np.uint8).reshape(
        -1, longest
    )


Format = Literal["folder", "criteo"]
FORMATS = ("folder", "criteo")
FACTS = ".synthetic.json"  # metadata of a text log; hidden, so that only log files are listed
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
        best: the fields of `Best` by split; empty splits are omitted.
        kept: whether an existing log was reused.
    """

    path: Path
    form: Format
    samples: int
    bytes: int
    best: dict[str, dict[str, Any]]
    kept: bool


def write(spec: SyntheticSpec, path: Path, form: str = "folder", report: Report | None = None) -> Written:
    """Write the log of a spec: a click folder with the splits `train` and `valid`, or train.txt and valid.txt
    in Criteo's format. An existing log of the same spec is reused.

    Memory use does not depend on the size of the log, and `path` appears only once the log is complete. An
    interrupted click folder is resumed.

    Raises:
        StrettoError: unknown format, columns that the format cannot represent, or other content at `path`.
    """
    if form not in FORMATS:
        near = nearest(form, FORMATS)
        hint = f"did you mean {near}?" if near else "a click folder trains at once; text is for other readers"
        raise StrettoError(f"format {form!r}: allowed are folder and criteo", hint=hint)
    try:
        return _criteo(spec, path, report) if form == "criteo" else _folder(spec, path, report)
    except OSError as error:
        raise StrettoError(
            f"{path}: cannot be written: {error.strerror or error}", hint="make room, or name another --out"
        ) from None


def fingerprint(spec: SyntheticSpec) -> str:
    """Hash of a spec, equal for equal specs."""
    text = json.dumps({**spec.facts(), "recipe": _RECIPE}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _folder(spec: SyntheticSpec, path: Path, report: Report | None) -> Written:
    key = fingerprint(spec)
    if (there := open_if_current(path, key)) is not None:
        return _written(there, kept=True)
    _check_free(path, is_click_folder(path))
    check_source(path, [_SOURCE], "name another --out")
    log = SyntheticLog(spec)
    features = [Feature(f.name, f.rows, None if f.varying else f.most) for f in spec.features]
    numbers = [f"I{i + 1}" for i in range(spec.dense)]
    best = dict[str, dict[str, Any]]()
    with ClickWriter(path, features, numbers, key=key, source=[_SOURCE], resume=True) as writer:
        done = saved = writer.samples  # above 0 when resuming an interrupted write
        for split in _parts(log):
            tally, (first, last) = BestTally(), log.span(split)
            if done <= first:
                writer.mark(split)
            for at, clicks in log.chunks(first, last):
                tally.add(clicks.logits, clicks.labels)
                if first + at >= done:
                    _add(writer, log, clicks)
                    if writer.samples - saved >= SAVED:
                        saved = writer.samples
                        writer.save({"samples": saved})
                if report is not None:
                    report(first + at + len(clicks.labels), spec.samples)
            best[split] = tally.result().facts()
        popular = SyntheticClicks(spec, "train", log).popularity()
        folder = writer.commit(
            popular=popular,
            held_parts=len(writer.parts) - 1,
            extra={"best": best, "synthetic": _facts(spec)},
        )
    return _written(folder, kept=False)


def _criteo(spec: SyntheticSpec, path: Path, report: Report | None) -> Written:
    key = fingerprint(spec)
    there = _read_facts(path)
    if there is not None and there["key"] == key:
        return _written_text(path, there, kept=True)
    _check_free(path, there is not None)
    log = SyntheticLog(spec)
    text = Text(log)
    facts: dict[str, Any] = {"key": key, "samples": spec.samples, "best": {}, "files": {}}
    with PartialFolder(path) as partial:
        for split in _parts(log):
            name = f"{split}.txt"
            tally = BestTally()
            (first, last) = log.span(split)
            with (partial.path / name).open("wb") as file:
                for at, clicks in log.chunks(first, last):
                    tally.add(clicks.logits, clicks.labels)
                    file.write(text.lines(clicks))
                    if report is not None:
                        report(first + at + len(clicks.labels), spec.samples)
                facts["files"][name] = file.tell()
            facts["best"][split] = tally.result().facts()
        facts["synthetic"] = _facts(spec)
        (partial.path / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        partial.commit(lambda other: (_read_facts(other) or {}).get("key") == key)
    return _written_text(path, facts, kept=False)


def _parts(log: SyntheticLog) -> Iterator[Split]:
    return (split for split in _SPLITS if len(range(*log.span(split))))


def _add(writer: ClickWriter, log: SyntheticLog, clicks: Clicks) -> None:
    """Write samples, with ids in sample-major order and by feature within a sample."""
    dense = np.take_along_axis(log.numbers.values, clicks.slots, 1).T
    ids = clicks.ids.T
    if not any(feature.varying for feature in log.spec.features):
        writer.add(dense, clicks.labels, ids)
        return
    counted = [
        np.arange(feature.most) < clicks.lengths[i][:, None] for i, feature in enumerate(log.spec.features)
    ]
    writer.add(dense, clicks.labels, ids[np.concatenate(counted, axis=1)], clicks.lengths.T)


def _facts(spec: SyntheticSpec) -> dict[str, Any]:
    """All fields of the spec except `features`, which a click folder already describes."""
    return {name: value for name, value in spec.facts().items() if name != "features"}


def _check_free(path: Path, ours: bool) -> None:
    if path.exists() and not ours and not (path.is_dir() and not any(path.iterdir())):
        raise StrettoError(
            f"{path}: is there already, and is no log of this format", hint="name another --out"
        )


def _written(folder: ClickFolder, kept: bool) -> Written:
    size = sum(sums.bytes for sums in folder.index.files.values())
    return Written(
        path=folder.path,
        form="folder",
        samples=folder.samples,
        bytes=size,
        best=folder.index.extra["best"],
        kept=kept,
    )


def _written_text(path: Path, facts: dict[str, Any], kept: bool) -> Written:
    return Written(
        path=path,
        form="criteo",
        samples=facts["samples"],
        bytes=sum(facts["files"].values()),
        best=facts["best"],
        kept=kept,
    )


def _read_facts(path: Path) -> dict[str, Any] | None:
    """Metadata of a text log at `path`, or None unless all files exist with their recorded sizes."""
    try:
        content: object = json.loads((path / FACTS).read_text(encoding="utf-8"))
        facts = cast("dict[str, Any]", content)
        if all((path / name).stat().st_size == size for name, size in facts["files"].items()):
            return facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None
