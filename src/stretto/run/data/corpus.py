"""The files of a corpus, and their order.

The order is a pure function of their names relative to the source they were found under, so the
same files give the same tokens and the same splits on every machine.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TypeVar

from stretto.errors import StrettoError, nearest
from stretto.run.config.data import DataConfig, ReadOptions
from stretto.run.config.sources import (
    PYTHON_STDLIB,
    is_click_folder,
    is_url,
    megatron_prefix,
    token_folder,
)
from stretto.run.data.block_cache import block_cache
from stretto.run.data.cuts import trained_cuts
from stretto.run.data.file_format import EncodingError, is_binary, is_named_text
from stretto.run.data.part_names import Part, both_parts, parts_of
from stretto.run.data.readers import TextPiece, cut_pieces, opened, read_documents, unreadable
from stretto.run.data.remote import FileInfo, Place, RemotePath
from stretto.run.data.row_errors import RowErrors
from stretto.run.data.split import SPLITS

Source = str | os.PathLike[str]
P = TypeVar("P", Path, RemotePath)

# Installed packages are not the standard library; its tests are left out because many distributions do not
# ship them. The rest (about 11 MB) is much the same everywhere.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SNIFF = 8192
_PLAIN = ReadOptions(input_format="text")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFile:
    """One file: `name` is its path relative to its source, `version` changes with every write; a `lenient`
    one is skipped if it is not UTF-8.
    """

    path: Place
    name: str
    size: int
    version: str
    lenient: bool = False

    @property
    def top(self) -> PurePath:
        """The entry of its source that it is or lies in."""
        path, below = PurePath(str(self.path)), len(PurePath(self.name).parts) - 1
        return path.parents[below - 1] if below else path


@dataclass(kw_only=True)
class Corpus:
    """Files in corpus order.

    Attributes:
        skipped: files skipped so far: binary, or lenient and not UTF-8.
        blank: blank documents, such as empty lines of JSONL, that `pieces` has left out so far.
        errors: the rows that could not be read so far.
        splits: the files of each split in this order, if they are kept apart by their names.
    """

    files: list[CorpusFile]
    splits: dict[Part, list[CorpusFile]] = field(default_factory=dict[Part, list[CorpusFile]])
    reading: ReadOptions = field(default_factory=ReadOptions)
    skipped: int = 0
    blank: int = 0
    errors: RowErrors = field(default_factory=RowErrors)
    _skipped: set[str] = field(default_factory=set[str], repr=False)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def read(self, file: CorpusFile) -> Iterator[TextPiece]:
        """Yield the pieces of one file's documents.

        Raises:
            StrettoError: unreadable file, encoding or row.
        """
        if not file.lenient:
            yield from read_documents(file.path, file.name, self.reading, self.errors)
            return
        try:
            yield from list(read_documents(file.path, file.name, _PLAIN, self.errors))
        except EncodingError:
            if file.name not in self._skipped:
                self._skipped.add(file.name)
                self.skipped += 1

    def begin(self) -> None:
        """Reset the counts, since the files are read from the start."""
        self.blank, self.errors = 0, RowErrors(on_error=self.reading.on_error)

    def pieces(self, files: Sequence[CorpusFile] | None = None) -> Iterator[TextPiece]:
        """Yield the pieces of all documents that are not blank, in corpus order: those of some files, which
        continue the counts, or of all.
        """
        if files is None:
            self.begin()
        for file in self.files if files is None else files:
            for piece in self.read(file):
                if piece.blank:
                    self.blank += 1
                else:
                    yield piece

    def sample(self, characters: int) -> Iterator[str]:
        """Yield about `characters` of text to train a tokenizer on: the start of each file, by its size.

        Small files give at least 16 KiB each, until it is enough; the order of files is already a shuffle.
        """
        self.begin()
        left, size = characters, max(1, self.size)
        for file in self.files:
            share = min(left, max(1 << 14, characters * file.size // size))
            for piece in cut_pieces(self.read(file), trained_cuts):
                yield piece.text[:share]
                left -= len(piece.text[:share])
                share -= len(piece.text[:share])
                if share <= 0:
                    break
            if left <= 0:
                return


def find_corpus(
    sources: Source | Sequence[Source], reading: ReadOptions | None = None, *, by_name: bool = False
) -> Corpus:
    """Return the corpus of one or more sources: `python-stdlib`, files, directories or globs, here or at
    URLs.

    A directory stands for all files below it except hidden, binary and empty ones, and token folders. A file
    that is reached twice counts once.

    Args:
        by_name: keep files apart that are named as training, evaluation and test text, if some are named as
            training text and some as held-out text: by their own names, or those of the folders directly in a
            source that hold them. Others count as training text.

    Raises:
        StrettoError: a source that does not exist, an empty file, no text at all.
    """
    listed = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    corpus = Corpus(files=[], reading=reading or ReadOptions())
    files: dict[Place, CorpusFile] = {}
    for source in listed:
        for file in _expand(os.fspath(source), corpus):
            files.setdefault(file.path.resolve(), file)

    def order(file: CorpusFile) -> tuple[bytes, str, str]:
        name = file.name.encode("utf-8", "surrogateescape")
        return hashlib.blake2b(name, digest_size=16).digest(), file.name, str(file.path)

    corpus.files = sorted(files.values(), key=order)
    named = parts_of([file.top for file in corpus.files]) if by_name else []
    if both_parts(named):
        for split in SPLITS:
            corpus.splits[split] = [
                file for file, part in zip(corpus.files, named, strict=True) if (part or "train") == split
            ]
    if not corpus.size:
        source = ", ".join(str(s) for s in listed) or "(none)"
        if corpus.skipped:
            looks = "1 file looks" if corpus.skipped == 1 else f"{corpus.skipped} files look"
            raise StrettoError(
                f"data source {source} holds no text: {looks} binary",
                hint="name files of text, JSON, CSV or Parquet",
            )
        raise StrettoError(
            f"data source {source} holds no text",
            hint="name a file of text, JSON, CSV or Parquet, or a directory with such files",
        )
    return corpus


def _expand(source: str, corpus: Corpus) -> list[CorpusFile]:
    """Return the files of one source."""
    if is_url(source):
        return _at_url(RemotePath(source, block_cache(DataConfig())), corpus)
    path = Path(source).expanduser()
    if is_click_folder(path):
        raise StrettoError(
            f"{source}: a click folder, which is the data of a recommender",
            hint="name text, or train a recommender on it",
        )
    if token_folder(source) is not None or megatron_prefix(source) is not None:
        raise StrettoError(
            f"{source}: tokens already, not text", hint="name it as data.source of a config as it is"
        )
    try:
        if path.is_file():
            file = _file(path, path.name)
            if not file.size:
                raise StrettoError(f"{source}: empty file", hint="name a file that holds text")
            return [file]
        if path.is_dir():
            return _texts(_walk(path, hidden=False), path, corpus)
        if source == PYTHON_STDLIB:
            return _stdlib()
        if glob.has_magic(source):
            return _globbed(str(path), corpus)
    except OSError as error:
        raise unreadable(path, error) from None
    neighbours = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, neighbours)
    raise StrettoError(
        f"{source}: no such file or directory",
        hint=f"did you mean {path.parent / close}?"
        if close
        else f"name a file, a directory, a glob, or {PYTHON_STDLIB} for text that every machine has",
    )


def _at_url(place: RemotePath, corpus: Corpus) -> list[CorpusFile]:
    """Return the files at a URL, which may be a glob; names are relative to the part before its wildcards."""
    if not glob.has_magic(place.url) and place.is_file():
        return [_file(place, place.name)]
    root = RemotePath(re.split(r"/[^/]*[*?\[]", place.url, maxsplit=1)[0], place.cache)
    if not (files := place.below()):
        raise StrettoError(f"{place}: no such file", hint="check bucket, path and pattern")
    return _texts(files, root, corpus)


def _file(path: Place, name: str, lenient: bool = False) -> CorpusFile:
    status = path.stat()
    version = str(status.st_mtime_ns)
    if isinstance(status, FileInfo):
        version = status.version
        if not status.marked:
            print(
                f"warning: {path}: its storage does not say when it changed: tokens that were made of a file"
                " of its size before are taken for its own",
                file=sys.stderr,
                flush=True,
            )
    return CorpusFile(path=path, name=name, size=status.st_size, version=version, lenient=lenient)


def _walk(root: Path, hidden: bool, skip: Iterable[str] = ()) -> Iterator[Path]:
    """Yield all regular files below `root`, except in token folders and directories named in `skip`. Links to
    directories are followed, unless `hidden`.
    """
    skip = {*skip, "__pycache__"}

    def refuse(error: OSError) -> None:
        raise error

    visited = set[str]()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=not hidden):
        real = os.path.realpath(folder)
        if {"index.json", "tokens.bin"} <= set(names) or real in visited:  # a link may lead back
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [f for f in sorted(folders) if f not in skip and (hidden or not f.startswith("."))]
        for name in sorted(names):
            path = Path(folder, name)
            if not hidden and name.startswith("."):
                continue
            if path.is_file():
                yield path
            elif not hidden and path.is_symlink() and not path.exists():
                raise StrettoError(
                    f"{path}: a link to {path.readlink()}, which does not exist", hint="mend or remove it"
                )


def _texts(paths: Iterable[P], root: P, corpus: Corpus) -> list[CorpusFile]:
    """Return the text files among the paths; binary files are counted as skipped."""
    files: list[CorpusFile] = []
    for path in paths:
        file = _file(path, path.relative_to(root).as_posix())
        if _is_binary(path):
            corpus.skipped += 1
        elif file.size:
            files.append(file)
    return files


def _is_binary(path: Place) -> bool:
    """Return True if a file is no text by its first 8 KiB, unpacked, and its name does not promise any."""
    if path.suffix.lower() == ".parquet" or is_named_text(path.name):
        return False
    with opened(path) as file:
        head = file.read(_SNIFF)
    return not head.startswith(b"PAR1") and is_binary(head)


def _globbed(pattern: str, corpus: Corpus) -> list[CorpusFile]:
    """Return the files that match a glob (`**` too); names are relative to the part before its wildcards."""
    matches = [Path(match) for match in glob.iglob(pattern, recursive=True)]
    files = [match for match in matches if match.is_file()]
    if not files:
        raise StrettoError(
            f"{pattern}: matches no file",
            hint="it matches directories only: name them without the wildcard, or end it in /*"
            if matches
            else "quote the pattern, and check the directory before the wildcard",
        )
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return _texts(files, Path(*parts[:fixed]), corpus)


def _stdlib() -> list[CorpusFile]:
    """Return the sources of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise StrettoError(
            f"{PYTHON_STDLIB}: this Python has no source files at {root}",
            hint="name text files of your own instead",
        )
    paths = [path for path in _walk(root, hidden=True, skip=_NOT_STDLIB) if path.suffix == ".py"]
    files = [_file(path, path.relative_to(root).as_posix(), lenient=True) for path in paths]
    return [file for file in files if file.size]
