"""Synthetic clicks as files: a click folder, or text in Criteo's format.

Both hold the same samples. In a click folder they are as a stream gives them; text has the numbers before any
transform, ids as hexadecimal names, and empty fields for missing values, as a real log has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from stretto.data.clicks.folder import ClickFolder, open_if_current
from stretto.data.clicks.index import Feature, is_click_folder
from stretto.data.clicks.synthetic import SyntheticClicks
from stretto.data.clicks.synthetic_best import BestTally
from stretto.data.clicks.synthetic_log import Clicks, Split, SyntheticLog
from stretto.data.clicks.synthetic_spec import SyntheticSpec
from stretto.data.clicks.synthetic_text import Text
from stretto.data.clicks.writer import ClickWriter
from stretto.data.commit import PartialFolder
from stretto.errors import StrettoError, nearest

Format = Literal["folder", "criteo"]
FORMATS = ("folder", "criteo")
FACTS = ".synthetic.json"  # beside text; hidden, so that the folder's files are those of the log
SAVED = 1 << 22
"""Samples after which a click folder's are made durable."""
_RECIPE = 1  # counts up when the same spec would give other files than before
_SPLITS: tuple[Split, ...] = ("train", "valid")

Report = Callable[[int, int], None]
"""Is told how many samples of how many are done."""


@dataclass(frozen=True)
class Written:
    """What is at `path`.

    Attributes:
        bytes: of the log's files.
        best: what is possible, by part: the fields of Best. A part without samples is not there.
        kept: whether it was there already.
    """

    path: Path
    form: Format
    samples: int
    bytes: int
    best: dict[str, dict[str, Any]]
    kept: bool


def write(spec: SyntheticSpec, path: Path, form: str = "folder", report: Report | None = None) -> Written:
    """Make the log of a spec: a click folder with the parts `train` and `valid`, or train.txt and valid.txt
    in Criteo's format. What is there already, of the same spec, is kept.

    Memory does not grow with the log, and nothing is at `path` before all is. A click folder whose writing
    was stopped goes on where it was.

    Raises:
        StrettoError: no such format, columns that it has no place for, something else at `path`.
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
    """The same for equal specs."""
    text = json.dumps({**spec.facts(), "recipe": _RECIPE}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _folder(spec: SyntheticSpec, path: Path, report: Report | None) -> Written:
    key = fingerprint(spec)
    if (there := open_if_current(path, key)) is not None:
        return _written(there, kept=True)
    _check_free(path, is_click_folder(path))
    log = SyntheticLog(spec)
    features = [Feature(f.name, f.rows, None if f.varying else f.most) for f in spec.features]
    numbers = [f"I{i + 1}" for i in range(spec.dense)]
    best = dict[str, dict[str, Any]]()
    with ClickWriter(path, features, numbers, key=key, source=["synthetic"], resume=True) as writer:
        done = saved = writer.samples  # of a writing that was stopped
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
        folder = writer.commit(popular=popular, extra={"best": best, "synthetic": _facts(spec)})
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
            name, tally, (first, last) = f"{split}.txt", BestTally(), log.span(split)
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
    """Write samples, whose ids are to stand sample by sample and in a sample feature by feature."""
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
    """The spec but for its features, which a folder says itself."""
    return {name: value for name, value in spec.facts().items() if name != "features"}


def _check_free(path: Path, ours: bool) -> None:
    if path.exists() and not ours and not (path.is_dir() and not any(path.iterdir())):
        raise StrettoError(
            f"{path}: is there already, and is no log of this format", hint="name another --out"
        )


def _written(folder: ClickFolder, kept: bool) -> Written:
    size = sum(sums.bytes for sums in folder.index.files.values())
    return Written(folder.path, "folder", folder.samples, size, folder.index.extra["best"], kept)


def _written_text(path: Path, facts: dict[str, Any], kept: bool) -> Written:
    return Written(path, "criteo", facts["samples"], sum(facts["files"].values()), facts["best"], kept)


def _read_facts(path: Path) -> dict[str, Any] | None:
    """What a writing of text left at `path`, with all of its files in their sizes; or None."""
    try:
        found: object = json.loads((path / FACTS).read_text(encoding="utf-8"))
        facts = cast("dict[str, Any]", found)
        if all((path / name).stat().st_size == size for name, size in facts["files"].items()):
            return facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None
