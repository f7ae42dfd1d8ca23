"""Files at URLs, read by blocks through a cache on the local disk (`block_cache`), with `fsspec`.

A file is read as one version: its size and its mark (ETag, generation, time of change) when it was opened.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stretto.errors import StrettoError
from stretto.run.config.sources import is_url, protocol_problem
from stretto.run.data.block_cache import BlockCache
from stretto.run.data.boundaries import Boundary
from stretto.run.data.checksum import FileSums
from stretto.run.data.token_source import LazyArray
from stretto.run.data.tokenizer import TOKENIZER, TOKENIZER_CONFIG, Tokenizer
from stretto.run.data.tokenizer_files import TokenizerPath

BLOCK = 1 << 22
"""Bytes that are fetched at a time of files without checksums; of others, those under one checksum."""
_THREADS = 16  # blocks that a process fetches at a time, and as many ahead
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try
_LONGEST = 300.0  # seconds to wait for one block
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
# what tells versions of a file apart, in the facts of fsspec's file systems: the first that is there
_MARKS = ("ETag", "etag", "generation", "md5Hash", *_TIMES)

T = TypeVar("T")


class FileInfo(NamedTuple):
    """Size and time of a file, as `os.stat` names them; its version, as far as the file system tells, and
    whether that is more than the size.
    """

    st_size: int
    st_mtime_ns: int
    version: str
    marked: bool


class RemotePath:
    """A file or folder at a URL, as far as readers use `pathlib.Path`.

    The version of each file that is opened is kept with the path, and with all paths that are derived from it
    here or in other processes: a file that has changed since is an error.
    """

    def __init__(self, url: str, cache: BlockCache, versions: dict[str, str] | None = None) -> None:
        self.url, self.cache = url.rstrip("/"), cache
        self.versions = dict[str, str]() if versions is None else versions

    def __reduce__(self) -> tuple[object, ...]:
        return RemotePath, (self.url, self.cache, self.versions)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self.cache, self.versions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot."""
        return PurePosixPath(self.name).suffix

    @property
    def suffixes(self) -> list[str]:
        """All ends of the name that begin with a dot."""
        return PurePosixPath(self.name).suffixes

    def resolve(self) -> RemotePath:
        """Itself: a URL has no links."""
        return self

    def relative_to(self, other: RemotePath) -> PurePosixPath:
        """The path from a folder that it is in."""
        return PurePosixPath(self.url).relative_to(PurePosixPath(other.url))

    def with_name(self, name: str) -> RemotePath:
        """The path beside it of this name."""
        return RemotePath(f"{self.url.rpartition('/')[0]}/{name}", self.cache, self.versions)

    def stat(self) -> FileInfo:
        """What is known of the file now.

        Raises:
            StrettoError: there is none, or it cannot be reached.
        """
        return file_info(self.call("looked up", lambda files, path: files.info(path)))

    def is_file(self) -> bool:
        """Whether there is a file."""
        return self.call("looked up", _kind) == "file"

    def is_dir(self) -> bool:
        """Whether there is something below it."""
        return self.call("looked up", _kind) == "directory"

    def below(self) -> list[RemotePath]:
        """All files below it, or that match it where it is a glob."""
        glob = any(c in self.url for c in "*?[")

        def names(files: Any, path: str) -> list[str]:
            listed = files.glob(path, detail=True) if glob else files.find(path, detail=True)
            return [files.unstrip_protocol(n) for n, facts in listed.items() if facts["type"] == "file"]

        return [RemotePath(name, self.cache, self.versions) for name in self.call("listed", names)]

    def open(self, mode: str = "rb") -> IO[bytes]:
        """The file as a stream, past the cache."""
        return self.call("opened", lambda files, path: files.open(path, mode))

    def read_bytes(self) -> bytes:
        """The whole file, by the cache."""
        file = RemoteFile(self)
        return file.read(0, file.size)

    def call(self, done: str, act: Callable[[Any, str], T]) -> T:
        """What `act` returns of the file system and the path in it, tried again where it may help.

        Raises:
            StrettoError: says the URL, what was to be `done`, and why it could not.
        """
        until = time.monotonic() + _LONGEST / 2
        for pause in (*_PAUSES, None):
            try:
                files = _files(self.url.partition("://")[0], _host(self.url), os.getpid())
                return act(files, files._strip_protocol(self.url))
            except StrettoError:
                raise
            except Exception as error:  # file systems raise what their libraries do
                problem = _final(self.url, done, error)
                if problem is not None or pause is None or time.monotonic() + pause > until:
                    raise problem or _unreachable(self.url, done, error) from None
            time.sleep(pause)
        raise AssertionError


Place = Path | RemotePath


def place_of(name: str, cache: BlockCache) -> Place:
    """The file or folder that a source names."""
    return RemotePath(name, cache) if is_url(name) else Path(name).expanduser()


class RemoteFile:
    """One version of a file at a URL, read by blocks.

    Attributes:
        size: bytes.
        block: bytes of a block.
    """

    def __init__(self, path: RemotePath, sums: FileSums | None = None, block: int = BLOCK) -> None:
        """Look the file up. With `sums`, those of every `block` bytes, each block is checked as it comes.

        Raises:
            StrettoError: there is none, or it has changed since it was opened first.
        """
        self.path, self.block = path, block
        self._sums = sums
        facts = path.stat()
        self.size = facts.st_size
        if path.versions.setdefault(path.url, facts.version) != facts.version:
            raise _changed(path.url)
        facts_text = f"{path.url}\n{facts.version}\n{block}\n{[] if sums is None else sums.crc32}"
        self._key = hashlib.blake2b(facts_text.encode(), digest_size=16).hexdigest()
        self._coming = set[int]()  # blocks that were asked for ahead

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`."""
        numbers = self.numbers(start, stop)
        self.need(numbers)
        parts = list[bytes]()
        for number in numbers:
            before = number * self.block
            parts.append(self._read(number, max(start - before, 0), min(stop - before, self.block)))
        return b"".join(parts)

    def need(self, numbers: Iterable[int]) -> None:
        """Fetch those of these blocks that the cache lacks, several at a time.

        Raises:
            StrettoError: names the URL, the bytes and the reason.
        """
        missing = [n for n in numbers if not self.path.cache.has(self._key, n)]
        for number, future in [(n, _now().submit(lambda n=n: self._fill(n))) for n in missing]:
            self._wait(number, future)

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Have bytes that will be read soon fetched meanwhile; what goes wrong is told when they are read."""
        for number in self.numbers(start, stop):
            if number not in self._coming and not self.path.cache.wanted(self._key, number):
                self._coming.add(number)
                _ahead().submit(lambda n=number: self._fill_ahead(n))

    def numbers(self, start: int, stop: int) -> range:
        """The blocks with bytes `start` to `stop`."""
        return range(start // self.block, -(-stop // self.block)) if start < stop else range(0)

    def _bytes(self, number: int) -> range:
        return range(number * self.block, min((number + 1) * self.block, self.size))

    def _read(self, number: int, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a block."""
        size = len(self._bytes(number))
        data = self.path.cache.get(self._key, number, size, slice(start, stop))
        if data is None:  # damaged, or dropped since `need`
            data = self._wait(number, _now().submit(lambda: self._fill(number)))[start:stop]
        return data

    def _wait(self, number: int, future: Future[bytes]) -> bytes:
        try:
            return future.result(_LONGEST)
        except TimeoutError:
            raise _unreachable(self.path.url, self._doing(number), f"no answer in {_LONGEST:g} s") from None

    def _doing(self, number: int) -> str:
        part = self._bytes(number)
        return f"read (block {number}, bytes {part.start} to {part.stop})"

    def _fill(self, number: int) -> bytes:
        size = len(self._bytes(number))
        data = self.path.cache.fill(self._key, number, size, lambda: self._fetch(number))
        assert data is not None
        return data

    def _fill_ahead(self, number: int) -> None:
        size = len(self._bytes(number))
        try:
            self.path.cache.fill(self._key, number, size, lambda: self._fetch(number), wait=False)
        finally:
            self._coming.discard(number)

    def _fetch(self, number: int) -> bytes:
        part = self._bytes(number)

        def act(files: Any, path: str) -> bytes:
            data = files.cat_file(path, start=part.start, end=part.stop)
            if file_info(files.info(path)).version != self.path.versions[self.path.url]:
                raise _changed(self.path.url)
            if len(data) != len(part):
                raise OSError(f"{len(data)} bytes came")
            if self._sums is not None and zlib.crc32(data) != self._sums.crc32[number]:
                raise OSError("corrupt: its checksum is another than the folder's index says")
            return data

        return self.path.call(self._doing(number), act)


_NEAR = 1 << 10  # elements so close to one another are read together


class RemoteArray:
    """An array in a file at a URL; only the blocks with what is indexed are fetched.

    Attributes:
        dtype: of the elements.
        remote_bytes: of the file.
    """

    def __init__(self, file: RemoteFile, dtype: DTypeLike, start: int = 0, length: int | None = None) -> None:
        """`length` elements from byte `start` on; None: to the end."""
        self.file, self.dtype = file, np.dtype(dtype)
        self._start = start
        self._length = (file.size - start) // self.dtype.itemsize if length is None else length
        self.remote_bytes = file.size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            first, stop, step = key.indices(self._length)
            assert step == 1, "only runs are read"
            return self._run(first, max(first, stop))
        indices = np.asarray(key, dtype=np.int64)
        flat = np.where(indices < 0, indices + self._length, indices).ravel()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self._length:
            raise IndexError(f"{key} of {self._length}")
        steps = np.diff(flat)
        cuts = [0, *(np.flatnonzero((steps < 0) | (steps > _NEAR)) + 1).tolist(), len(flat)]
        parts = [flat[a:b] for a, b in pairwise(cuts) if a < b]
        runs = [range(int(part[0]), int(part[-1]) + 1) for part in parts]
        self.need(runs)
        pieces = [
            self._run(run.start, run.stop)[part - run.start] for part, run in zip(parts, runs, strict=True)
        ]
        values = np.concatenate([np.empty(0, dtype=self.dtype), *pieces])
        return values.reshape(indices.shape) if indices.ndim else int(values[0])

    def need(self, runs: Sequence[range]) -> None:
        """Fetch what the cache lacks of runs of elements that are read next, several blocks at a time."""
        self.file.need({n for run in runs for n in self.file.numbers(*self._where(run.start, run.stop))})

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Have elements that will be read soon fetched meanwhile."""
        self.file.fetch_ahead(*self._where(start, min(stop, self._length)))

    def stretch_bytes(self, length: int) -> int:
        """Bytes in the cache that `length` neighbouring elements may take."""
        apart = self.file.block // self.dtype.itemsize
        blocks = max(0, length - 2) // apart + 2 + (self._start % self.dtype.itemsize > 0)
        return min(blocks * self.file.block, self.file.size)

    def _where(self, first: int, stop: int) -> tuple[int, int]:
        """The bytes of elements."""
        return self._start + first * self.dtype.itemsize, self._start + stop * self.dtype.itemsize

    def _run(self, first: int, stop: int) -> NDArray[Any]:
        return np.frombuffer(self.file.read(*self._where(first, stop)), dtype=self.dtype)


def mapped(
    place: Place,
    dtype: DTypeLike,
    *,
    start: int = 0,
    length: int | None = None,
    sums: FileSums | None = None,
    block: int = BLOCK,
) -> LazyArray:
    """The array in a file: mapped into memory, or read by blocks from a URL; arguments as of `RemoteArray`
    and `RemoteFile`.

    Raises:
        OSError, ValueError: the file cannot be mapped.
        StrettoError: it cannot be reached.
    """
    if isinstance(place, RemotePath):
        return RemoteArray(RemoteFile(place, sums, block), dtype, start, length)
    shape = None if length is None else (length,)
    # a plain array over the map: memmap's own class makes every slice slower
    return np.memmap(place, dtype=np.dtype(dtype), mode="r", offset=start, shape=shape).view(np.ndarray)


def read_head(place: Place, length: int) -> bytes:
    """The first `length` bytes of a file, or all of a shorter one."""
    if isinstance(place, RemotePath):
        file = RemoteFile(place)
        return file.read(0, min(length, file.size))
    with place.open("rb") as file:
        return file.read(length)


def load_tokenizer(
    place: TokenizerPath | RemotePath, end: Boundary | None = None, begin: Boundary | None = None
) -> Tokenizer:
    """Load a tokenizer from a file, or from a `tokenizer.json` at a URL, like `Tokenizer.load`."""
    if isinstance(place, RemotePath):
        config = place.with_name(place.name.replace(TOKENIZER, TOKENIZER_CONFIG))
        # a token folder's index has both
        said = config.read_bytes() if None in (end, begin) and config.is_file() else b"{}"
        return Tokenizer.parse(str(place), place.read_bytes(), said, end=end, begin=begin)
    return Tokenizer.load(place, end=end, begin=begin)


class _Workers:
    """Threads that end with the process, whatever they wait for."""

    def __init__(self, count: int) -> None:
        self._jobs = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        for _ in range(count):
            threading.Thread(target=self._work, name="fetch", daemon=True).start()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Have a thread call it."""
        future = Future[T]()
        self._jobs.put((act, future))
        return future

    def _work(self) -> None:
        while True:
            act, future = self._jobs.get()
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)


@cache
def _now() -> _Workers:
    """Those that fetch what is waited for."""
    return _Workers(_THREADS)


@cache
def _ahead() -> _Workers:
    """Those that fetch ahead."""
    return _Workers(_THREADS // 2)


@lru_cache
def _files(protocol: str, host: str, process: int) -> Any:
    """The file system of fsspec of a protocol and a host, or bucket; one for all threads of a process."""
    del process
    if problem := protocol_problem(protocol):
        raise StrettoError(f"{protocol}://{host}: {problem[0]}", hint=problem[1])
    from fsspec.core import url_to_fs

    return url_to_fs(f"{protocol}://{host}/", use_listings_cache=False)[0]


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _kind(files: Any, path: str) -> str | None:
    """What lies at a path: "file", "directory" or nothing."""
    try:
        return files.info(path)["type"]
    except FileNotFoundError:
        return None


def file_info(info: dict[str, Any]) -> FileInfo:
    mark = next((f"{name} {info[name]}" for name in _MARKS if info.get(name) is not None), "")
    moment = next((info[name] for name in _TIMES if info.get(name) is not None), 0)
    seconds = moment.timestamp() if isinstance(moment, datetime) else moment
    changed = int(seconds * 1e9) if isinstance(seconds, int | float) else 0  # some give it as text
    return FileInfo(info["size"], changed, f"{info['size']} bytes, {mark}", bool(mark))


def _final(url: str, done: str, error: Exception) -> StrettoError | None:
    """The error for what no further try mends; None for what may be passing."""
    why = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return StrettoError(f"{url}: there is no such file", hint="check bucket and path")
    if isinstance(error, PermissionError) or "Credential" in why:
        return StrettoError(
            f"{url}: cannot be {done}: no permission ({_cause(error)})",
            hint="give this process credentials that may read it: fsspec's file systems find them where the"
            " storage's own tools do, and take options from ~/.config/fsspec/*.json",
        )
    if isinstance(error, ImportError | ValueError | NotImplementedError | IsADirectoryError):
        return StrettoError(f"{url}: cannot be {done}: {_cause(error)}", hint="check the URL")
    return None


def _unreachable(url: str, done: str, error: Exception | str) -> StrettoError:
    return StrettoError(
        f"{url}: cannot be {done}: {error if isinstance(error, str) else _cause(error)}",
        hint="check the network and the storage; a run goes on with --resume auto",
    )


def _cause(error: Exception) -> str:
    """What an exception says, in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _changed(url: str) -> StrettoError:
    return StrettoError(
        f"{url}: has changed since it was opened; samples of both versions would be mixed",
        hint="start the run again with --resume auto once it is complete; write new data under a new name",
    )
