"""Builds a click folder from a click log, once; a killed build resumes and produces the same bytes.

With a vocabulary the log is read twice: ids are counted, then samples are written. Memory: a block of lines,
the counts of a run (see counting.py), and the ids that have rows of their own; beside the folder a vocabulary
needs room for its runs, 12 bytes for each distinct id of every eight million lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from stretto.errors import StrettoError
from stretto.recommender.clicks.counting import Counter, popularity, remove_runs
from stretto.recommender.clicks.files import LogFile, Source, find_files, held_out_last, reader_of
from stretto.recommender.clicks.folder import ClickFolder, open_if_current
from stretto.recommender.clicks.index import NAMES, VERSION, Popularity, popularity_from, read_index
from stretto.recommender.clicks.raw import Parsed, Piece, Reader
from stretto.recommender.clicks.tabular import Named
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
"""Counts up when the same source would give another folder than before."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a build: `bytes` of about `total`; `stage` is "count ids" or "write samples"."""

    stage: str
    bytes: int
    total: int
    lines: int
    malformed: int


Report = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a log is transformed: see `ClickTransform`.

    Attributes:
        on_error: whether malformed lines are skipped or end the build (fatal).
        split: whether files that are named valid, test, ... are put at the end and held out (named), or all
            stay in their order (share).
    """

    kind: Kind = "vocabulary"
    threshold: int = 10
    rows: int | None = None
    flags: bool = False
    on_error: OnError = "skip"
    split: Split = "named"


@dataclass(kw_only=True)
class Tally:
    """Counts of lines so far; `faults` are the first malformed ones: file, line, reason."""

    read: int = 0
    kept: int = 0
    blank: int = 0
    malformed: int = 0
    faults: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])

    def add(self, path: Path, parsed: Parsed, on_error: OnError) -> None:
        """Counts a block.

        Raises:
            StrettoError: a malformed line where that is fatal, or too many malformed lines.
        """
        self.read += parsed.lines
        self.kept += parsed.chunk.samples
        self.blank += parsed.blank
        self.malformed += len(parsed.faults)
        self.faults += [
            (str(path), line, why) for line, why in parsed.faults[: SHOWN_FAULTS - len(self.faults)]
        ]
        if parsed.faults and on_error == "fatal":
            line, why = parsed.faults[0]
            raise StrettoError(
                f"{path}, line {line}: {why}", hint="fix it, or skip malformed lines: --on-error skip"
            )
        if self.malformed > max(TOLERATED, TOLERATED_SHARE * self.read):
            name, line, why = self.faults[0]
            raise StrettoError(
                f"{self.malformed} of {self.read} lines are malformed; the first: {name}, line {line}: {why}",
                hint="check the format; at most 1% of the lines may be malformed",
            )


def build(
    sources: Source | Sequence[Source],
    out: Source,
    settings: Settings | None = None,
    *,
    form: str | None = None,
    named: Named | None = None,
    replace: bool = False,
    progress: Report | None = None,
) -> ClickFolder:
    """The click folder of a log at `out`, built unless it exists already.

    Args:
        sources: files, directories and globs, in the order of time (see find_files).
        form: criteo, parquet or csv; None: by the files' names.
        named: columns of Parquet and CSV.
        replace: overwrite the clicks of another source at `out`.

    Raises:
        StrettoError: bad source, settings, or lines; `out` holds other files, or the clicks of another source
            without `replace`.
    """
    settings = settings or Settings()
    files, held_parts = find_files(sources), 0
    if settings.split == "named":
        files, held_parts = held_out_last(files)
    reader = reader_of(files, form, named or Named())
    ClickTransform(
        columns=reader.columns,
        kind=settings.kind,
        rows=settings.rows,
        flags=settings.flags,
        threshold=settings.threshold,
    )
    target = Path(out).expanduser()
    _check_target(target)
    key = _key(files, reader, settings)
    if (folder := open_if_current(target, key)) is not None:
        return folder
    paths = [sources] if isinstance(sources, str) or not isinstance(sources, Sequence) else sources
    source = [str(each) for each in paths]
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
    reader: Reader
    settings: Settings
    target: Path
    key: str
    source: list[str]
    progress: Report | None

    def run(self) -> ClickFolder:
        with WorkFolder(self.target, self.key) as work:
            state = work.load() or {}
            if "cursor" not in state and "counted" not in state:
                state = self._prepare(work, state)
            remove_runs(work.path)
            transform = ClickTransform.load(work.path)
        return self._write(transform, state)

    def _prepare(self, work: WorkFolder, state: dict[str, Any]) -> dict[str, Any]:
        """Write the transform's files; returns the state from which samples can be written."""
        transform, popular = self._count(work, state)
        for name, content in transform.to_files().items():
            (work.path / name).write_bytes(content if isinstance(content, bytes) else content.data)
        state = {"counted": {name: asdict(each) for name, each in popular.items()}}
        work.save(state)
        return state

    def _count(self, work: WorkFolder, state: dict[str, Any]) -> tuple[ClickTransform, dict[str, Popularity]]:
        """The transform, and the popularity of its rows if ids are counted."""
        columns, settings = self.reader.columns, self.settings
        if settings.kind != "vocabulary":
            return ClickTransform(
                columns=columns, kind=settings.kind, rows=settings.rows, flags=settings.flags
            ), {}
        counter = Counter(
            work.path,
            len(columns.features),
            state.get("runs", ()),
            cast("list[int] | None", state.get("missing")),
        )
        tally = _tally(state)
        saved = tally.read
        # ids that only held-out files have get no row of their own, as those that are first seen in serving
        trained = self.files[: len(self.files) - self.held_parts]
        for number, piece in self._pieces(trained, state.get("place"), tally, "count ids"):
            counter.add(piece.parsed.chunk)
            if tally.read - saved >= COUNTED_LINES:
                saved = tally.read
                counter.flush()
                work.save(
                    {
                        "place": [number, piece.start, piece.line],
                        "tally": asdict(tally),
                        "runs": counter.runs,
                        "missing": counter.missing,
                    }
                )
        vocabularies, popular = dict[str, Vocabulary](), dict[str, Popularity]()
        for number, name in enumerate(columns.features):
            counted = counter.result(number, settings.threshold)
            vocabularies[name] = Vocabulary(counted.keys)
            lookups = counted.by_row()
            popular[name] = popularity(lookups, int(lookups.sum()) / max(1, tally.kept))
        return ClickTransform(
            columns=columns,
            kind="vocabulary",
            rows=None,
            flags=settings.flags,
            threshold=settings.threshold,
            vocabularies=vocabularies,
        ), popular

    def _write(self, transform: ClickTransform, state: dict[str, Any]) -> ClickFolder:
        writer = ClickWriter(
            self.target, transform.features, transform.numbers, key=self.key, source=self.source, resume=True
        )
        with writer:
            cursor = writer.cursor or {"counted": state["counted"]}
            tally = _tally(cursor)
            saved = tally.read
            begun = 0 if "place" not in cursor else cursor["place"][0] + 1
            for number, piece in self._pieces(self.files, cursor.get("place"), tally, "write samples"):
                for file in self.files[begun : number + 1]:
                    writer.mark(file.path.name)
                begun = max(begun, number + 1)
                done, labels = transform.apply(piece.parsed.chunk), piece.parsed.chunk.labels
                assert labels is not None
                writer.add(done.dense, labels, done.ids, done.lengths)
                if tally.read - saved >= WRITTEN_LINES:
                    saved = tally.read
                    place = [number, piece.start, piece.line]
                    writer.save({"counted": cursor["counted"], "place": place, "tally": asdict(tally)})
            for file in self.files[begun:]:  # without a line: a part of no samples
                writer.mark(file.path.name)
            facts = asdict(tally)
            extra = {"malformed": facts.pop("faults"), "unread": self.reader.unread}
            if not tally.kept:
                raise _nothing(tally)
            return writer.commit(
                files=transform.to_files(),
                popular={name: popularity_from(each) for name, each in cursor["counted"].items()},
                lines=facts,
                held_parts=self.held_parts,
                extra={name: value for name, value in extra.items() if value},
            )

    def _pieces(
        self, files: Sequence[LogFile], place: Sequence[int] | None, tally: Tally, stage: str
    ) -> Iterator[tuple[int, Piece]]:
        """The pieces of the files from `place` on, with the number of their file; counts and reports them."""
        first, start, line = place or (0, 0, 1)
        total, before = sum(file.size for file in files), sum(file.size for file in files[:first])
        for number in range(first, len(files)):
            file = files[number]
            for piece in self.reader.read(file.path, start, line):
                tally.add(file.path, piece.parsed, self.settings.on_error)
                yield number, piece
                if self.progress:
                    at = before + min(file.size, bytes_read(file, piece.start))
                    self.progress(
                        Progress(
                            stage=stage, bytes=at, total=total, lines=tally.read, malformed=tally.malformed
                        )
                    )
            before += file.size
            start, line = 0, 1


def bytes_read(file: LogFile, start: int) -> int:
    """The approximate number of bytes read: gzip halves logs, and a row of Parquet takes 100 bytes."""
    suffix = file.path.suffix.lower()
    return start // 2 if suffix == ".gz" else start * 100 if suffix == ".parquet" else start


def _tally(state: dict[str, Any]) -> Tally:
    facts = dict(state.get("tally", {}))
    facts["faults"] = [(str(name), int(line), str(why)) for name, line, why in facts.get("faults", [])]
    return Tally(**facts)


def _nothing(tally: Tally) -> StrettoError:
    if tally.faults:
        name, line, why = tally.faults[0]
        return StrettoError(f"no samples: {name}, line {line}: {why}", hint="is it of this format?")
    return StrettoError("no samples: every line is blank", hint="name files with samples")


def _key(files: Sequence[LogFile], reader: Reader, settings: Settings) -> str:
    """Fingerprint of the files (place, size, time of change) and of the settings."""
    facts = [(str(file.path.resolve()), file.size, file.mtime_ns) for file in files]
    body = json.dumps([VERSION, _RECIPE, asdict(settings), asdict(reader.columns), facts])
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()


def _check_target(target: Path) -> None:
    """Checks that a build at `target` can only replace a click folder."""
    if not target.exists():
        return
    if not target.is_dir():
        raise StrettoError(f"{target}: is a file", hint="name a new directory")
    others = {entry.name for entry in target.iterdir()} - NAMES
    if others:
        raise StrettoError(
            f"{target}: holds other files ({min(others)}), which a build would remove",
            hint="name a new directory",
        )


def check_source(target: Path, source: list[str], hint: str) -> None:
    """Checks that a click folder at `target`, which would be replaced, is of the same source."""
    if not is_click_folder(target):
        return
    try:
        there = read_index(target).source
    except StrettoError:  # damaged, or of another version
        return
    if there != source:
        raise StrettoError(f"{target}: holds the clicks of {' '.join(there)}", hint=hint)
