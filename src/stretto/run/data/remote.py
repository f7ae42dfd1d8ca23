"""Files at URLs, read by blocks through a cache on the local disk (`block_cache`), with `fsspec`.

A file is read as one version: its size and its mark (ETag, generation, modification time) when it was opened.
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
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")
# keys of what fsspec's file systems say about a file that distinguish its versions; the first present counts
_VERSION_KEYS = ("ETag", "etag", "generation", "md5Hash", *_TIME_KEYS)

T = TypeVar("T")


class FileInfo(NamedTuple):
    """Size and time of a file, named as by `os.stat`; its version, as far as the file system tells; and
    whether the version is more than the size.
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
        """Return itself: a URL has no links."""
        return self

    def relative_to(self, other: RemotePath) -> PurePosixPath:
        """Return the path from a folder that contains it."""
        return PurePosixPath(self.url).relative_to(PurePosixPath(other.url))

    def with_name(self, name: str) -> RemotePath:
        """Return the path in the same folder with this name."""
        return RemotePath(f"{self.url.rpartition('/')[0]}/{name}", self.cache, self.versions)

    def stat(self) -> FileInfo:
        """Return the current size, time and version of the file.

        Raises:
            StrettoError: it does not exist, or cannot be reached.
        """
        return file_info(self.call("looked up", lambda files, path: files.info(path)))

    def is_file(self) -> bool:
        """Return True if it is an existing file."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return True if files exist below it."""
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        def kind(files: Any, path: str) -> str | None:
            try:
                return files.info(path)["type"]
            except FileNotFoundError:
                return None

        return self.call("looked up", kind)

    def below(self) -> list[RemotePath]:
        """Return all files below it, or those that match it if it is a glob."""
        glob = any(c in self.url for c in "*?[")

        def names(files: Any, path: str) -> list[str]:
            listed = files.glob(path, detail=True) if glob else files.find(path, detail=True)
            return [files.unstrip_protocol(name) for name, info in listed.items() if info["type"] == "file"]

        return [RemotePath(name, self.cache, self.versions) for name in self.call("listed", names)]

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the file as a stream that bypasses the cache."""
        return self.call("opened", lambda files, path: files.open(path, mode))

    def read_bytes(self) -> bytes:
        """Return the content of the file, read through the cache."""
        file = RemoteFile(self)
        return file.read(0, file.size)

    def call(self, done: str, act: Callable[[Any, str], T]) -> T:
        """Call `act` with the file system and the path in it, again after an error that may pass.

        Raises:
            StrettoError: with the URL, what was to be `done`, and the cause.
        """
        until = time.monotonic() + _LONGEST / 2
        for pause in (*_PAUSES, None):
            try:
                protocol, _, place = self.url.partition("://")
                files = _file_system(protocol, place.partition("/")[0], os.getpid())
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
    """Return the path of the file or folder that a source names."""
    return RemotePath(name, cache) if is_url(name) else Path(name).expanduser()


class RemoteFile:
    """One version of a file at a URL, read by blocks.

    Attributes:
        size: length in bytes.
        block: bytes of a block.
    """

    def __init__(self, path: RemotePath, sums: FileSums | None = None, block: int = BLOCK) -> None:
        """Look the file up. With `sums`, one for every `block` bytes, each block is checked on arrival.

        Raises:
            StrettoError: it does not exist, or has changed since it was first opened.
        """
        self.path, self.block = path, block
        self._sums = sums
        info = path.stat()
        self.size = info.st_size
        if path.versions.setdefault(path.url, info.version) != info.version:
            raise _changed(path.url)
        identity = f"{path.url}\n{info.version}\n{block}\n{[] if sums is None else sums.crc32}"
        self._key = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self._prefetching = set[int]()

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop`."""
        numbers = self.numbers(start, stop)
        self.need(numbers)
        parts = list[bytes]()
        for number in numbers:
            span = self._bytes(number)
            inside = slice(max(start - span.start, 0), min(stop - span.start, self.block))
            data = self.path.cache.get(self._key, number, len(span), inside)
            if data is None:  # damaged, or dropped since `need`
                data = self._wait(number, _workers().submit(lambda n=number: self._fill(n)))[inside]
            parts.append(data)
        return b"".join(parts)

    def need(self, numbers: Iterable[int]) -> None:
        """Fetch the blocks that the cache lacks, several at a time.

        Raises:
            StrettoError: with the URL, the bytes and the cause.
        """
        missing = [n for n in numbers if not self.path.cache.has(self._key, n)]
        for number, future in [(n, _workers().submit(lambda n=n: self._fill(n))) for n in missing]:
            self._wait(number, future)

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Fetch bytes that will be read soon in the background; errors are raised when they are read."""

        def fill(number: int) -> None:
            try:
                self._fill(number, wait=False)
            finally:
                self._prefetching.discard(number)

        for number in self.numbers(start, stop):
            if number not in self._prefetching and not self.path.cache.touch(self._key, number):
                self._prefetching.add(number)
                _workers(ahead=True).submit(lambda n=number: fill(n))

    def numbers(self, start: int, stop: int) -> range:
        """Return the blocks that contain bytes `start` to `stop`."""
        return range(start // self.block, -(-stop // self.block)) if start < stop else range(0)

    def _bytes(self, number: int) -> range:
        return range(number * self.block, min((number + 1) * self.block, self.size))

    def _wait(self, number: int, future: Future[bytes]) -> bytes:
        try:
            return future.result(_LONGEST)
        except TimeoutError:
            raise _unreachable(self.path.url, self._action(number), f"no answer in {_LONGEST:g} s") from None

    def _action(self, number: int) -> str:
        span = self._bytes(number)
        return f"read (block {number}, bytes {span.start} to {span.stop})"

    def _fill(self, number: int, wait: bool = True) -> bytes:
        """Return the content of a block, fetched unless the cache has it; nothing if another process is
        fetching it and not `wait`.
        """
        span = self._bytes(number)

        def fetch(files: Any, path: str) -> bytes:
            data = files.cat_file(path, start=span.start, end=span.stop)
            if file_info(files.info(path)).version != self.path.versions[self.path.url]:
                raise _changed(self.path.url)
            if len(data) != len(span):
                raise OSError(f"{len(data)} bytes came")
            if self._sums is not None and zlib.crc32(data) != self._sums.crc32[number]:
                raise OSError("corrupt: its checksum is another than the folder's index says")
            return data

        fill = self.path.cache.fill
        action = self._action(number)
        return fill(self._key, number, len(span), lambda: self.path.call(action, fetch), wait=wait) or b""


_GAP = 1 << 10  # elements no further than this from one another are read together


class RemoteArray:
    """An array in a file at a URL; only the blocks with what is indexed are fetched.

    Attributes:
        dtype: type of the elements.
        remote_bytes: size of the file.
    """

    def __init__(self, file: RemoteFile, dtype: DTypeLike, start: int = 0, length: int | None = None) -> None:
        """Read `length` elements from byte `start` on; None for all up to the end."""
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
        cuts = [0, *(np.flatnonzero((steps < 0) | (steps > _GAP)) + 1).tolist(), len(flat)]
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
        self.file.need({n for run in runs for n in self.file.numbers(*self._byte_range(run.start, run.stop))})

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Fetch elements that will be read soon in the background."""
        self.file.fetch_ahead(*self._byte_range(start, min(stop, self._length)))

    def stretch_bytes(self, length: int) -> int:
        """Return the bytes of the cache that `length` neighbouring elements may take."""
        elements = self.file.block // self.dtype.itemsize
        blocks = max(0, length - 2) // elements + 2 + (self._start % self.dtype.itemsize > 0)
        return min(blocks * self.file.block, self.file.size)

    def _byte_range(self, first: int, stop: int) -> tuple[int, int]:
        """Return the bytes of elements."""
        return self._start + first * self.dtype.itemsize, self._start + stop * self.dtype.itemsize

    def _run(self, first: int, stop: int) -> NDArray[Any]:
        return np.frombuffer(self.file.read(*self._byte_range(first, stop)), dtype=self.dtype)


def mapped(
    place: Place,
    dtype: DTypeLike,
    *,
    start: int = 0,
    length: int | None = None,
    sums: FileSums | None = None,
    block: int = BLOCK,
) -> LazyArray:
    """Return the array in a file: mapped into memory, or read by blocks from a URL. Arguments as for
    `RemoteArray` and `RemoteFile`.

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
    """Return the first `length` bytes of a file, or all of a shorter one."""
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
        content = config.read_bytes() if None in (end, begin) and config.is_file() else b"{}"
        return Tokenizer.parse(str(place), place.read_bytes(), content, end=end, begin=begin)
    return Tokenizer.load(place, end=end, begin=begin)


class _Workers:
    """Threads that end with the process even while they wait, unlike those of a ThreadPoolExecutor."""

    def __init__(self, count: int) -> None:
        self._jobs = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]()
        for _ in range(count):
            threading.Thread(target=self._work, name="fetch", daemon=True).start()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Call a function in a thread."""
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
def _workers(ahead: bool = False) -> _Workers:
    """Return the threads that fetch what is waited for, or what will be read soon."""
    return _Workers(_THREADS // 2 if ahead else _THREADS)


@lru_cache
def _file_system(protocol: str, host: str, process: int) -> Any:
    """Return fsspec's file system for a protocol and a host, or bucket; one for all threads of a process."""
    del process
    if problem := protocol_problem(protocol):
        raise StrettoError(f"{protocol}://{host}: {problem[0]}", hint=problem[1])
    from fsspec.core import url_to_fs

    return url_to_fs(f"{protocol}://{host}/", use_listings_cache=False)[0]


def file_info(info: dict[str, Any]) -> FileInfo:
    """Return what fsspec's `info` says about a file."""
    mark = next((f"{name} {info[name]}" for name in _VERSION_KEYS if info.get(name) is not None), "")
    moment = next((info[name] for name in _TIME_KEYS if info.get(name) is not None), 0)
    seconds = moment.timestamp() if isinstance(moment, datetime) else moment
    changed = int(seconds * 1e9) if isinstance(seconds, int | float) else 0  # some give it as text
    return FileInfo(info["size"], changed, f"{info['size']} bytes, {mark}", bool(mark))


def _final(url: str, done: str, error: Exception) -> StrettoError | None:
    """Return the error if no further attempt can succeed, or None if the cause may pass."""
    if isinstance(error, FileNotFoundError):
        return StrettoError(f"{url}: there is no such file", hint="check bucket and path")
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
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
        hint="check the network and the storage; a run continues with --resume auto",
    )


def _cause(error: Exception) -> str:
    """Return the message of an exception, in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _changed(url: str) -> StrettoError:
    return StrettoError(
        f"{url}: has changed since it was opened; samples of both versions would be mixed",
        hint="start the run again with --resume auto once it is complete; write new data under a new name",
    )
