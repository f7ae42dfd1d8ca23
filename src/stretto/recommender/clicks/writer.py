"""Writes a click folder as a stream: memory does not grow with the log, and a killed writer can resume."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks import index as names
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.counting import COUNTED, count_ids, lookup_histogram, sample_runs
from stretto.recommender.clicks.folder import Arrays, ClickFolder, by_sample
from stretto.recommender.clicks.index import CategoricalFeature, ClickIndex, LookupHistogram
from stretto.run.data.checksum import CHUNK, FileSums, RunningSums, SummedFile
from stretto.run.data.commit import PartialFolder

STATE = "state.json"


class GrowingFile:
    """An append-only file that can be reopened at its last durable size; later bytes are truncated."""

    def __init__(self, path: Path, sums: FileSums | None = None, chunk: int = CHUNK) -> None:
        """Open the file; its content after `sums` is discarded.

        Raises:
            StrettoError: it is shorter than `sums`.
        """
        sums = sums or FileSums(0)
        if sums.bytes and (not path.is_file() or path.stat().st_size < sums.bytes):
            raise StrettoError(
                f"{path}: shorter than when it was saved", hint="the same command starts from the beginning"
            )
        self._file = path.open("r+b" if sums.bytes else "w+b")
        self._file.truncate(sums.bytes)
        self._file.seek(sums.bytes)
        self._sums = RunningSums(sums, chunk)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        data = memoryview(data)
        if not data.nbytes:
            return
        data = data.cast("B")
        self._file.write(data)
        self._sums.add(data)

    def flush(self) -> FileSums:
        """Make all written bytes durable and return their checksums."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._sums.sums()

    def close(self) -> None:
        self._file.close()


class WorkFolder(PartialFolder):
    """A partial folder. With a `key`, a later process with the same key resumes from it.

    `save` and `load` store its progress as JSON. Only one process at a time can open it.
    """

    def __init__(self, target: Path, key: str = "") -> None:
        super().__init__(target)
        self.key = key
        if key:
            self.path = target.parent / f".{target.name}.{key[:16]}.build"
        self._lock: int | None = None

    def __enter__(self) -> WorkFolder:
        if not self.key:
            super().__enter__()
            return self
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise StrettoError(
                f"{self.target}: cannot be written: {error.strerror}",
                hint="name a directory you may write to",
            ) from None
        if not _try_lock(self._lock):
            os.close(self._lock)
            self._lock = None
            raise StrettoError(
                f"{self.target}: another process is building it", hint="wait for it, or name another --out"
            )
        # remove abandoned builds of the same target, but not running ones
        for folder in self.target.parent.glob(f".{self.target.name}.*.build"):
            if folder == self.path:
                continue
            try:
                descriptor = os.open(folder, os.O_RDONLY)
            except OSError:
                continue
            if _try_lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # bad input is final; after any other error the next process resumes from the saved state
        if not self.key or not (self.path / STATE).exists() or isinstance(error, StrettoError):
            super().__exit__(kind, error, trace)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the saved state, durably and atomically."""
        body = json.dumps(state)
        new = self.path / f"{STATE}.new"
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"state": body, "crc32": zlib.crc32(body.encode())}))
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path / STATE)

    def load(self) -> dict[str, Any] | None:
        """Return the saved state; None if there is none, or it is damaged."""
        try:
            parsed = json.loads((self.path / STATE).read_text(encoding="utf-8"))
            body = parsed["state"]
            return (
                cast(dict[str, Any], json.loads(body))
                if zlib.crc32(body.encode()) == parsed["crc32"]
                else None
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def remove_state(self) -> None:
        """Remove the saved state."""
        (self.path / STATE).unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


_LONGEST = (1 << 16) - 1


class ClickWriter:
    """Writes a click folder.

        with ClickWriter(path, features, numbers) as writer:
            writer.add(dense, labels, ids)  # as often as there are chunks
            folder = writer.commit()

    `path` does not exist before the commit. With `resume` and a `key`, the samples that a killed writer had
    made durable with `save(cursor)` are restored, and `cursor` is the position in its source; otherwise it is
    None.
    """

    def __init__(
        self,
        path: Path,
        features: Sequence[CategoricalFeature],
        numbers: Sequence[str],
        *,
        key: str = "",
        source: Sequence[str] = (),
        weighted: bool = False,
        resume: bool = False,
        chunk: int = CHUNK,
    ) -> None:
        assert key or not resume, "resuming takes a key"
        wide = any(feature.rows is None or feature.rows > 1 << 32 for feature in features)
        self._index = ClickIndex(
            numbers=list(numbers),
            features=list(features),
            dtype="int64" if wide else "uint32",
            weighted=weighted,
            samples=0,
            positives=0,
            parts=[],
            popularity={},
            lines={},
            key=key,
            source=list(source),
            chunk=chunk,
        )
        self.samples = self.positives = self.ids = 0
        self.parts: list[tuple[str, int]] = []
        self.cursor: dict[str, Any] | None = None
        self.work = WorkFolder(path, key if resume else "")
        self._bounds = np.array([f.rows or np.iinfo(np.int64).max for f in features], dtype=np.int64)
        self._hot = np.array([f.hot if f.hot is not None else -1 for f in features], dtype=np.int64)
        self._owner = np.repeat(np.arange(len(features)), np.maximum(self._hot, 0))

    def __enter__(self) -> ClickWriter:
        with ExitStack() as stack:
            stack.enter_context(self.work)
            state = self.work.load() or {}
            state = state if "cursor" in state else {}
            sums = {
                name: FileSums(int(saved["bytes"]), list(saved["crc32"]))
                for name, saved in state.get("files", {}).items()
            }
            self._files = {
                name: GrowingFile(self.work.path / name, sums.get(name), self._index.chunk)
                for name in names.expected_bytes(self._index, 0)
            }
            for file in self._files.values():
                stack.callback(file.close)
            if state:
                self.samples, self.positives, self.ids = (state[n] for n in ("samples", "positives", "ids"))
                self.parts = [(str(name), int(samples)) for name, samples in state["parts"]]
                self.cursor = state["cursor"]
            elif self._index.jagged:
                self._files[names.OFFSETS].write(np.zeros(1, "<i8").tobytes())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def mark(self, name: str) -> None:
        """Start the part `name` (a file, a day) with the next sample."""
        self.parts.append((name, 0))

    def add(
        self,
        dense: NDArray[np.float32],
        labels: NDArray[Any],
        ids: NDArray[np.integer],
        lengths: NDArray[np.integer] | None = None,
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Append samples.

        Args:
            dense: [n, numbers].
            labels: [n], 0 or 1.
            ids: sample by sample, and in a sample feature by feature: [n, ids of a sample], or flat.
            lengths: [n, features], number of ids of each; None if no feature's number of ids varies.
            weights: shaped as `ids`, if the folder is weighted.

        Raises:
            StrettoError: an id below 0 or above its feature's rows - 1, a label that is not 0 or 1, a number
                that is not finite, more than 65535 ids of one feature in one sample.
        """
        samples = len(labels)
        flat = np.ascontiguousarray(ids).reshape(-1).astype(np.int64, copy=False)
        assert dense.shape == (samples, len(self._index.numbers)), dense.shape
        assert (weights is not None) == self._index.weighted, "weights with every id or with none"
        assert lengths is not None or not self._index.jagged, "varying features without lengths"
        if lengths is None or not self._index.jagged:
            assert len(flat) == samples * self._index.width, f"{len(flat)} ids of {samples} samples"
            bounds = np.tile(self._bounds[self._owner], samples)
        else:
            assert lengths.shape == (samples, len(self._hot))
            assert int(lengths.sum()) == len(flat)
            assert ((lengths == self._hot) | (self._hot < 0)).all(), "lengths of fixed features vary"
            bounds = np.repeat(np.tile(self._bounds, samples), lengths.reshape(-1))
        wrong = (flat < 0) | (flat >= bounds)
        if wrong.any():
            first = int(np.argmax(wrong))
            raise StrettoError(
                f"id {flat[first]}: the feature has {bounds[first]} rows", hint="ids are from 0 to rows - 1"
            )
        if not ((labels == 0) | (labels == 1)).all():
            raise StrettoError("a label is neither 0 nor 1", hint="1 is a click")
        if not np.isfinite(dense).all():
            raise StrettoError("a number is not finite", hint="transform it first")
        if lengths is not None and lengths.size and int(lengths.max()) > _LONGEST:
            raise StrettoError(
                f"{lengths.max()} ids of one feature in one sample", hint=f"at most {_LONGEST}"
            )
        self._files[names.DENSE].write(np.ascontiguousarray(dense, "<f4").data)
        self._files[names.LABELS].write(np.ascontiguousarray(labels).astype(np.uint8).data)
        self._files[names.IDS].write(flat.astype(np.dtype(self._index.dtype).newbyteorder("<")).data)
        if self._index.jagged and lengths is not None:
            ends = self.ids + np.cumsum(lengths.sum(1, dtype=np.int64))
            self._files[names.LENGTHS].write(np.ascontiguousarray(lengths).astype("<u2").data)
            self._files[names.OFFSETS].write(ends.astype("<i8").data)
        if weights is not None:
            self._files[names.WEIGHTS].write(np.ascontiguousarray(weights, "<f4").data)
        self.samples += samples
        self.positives += int(np.count_nonzero(labels))
        self.ids += len(flat)
        if not self.parts:
            self.mark("all")
        name, size = self.parts[-1]
        self.parts[-1] = name, size + samples

    def add_batch(self, batch: ClickBatch) -> None:
        """Append the samples of a batch."""
        ids, lengths, weights = by_sample(batch.ids)
        labels = batch.labels.numpy()
        self.add(batch.dense.numpy(), labels, ids, lengths if self._index.jagged else None, weights)

    def save(self, cursor: Mapping[str, Any]) -> None:
        """Make all samples durable, with the `cursor` from which a later writer resumes."""
        files = {name: file.flush() for name, file in self._files.items()}
        state = {"samples": self.samples, "positives": self.positives, "ids": self.ids, "parts": self.parts}
        sums = {name: asdict(file_sums) for name, file_sums in files.items()}
        self.work.save({**state, "files": sums, "cursor": dict(cursor)})

    def commit(
        self,
        *,
        files: Mapping[str, bytes | NDArray[Any]] | None = None,
        histograms: Mapping[str, LookupHistogram] | None = None,
        lines: Mapping[str, int] | None = None,
        held_parts: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> ClickFolder:
        """Make all samples durable and rename the folder to its target, replacing an existing click folder.

        Args:
            files: contents of transform.json and vocabulary.bin.
            histograms: lookups of each feature; by default counted on a sample of the log.
            lines, held_parts, extra: see ClickIndex.

        Raises:
            StrettoError: no samples.
        """
        if not self.samples:
            raise StrettoError("no samples: every line was blank or malformed", hint="look at the source")
        sums = {name: file.flush() for name, file in self._files.items()}
        for name, content in (files or {}).items():
            (self.work.path / name).unlink(missing_ok=True)
            with SummedFile(self.work.path / name, self._index.chunk) as file:
                file.write(content if isinstance(content, bytes) else content.tobytes())
                sums[name] = file.close()
        index = replace(
            self._index,
            samples=self.samples,
            positives=self.positives,
            parts=self.parts,
            lines=dict(lines or {"read": self.samples, "kept": self.samples, "blank": 0, "malformed": 0}),
            held_parts=held_parts,
            extra=dict(extra or {}),
            files=sums,
        )
        if histograms:
            index = replace(index, popularity=dict(histograms))
        else:
            index = replace(index, popularity=self._count_lookups(index))
        (self.work.path / names.INDEX).unlink(missing_ok=True)
        with SummedFile(self.work.path / names.INDEX) as file:
            file.write(index.to_bytes())
            file.close()
        self.work.remove_state()
        self.work.commit(lambda existing: False)
        return ClickFolder(self.work.target)

    def _count_lookups(self, index: ClickIndex) -> dict[str, LookupHistogram]:
        """Histograms from at most about `COUNTED` lookups of all features together, evenly over the log."""
        arrays = Arrays(self.work.path, index)
        ids_by_feature = list[list[NDArray[np.int64]]]([] for _ in index.features)
        samples = 0
        for run in sample_runs(self.samples, max(1, COUNTED * self.samples // max(1, self.ids))):
            batch = arrays.gather(np.arange(run.start, run.stop))
            samples += batch.samples
            for feature, ids in enumerate(batch.ids.ids.split(batch.ids.counts())):
                ids_by_feature[feature].append(ids.numpy())
        return {
            feature.name: lookup_histogram(count_ids(np.concatenate(ids)), sum(map(len, ids)) / samples)
            for feature, ids in zip(index.features, ids_by_feature, strict=True)
        }
