"""Builds a click folder from a click log, once; a killed build resumes and produces the same bytes.

With a vocabulary the log is read twice: ids are counted, then samples are written. Memory: a block of lines,
the counts of a run (see counting.py), and the ids with their own rows. On disk a vocabulary needs 12 bytes
for each distinct id of every eight million lines, in addition to the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from stretto.errors import StrettoError
from stretto.recommender.clicks.counting import IdCounter, lookup_histogram, remove_runs
from stretto.recommender.clicks.files import LogFile, Source, find_files, held_out_last, open_reader
from stretto.recommender.clicks.folder import ClickFolder, open_if_current
from stretto.recommender.clicks.index import NAMES, VERSION, LookupHistogram, histogram_from, read_index
from stretto.recommender.clicks.raw import LogReader, Parsed, ParsedBlock
from stretto.recommender.clicks.tabular import ColumnNames
from stretto.recommender.clicks.transform import ClickTransform, Kind, Vocabulary
from stretto.recommender.clicks.writer import ClickWriter, WorkFolder
from stretto.run.config.sources import is_click_folder

OnError = Literal["skip", "fatal"]
Split = Literal["named", "share"]
COUNTED_LINES, WRITTEN_LINES = 1 << 23, 1 << 21
"""Lines after which counts and samples are made durable."""
SHOWN_FAULTS = 10
TOLERATED = 100
TOLERATED_SHARE = 0.01
_RECIPE = 2
"""Increment whenever the same source would produce a different folder."""


@dataclass(frozen=True, kw_only=True)
class ClickBuildProgress:
    """The progress of a build: `bytes` of about `total`; `stage` is "count ids" or "write samples"."""

    stage: str
    bytes: int
    total: int
    lines: int
    malformed: int


Report = Callable[[ClickBuildProgress], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a log is transformed: see `ClickTransform`.

    Attributes:
        on_error: skip malformed lines (skip), or end the build at the first (fatal).
        split: hold out the files named valid, test, ..., which then come last (named), or leave all files in
            their order (share).
    """

    kind: Kind = "vocabulary"
    threshold: int = 10
    rows: int | None = None
    flags: bool = False
    on_error: OnError = "skip"
    split: Split = "named"


@dataclass(kw_only=True)
class Tally:
    """Counts of the lines read so far; `faults` are the first malformed ones: file, line, reason."""

    read: int = 0
    samples: int = 0
    blank: int = 0
    malformed: int = 0
    faults: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])

    @classmethod
    def load(cls, state: dict[str, Any]) -> Tally:
        """The tally in a build's saved state; an empty one if there is none."""
        body = dict(state.get("tally", {}))
        faults = [(str(name), int(line), str(reason)) for name, line, reason in body.pop("faults", [])]
        return cls(samples=body.pop("kept", 0), faults=faults, **body)

    def lines(self) -> dict[str, int]:
        """The counts as an index has them."""
        return {"read": self.read, "kept": self.samples, "blank": self.blank, "malformed": self.malformed}

    def to_json(self) -> dict[str, Any]:
        return {**self.lines(), "faults": self.faults}

    def add(self, path: Path, parsed: Parsed, on_error: OnError) -> None:
        """Count a block.

        Raises:
            StrettoError: a malformed line if that is fatal, or too many malformed lines.
        """
        self.read += parsed.lines
        self.samples += parsed.chunk.samples
        self.blank += parsed.blank
        self.malformed += len(parsed.faults)
        self.faults += [
            (str(path), line, reason) for line, reason in parsed.faults[: SHOWN_FAULTS - len(self.faults)]
        ]
        if parsed.faults and on_error == "fatal":
            line, reason = parsed.faults[0]
            raise StrettoError(
                f"{path}, line {line}: {reason}", hint="fix it, or skip malformed lines: --on-error skip"
            )
        if self.malformed > max(TOLERATED, TOLERATED_SHARE * self.read):
            name, line, reason = self.faults[0]
            raise StrettoError(
                f"{self.malformed} of {self.read} lines are malformed; "
                f"the first: {name}, line {line}: {reason}",
                hint=f"check the format; {TOLERATED} are left out, or {TOLERATED_SHARE:.0%} of all if more",
            )


def build(
    sources: Source | Sequence[Source],
    out: Source,
    settings: Settings | None = None,
    *,
    form: str | None = None,
    columns: ColumnNames | None = None,
    replace: bool = False,
    progress: Report | None = None,
) -> ClickFolder:
    """Return the click folder of a log at `out`, built unless it exists already.

    Args:
        sources: files, directories and globs, in the order of time (see find_files).
        form: criteo, parquet or csv; by default chosen by the files' names.
        columns: names of the columns of Parquet and CSV.
        replace: overwrite the clicks of another source at `out`.

    Raises:
        StrettoError: bad source, settings, or lines; `out` holds other files, or the clicks of another source
            and `replace` is not set.
    """
    settings = settings or Settings()
    files, held_parts = find_files(sources), 0
    if settings.split == "named":
        files, held_parts = held_out_last(files)
    reader = open_reader(files, form, columns or ColumnNames())
    # raises for settings that no transform can have
    ClickTransform(
        columns=reader.columns,
        kind=settings.kind,
        rows=settings.rows,
        flags=settings.flags,
        threshold=settings.threshold,
    )
    target = Path(out).expanduser()
    if target.exists():
        if not target.is_dir():
            raise StrettoError(f"{target}: is a file", hint="name a new directory")
        if others := {entry.name for entry in target.iterdir()} - NAMES:
            raise StrettoError(
                f"{target}: holds other files ({min(others)}), which a build would remove",
                hint="name a new directory",
            )
    stamps = [(str(file.path.resolve()), file.size, file.mtime_ns) for file in files]
    recipe = [VERSION, _RECIPE, asdict(settings), asdict(reader.columns), stamps]
    key = hashlib.blake2b(json.dumps(recipe).encode(), digest_size=16).hexdigest()
    if (folder := open_if_current(target, key)) is not None:
        return folder
    paths = [sources] if isinstance(sources, str) or not isinstance(sources, Sequence) else sources
    source = [str(path) for path in paths]
    if not replace:
        check_source(target, source, "name another --out, or replace them with --force")
    job = _Build(
        files=files,
        held_parts=held_parts,
        reader=reader,
        settings=settings,
        target=target,
        key=key,
        source=source,
        progress=progress,
    )
    try:
        return job.run()
    except OSError as error:
        raise StrettoError(
            f"{target}: cannot be written: {error.strerror or error}", hint="make room, or name another --out"
        ) from None


@dataclass(kw_only=True)
class _Build:
    files: Sequence[LogFile]
    held_parts: int
    reader: LogReader
    settings: Settings
    target: Path
    key: str
    source: list[str]
    progress: Report | None

    def run(self) -> ClickFolder:
        with WorkFolder(self.target, self.key) as work:
            state = work.load() or {}
            if "cursor" not in state and "counted" not in state:
                transform, histograms = self._fit_transform(work, state)
                for name, content in transform.to_files().items():
                    (work.path / name).write_bytes(content if isinstance(content, bytes) else content.data)
                state = {"counted": {name: asdict(histogram) for name, histogram in histograms.items()}}
                work.save(state)
            remove_runs(work.path)
            transform = ClickTransform.load(work.path)
        return self._write_samples(transform, state)

    def _fit_transform(
        self, work: WorkFolder, state: dict[str, Any]
    ) -> tuple[ClickTransform, dict[str, LookupHistogram]]:
        """The transform, and how often its rows are looked up if ids are counted."""
        columns, settings = self.reader.columns, self.settings
        if settings.kind != "vocabulary":
            return ClickTransform(
                columns=columns, kind=settings.kind, rows=settings.rows, flags=settings.flags
            ), {}
        counter = IdCounter(
            work.path,
            len(columns.features),
            state.get("runs", ()),
            cast("list[int] | None", state.get("missing")),
        )
        tally = Tally.load(state)
        saved = tally.read
        # ids that only held-out files have get no row of their own, like ids first seen in serving
        trained = self.files[: len(self.files) - self.held_parts]
        for file, block in self._blocks(trained, state.get("place"), tally, "count ids"):
            counter.add(block.parsed.chunk)
            if tally.read - saved >= COUNTED_LINES:
                saved = tally.read
                counter.flush()
                work.save(
                    {
                        "place": [file, block.start, block.line],
                        "tally": tally.to_json(),
                        "runs": counter.runs,
                        "missing": counter.missing,
                    }
                )
        vocabularies, histograms = dict[str, Vocabulary](), dict[str, LookupHistogram]()
        for index, name in enumerate(columns.features):
            counts = counter.counts(index, settings.threshold)
            vocabularies[name] = Vocabulary(counts.keys)
            lookups = counts.by_row()
            histograms[name] = lookup_histogram(lookups, int(lookups.sum()) / max(1, tally.samples))
        return ClickTransform(
            columns=columns,
            kind="vocabulary",
            rows=None,
            flags=settings.flags,
            threshold=settings.threshold,
            vocabularies=vocabularies,
        ), histograms

    def _write_samples(self, transform: ClickTransform, state: dict[str, Any]) -> ClickFolder:
        writer = ClickWriter(
            self.target, transform.features, transform.numbers, key=self.key, source=self.source, resume=True
        )
        with writer:
            cursor = writer.cursor or {"counted": state["counted"]}
            tally = Tally.load(cursor)
            saved = tally.read
            marked = 0 if "place" not in cursor else cursor["place"][0] + 1
            for index, block in self._blocks(self.files, cursor.get("place"), tally, "write samples"):
                for file in self.files[marked : index + 1]:
                    writer.mark(file.path.name)
                marked = max(marked, index + 1)
                samples, labels = transform.apply(block.parsed.chunk), block.parsed.chunk.labels
                assert labels is not None
                writer.add(samples.dense, labels, samples.ids, samples.lengths)
                if tally.read - saved >= WRITTEN_LINES:
                    saved = tally.read
                    place = [index, block.start, block.line]
                    writer.save({"counted": cursor["counted"], "place": place, "tally": tally.to_json()})
            for file in self.files[marked:]:  # without a line: a part of no samples
                writer.mark(file.path.name)
            if not tally.samples:
                if not tally.faults:
                    raise StrettoError(f"{self.files[0].path}: no samples", hint="name files with samples")
                name, line, reason = tally.faults[0]
                raise StrettoError(f"no samples: {name}, line {line}: {reason}", hint="is it of this format?")
            extra = {"malformed": tally.faults, "unread": self.reader.unread}
            return writer.commit(
                files=transform.to_files(),
                histograms={name: histogram_from(body) for name, body in cursor["counted"].items()},
                lines=tally.lines(),
                held_parts=self.held_parts,
                extra={name: value for name, value in extra.items() if value},
            )

    def _blocks(
        self, files: Sequence[LogFile], place: Sequence[int] | None, tally: Tally, stage: str
    ) -> Iterator[tuple[int, ParsedBlock]]:
        """The blocks of the files from `place` on, with the index of their file; counts and reports them."""
        first, start, line = place or (0, 0, 1)
        total, before = sum(file.size for file in files), sum(file.size for file in files[:first])
        for index in range(first, len(files)):
            file = files[index]
            for block in self.reader.read(file.path, start, line):
                tally.add(file.path, block.parsed, self.settings.on_error)
                yield index, block
                if self.progress:
                    self.progress(
                        ClickBuildProgress(
                            stage=stage,
                            bytes=before + min(file.size, bytes_read(file, block.start)),
                            total=total,
                            lines=tally.read,
                            malformed=tally.malformed,
                        )
                    )
            before += file.size
            start, line = 0, 1


def bytes_read(file: LogFile, start: int) -> int:
    """The approximate number of bytes read: gzip halves logs, and a row of Parquet takes 100 bytes."""
    suffix = file.path.suffix.lower()
    return start // 2 if suffix == ".gz" else start * 100 if suffix == ".parquet" else start


def check_source(target: Path, source: list[str], hint: str) -> None:
    """Raise StrettoError if a click folder at `target`, which would be replaced, is of another source."""
    if not is_click_folder(target):
        return
    try:
        existing = read_index(target).source
    except StrettoError:  # damaged, or of another version
        return
    if existing != source:
        raise StrettoError(f"{target}: holds the clicks of {' '.join(existing)}", hint=hint)
