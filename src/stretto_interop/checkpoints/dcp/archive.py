"""What torch.save writes for a tensor or a small object, a zip of a pickle and raw values, as plain data.

The pickle refers to the values by the name of the zip's member (torch/serialization.py, torch 2.13). Members
are stored uncompressed, so that a tensor is read from its file straight into memory. torch.load would read
them too, but compares neither checksums nor a tensor's sizes with the values that are stored, and cannot read
part of a tensor in a file of many.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Container
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch
from torch import Tensor

from stretto.engine.checkpoint.files import BLOCK, DamageError, plain_file, size_text
from stretto.engine.checkpoint.plain_pickle import Name, Record, read_pickle
from stretto.engine.checkpoint.storage import as_bytes
from stretto.errors import StrettoError
from stretto_interop.checkpoints.dcp.index import Chunk, DcpIndex, Extent, StoredTensor

LARGEST_PICKLE = 1 << 20  # bytes, of one tensor's or small object's
LARGEST_FILE = 1 << 26  # of a whole file's
_TENSOR = "torch._utils._rebuild_tensor_v2"
_DICT = "collections.OrderedDict"
# the storage class that a pickle names, by dtype; types of later date have no class of their own
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_NAMES = frozenset({_TENSOR, _DICT, *_STORAGES})
_HEADER = struct.Struct("<4s22xHH")  # before a member: lengths of its name and of what else comes before it
_FAILURES = (  # what the standard library raises for a damaged zip
    zipfile.BadZipFile,
    struct.error,
    ValueError,
    LookupError,
    ArithmeticError,
    EOFError,
    OSError,
    RuntimeError,
)

T = TypeVar("T")


class Archives:
    """The archives of a checkpoint, read one at a time; files are opened when they are first needed."""

    def __init__(self, index: DcpIndex) -> None:
        self.index = index
        self._files = dict[str, BinaryIO]()
        self._intact = set[tuple[Extent, str]]()  # members whose checksums were compared

    def __enter__(self) -> Archives:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def read_object(self, name: str, names: Container[str] = frozenset()) -> Any:
        """A number, text, or container of them; where `names` may occur, tensors too, as in `read_saved`.

        Raises:
            StrettoError: it is damaged, or anything else.
        """
        return self._guarded(
            name, self.index.objects[name], lambda archive: _numbers(archive, archive.value(names))
        )

    def read_tensor(self, name: str, into: Tensor) -> None:
        """Read a tensor chunk by chunk into one of its dtype and shape; beside it at most one chunk is in
        memory.

        Raises:
            StrettoError: it is damaged.
        """
        self.read_box(name, (0,) * into.dim(), into)

    def read_box(self, name: str, offsets: tuple[int, ...], into: Tensor) -> None:
        """Read the box of a tensor that begins at `offsets` and has the shape of `into`, of its dtype. Of a
        chunk only the rows of its first dimension that the box reaches are in memory.

        Raises:
            StrettoError: it is damaged.
        """
        stored = self.index.tensors[name]
        for chunk in stored.chunks:
            starts = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(offsets, into.shape, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            target = into[tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, offsets, strict=True))]
            within = tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, chunk.offsets, strict=True))

            def read(
                archive: _Archive, chunk: Chunk = chunk, target: Tensor = target, within: Any = within
            ) -> None:
                _read_chunk(archive, stored, chunk=chunk, within=within, target=target)

            self._guarded(name, chunk.extent, read)

    def number(self, name: str, otherwise: float) -> float:
        """A number or truth value, stored as an object or as a tensor of one element; `otherwise` where there
        is none.

        Raises:
            StrettoError: it is damaged, or anything else.
        """
        value: Any = otherwise
        if name in self.index.objects:
            value = self.read_object(name)
        elif name in self.index.tensors:
            stored = self.index.tensors[name]
            if prod(stored.shape) == 1:
                tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
                self.read_tensor(name, tensor)
                value = tensor.item()
            else:
                value = stored.shape
        if type(value) not in (int, float, bool) or value != value:
            raise StrettoError(f"{name} in {self.index.folder} is no number")
        return value

    def count(self, name: str, otherwise: int) -> int:
        """A whole number that counts something, in the same way.

        Raises:
            StrettoError: it is damaged, or anything else.
        """
        value = self.number(name, otherwise)
        if not 0 <= value < 1 << 53 or value != int(value):
            raise StrettoError(f"{name} in {self.index.folder} is {value}, which counts nothing")
        return int(value)

    def _guarded(self, name: str, extent: Extent, read: Callable[[_Archive], T]) -> T:
        """Call `read` with the archive of an extent; what fails is one error that names the place."""
        try:
            if extent.file not in self._files:
                self._files[extent.file] = plain_file(self.index.folder, extent.file).open("rb")
            window = _Window(self._files[extent.file], extent.offset, extent.length)
            intact = {member for other, member in self._intact if other == extent}
            archive = _Archive(window, intact)
            value = read(archive)
            self._intact |= {(extent, member) for member in archive.intact}
            return value
        except StrettoError as error:
            problem = error.message
        except (*_FAILURES, DamageError) as error:
            problem = str(error) or type(error).__name__
        raise StrettoError(
            f"{self.index.folder / extent.file} is damaged: {name}, at byte {extent.offset}: {problem[:300]}",
            hint="copy the checkpoint again",
        )


def read_saved(path: Path, names: Container[str]) -> Any:
    """A small file of torch.save as plain data, with a number for each tensor of one element.

    Args:
        names: of classes, functions and constants that may occur: what is made with them is a `Record`.

    Raises:
        StrettoError: no such file, or it is damaged, or holds something else.
    """
    try:
        with plain_file(path.parent, path.name).open("rb") as file:
            archive = _Archive(_Window(file, 0, path.stat().st_size), set())
            return _numbers(archive, archive.value(names, LARGEST_FILE))
    except StrettoError as error:
        problem, hint = error.message, error.hint
    except (*_FAILURES, DamageError) as error:
        problem, hint = str(error) or type(error).__name__, "copy the checkpoint again"
    raise StrettoError(f"{path} cannot be read: {problem[:300]}", hint=hint)


def _numbers(archive: _Archive, value: Any) -> Any:
    """The value with a number for each tensor of one element in its containers, else a `_SavedTensor`."""
    if isinstance(value, dict):
        return {key: _numbers(archive, item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        items = [_numbers(archive, item) for item in cast("list[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Record) and value.name == _TENSOR:
        saved = _saved(value)
        if prod(saved.sizes) == 1:
            element = torch.empty(1, dtype=saved.dtype)
            archive.read(saved.member, saved.first * element.itemsize, as_bytes(element))
            return element.item()
        return saved
    return value


def _read_chunk(
    archive: _Archive, stored: StoredTensor, *, chunk: Chunk, within: tuple[slice, ...], target: Tensor
) -> None:
    """Read part of a chunk; the archive's pickle must say of it what the index says."""
    saved = _saved(archive.value(_NAMES))
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if saved.dtype != dtype or saved.sizes != chunk.sizes:
        raise DamageError(
            f"it is {saved.dtype} of shape {list(saved.sizes)}, {dtype} of {list(chunk.sizes)} in the index"
        )
    if not saved.dense:  # torch keeps the strides of what it saves
        last = sum((n - 1) * s for n, s in zip(saved.sizes, saved.strides, strict=True))
        archive.check(saved.member, (saved.first + last + 1) * dtype.itemsize)
        values = torch.empty(last + 1, dtype=dtype)
        archive.read(saved.member, saved.first * dtype.itemsize, as_bytes(values))
        target.copy_(values.as_strided(saved.sizes, saved.strides)[within])
        return
    rows, columns = within[:1], within[1:]
    first, last = (rows[0].start, rows[0].stop) if rows else (0, 1)
    sizes = (*([last - first] if rows else []), *saved.sizes[1:])
    in_place = target.is_contiguous() and tuple(target.shape) == sizes
    values = target if in_place else torch.empty(sizes, dtype=dtype)
    start = saved.first + first * prod(saved.sizes[1:])
    archive.read(saved.member, start * dtype.itemsize, as_bytes(values))
    if not in_place:
        target.copy_(values[(slice(None), *columns)])


@dataclass(frozen=True, kw_only=True)
class _SavedTensor:
    """A tensor in a pickle: a view of the values that a member of the zip holds.

    Attributes:
        first: element, and `strides` of `sizes` in elements.
    """

    member: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    @property
    def dense(self) -> bool:
        """True if the elements lie in order, without gaps."""
        inner = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != inner:
                return False
            inner *= size
        return True


def _saved(value: Any) -> _SavedTensor:
    if not isinstance(value, Record) or value.name != _TENSOR or len(value.arguments) < 4:
        raise DamageError("it is no tensor of a type that is read here")
    storage, first, sizes, strides, *_ = value.arguments
    place: Any = storage.arguments if isinstance(storage, Record) and storage.name == "" else None
    if not isinstance(place, tuple) or len(cast("tuple[Any, ...]", place)) != 5:
        raise DamageError("it has no values")
    kind, storage_class, key, *_ = cast("tuple[Any, ...]", place)
    dtype = _STORAGES.get(storage_class.text) if isinstance(storage_class, Name) else None
    if kind != "storage" or dtype is None or not isinstance(key, str):
        raise DamageError("its values are of a type that is not read here")
    for numbers in ((first,), sizes, strides):
        if not isinstance(numbers, tuple) or not all(
            type(n) is int and 0 <= n < 1 << 60 for n in cast("tuple[Any, ...]", numbers)
        ):
            raise DamageError("its sizes are no sizes")
    if len(sizes) != len(strides):
        raise DamageError("it has another number of sizes than of strides")
    return _SavedTensor(member=f"data/{key}", dtype=dtype, sizes=sizes, strides=strides, first=first)


class _Archive:
    """A zip of torch.save; all members are in one folder of any name.

    Args:
        intact: members whose checksums were compared, to which others are added.
    """

    def __init__(self, window: _Window, intact: set[str]) -> None:
        self._window, self.intact = window, intact
        self._zip = zipfile.ZipFile(io.BufferedReader(window))
        named = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
        if len(named) != 1:
            raise DamageError("it is no archive of torch.save")
        self._prefix = named[0].removesuffix("data.pkl")

    def value(self, names: Container[str], largest: int = LARGEST_PICKLE) -> Any:
        """What the pickle says."""
        if self._prefix + "byteorder" in self._zip.namelist() and self._bytes("byteorder", 16) != b"little":
            raise DamageError("it was written on a big-endian machine")
        return read_pickle(self._bytes("data.pkl", largest), names)

    def read(self, member: str, start: int, into: memoryview) -> None:
        """Read consecutive bytes of a member, whose checksum is compared once."""
        info = self.check(member, start + len(into))
        if member not in self.intact:
            complete = len(into) == info.file_size
            with self._zip.open(info) as stream:  # which compares the checksum at the end
                for position in range(0, info.file_size, BLOCK):
                    block = stream.read(BLOCK)
                    if complete:
                        into[position : position + len(block)] = block
            self.intact.add(member)
            if complete:
                return
        self._window.seek(info.header_offset)
        signature, name, extra = _HEADER.unpack(self._window.read(_HEADER.size) or b"")
        if signature != b"PK\x03\x04":
            raise DamageError(f"its {member} is not where it should be")
        self._window.seek(info.header_offset + _HEADER.size + name + extra + start)
        for position in range(0, len(into), BLOCK):
            block = into[position : position + BLOCK]
            if self._window.readinto(block) != len(block):
                raise DamageError("it ends early")

    def check(self, member: str, size: int) -> zipfile.ZipInfo:
        """Return the member, which has at least `size` bytes."""
        info = self._stored(member)
        if size > info.file_size:
            raise DamageError(f"its values reach beyond the {size_text(info.file_size)} that are stored")
        return info

    def _bytes(self, member: str, limit: int) -> bytes:
        info = self._stored(member)
        if info.file_size > limit:
            raise DamageError(
                f"its {member} has {size_text(info.file_size)}, at most {size_text(limit)} are read"
            )
        return self._zip.read(info)

    def _stored(self, member: str) -> zipfile.ZipInfo:
        info = self._zip.getinfo(self._prefix + member)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise DamageError(f"its {member} is compressed, which torch.save never does")
        if info.file_size > self._window.length:
            raise DamageError(f"its {member} should be larger than all of it")
        return info


class _Window(io.RawIOBase):
    """Consecutive bytes of an open file as a file of their own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset = file, offset
        self.length, self._at = length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view) if len(view) else 0  # pyright: ignore
        self._at += count
        return count
