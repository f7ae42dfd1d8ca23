"""What torch.save writes for a tensor or a small object, a zip of a pickle and raw values, as plain data.

The pickle refers to the values by the name of the zip's member (torch/serialization.py, torch 2.13). Members
are stored uncompressed, so a tensor is read from its file straight into memory.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Container
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

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


class Archives:
    """The archives of a checkpoint, read one at a time; files are opened when they are first needed."""

    def __init__(self, index: DcpIndex) -> None:
        self.index = index
        self._files = dict[str, BinaryIO]()
        self._intact = set[tuple[Extent, str]]()  # members of which parts are read, after all was compared

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
        extent = self.index.objects[name]
        return self._guarded(name, extent, lambda archive: _numbers(archive, archive.value(names)))

    def read_from_object(self, name: str, tensor: PickledTensor, start: int, into: Tensor) -> None:
        """Read elements of a tensor in an object, in order, from number `start` on, into a flat one of its
        dtype.

        Raises:
            StrettoError: it is damaged.
        """
        extent, member = self.index.objects[name], f"data/{tensor.key}"

        def read(archive: _Archive) -> None:
            first = (tensor.first + start) * tensor.dtype.itemsize
            if tensor.dtype != into.dtype or not tensor.dense or start + len(into) > prod(tensor.sizes):
                raise DamageError(f"it has no {len(into)} elements of {into.dtype} in order")
            if first + into.nbytes > archive.size(member):
                raise DamageError("its values reach beyond what is stored")
            self._compare(archive, extent, member)
            archive.read_range(member, first, as_bytes(into))

        self._guarded(name, extent, read)

    def read_tensor(self, name: str, into: Tensor) -> None:
        """Read a tensor chunk by chunk into one of its dtype and shape; beside it at most one chunk is in
        memory.

        Raises:
            StrettoError: it is damaged.
        """
        stored = self.index.tensors[name]
        for chunk in stored.chunks:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            target = into[box]
            self._guarded(
                name,
                chunk.extent,
                lambda archive, target=target, chunk=chunk: _read_chunk(archive, stored, chunk, target),
            )

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
                if all(part == slice(0, size) for part, size in zip(within, chunk.sizes, strict=True)):
                    _read_chunk(archive, stored, chunk, target)
                else:
                    self._read_part(archive, stored, chunk=chunk, within=within, target=target)

            self._guarded(name, chunk.extent, read)

    def _read_part(
        self,
        archive: _Archive,
        stored: StoredTensor,
        *,
        chunk: Chunk,
        within: tuple[slice, ...],
        target: Tensor,
    ) -> None:
        """Read part of a chunk, after a comparison of the checksum of all of it, once."""
        saved = _agreeing(archive, stored, chunk)
        member, item = f"data/{saved.key}", saved.dtype.itemsize
        first = within[0]
        row = prod(saved.sizes[1:]) * item
        if not saved.dense or archive.size(member) < saved.first * item + row * saved.sizes[0]:
            full = torch.empty(chunk.sizes, dtype=saved.dtype)
            _read_chunk(archive, stored, chunk, full)
            target.copy_(full[within])
            return
        self._compare(archive, chunk.extent, member)
        rows = torch.empty((first.stop - first.start, *saved.sizes[1:]), dtype=saved.dtype)
        archive.read_range(member, saved.first * item + row * first.start, as_bytes(rows))
        target.copy_(rows[(slice(None), *within[1:])])

    def _compare(self, archive: _Archive, extent: Extent, member: str) -> None:
        """Compare the checksum of a member that is read in parts, once."""
        if (extent, member) not in self._intact:
            archive.compare(member)
            self._intact.add((extent, member))

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

    def _guarded(self, name: str, extent: Extent, read: Any) -> Any:
        try:
            if extent.file not in self._files:
                self._files[extent.file] = plain_file(self.index.folder, extent.file).open("rb")
            return read(_Archive(_Window(self._files[extent.file], extent.offset, extent.length)))
        except StrettoError as error:
            problem = error.message
        except (*_FAILURES, DamageError) as error:
            problem = str(error) or type(error).__name__
        raise StrettoError(
            f"{self.index.folder / extent.file} is damaged: {name}, at byte {extent.offset}: {problem[:300]}",
            hint="copy the checkpoint again",
        )


def read_saved(path: Path, names: Container[str]) -> Any:
    """A small file of torch.save as plain data; a tensor of one element is its number, others are what is
    known of them.

    Args:
        names: of classes, functions and constants that may occur: what is made with them is a `Record`.

    Raises:
        StrettoError: no such file, or it is damaged, or holds something else.
    """
    try:
        with plain_file(path.parent, path.name).open("rb") as file:
            archive = _Archive(_Window(file, 0, path.stat().st_size))
            return _numbers(archive, archive.value(names, LARGEST_FILE))
    except StrettoError as error:
        problem, hint = error.message, error.hint
    except (*_FAILURES, DamageError) as error:
        problem, hint = str(error) or type(error).__name__, "copy the checkpoint again"
    raise StrettoError(f"{path} cannot be read: {problem[:300]}", hint=hint)


def _numbers(archive: _Archive, value: Any) -> Any:
    """The value with a number for each tensor of one element in its containers, else a PickledTensor."""
    if isinstance(value, dict):
        return {key: _numbers(archive, item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        items = [_numbers(archive, item) for item in cast("list[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Record) and value.name == _TENSOR:
        saved = _saved(value)
        if prod(saved.sizes) == 1:
            size = archive.size(f"data/{saved.key}")
            values = torch.empty(size // saved.dtype.itemsize, dtype=saved.dtype)
            archive.read_into(f"data/{saved.key}", as_bytes(values))
            return values[saved.first].item()
        return saved
    return value


def _agreeing(archive: _Archive, stored: StoredTensor, chunk: Chunk) -> PickledTensor:
    """What the archive's pickle says of a chunk, which must be what the index says."""
    saved = _saved(archive.value(_NAMES))
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if saved.dtype != dtype or saved.sizes != chunk.sizes:
        raise DamageError(
            f"it is {saved.dtype} of shape {list(saved.sizes)}, {dtype} of {list(chunk.sizes)} in the index"
        )
    return saved


def _read_chunk(archive: _Archive, stored: StoredTensor, chunk: Chunk, target: Tensor) -> None:
    saved = _agreeing(archive, stored, chunk)
    dtype = saved.dtype
    size = archive.size(f"data/{saved.key}")
    last = saved.first + sum((n - 1) * s for n, s in zip(saved.sizes, saved.strides, strict=True))
    if (last + 1) * dtype.itemsize > size:
        raise DamageError(f"its values reach beyond the {size_text(size)} that are stored")
    full = saved.first == 0 and saved.dense and size == prod(saved.sizes) * dtype.itemsize
    if full and target.is_contiguous():
        archive.read_into(f"data/{saved.key}", as_bytes(target))
        return
    if size % dtype.itemsize:
        raise DamageError(f"{size_text(size)} are stored, which is no whole number of {dtype}")
    values = torch.empty(size // dtype.itemsize, dtype=dtype)
    archive.read_into(f"data/{saved.key}", as_bytes(values))
    target.copy_(values.as_strided(saved.sizes, saved.strides, saved.first))


@dataclass(frozen=True, kw_only=True)
class PickledTensor:
    """A tensor in a pickle: a view of the values that the zip's member `data/KEY` holds.

    first: element, and `strides` of `sizes` in elements.
    """

    key: str
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


def _saved(value: Any) -> PickledTensor:
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
    numbers = (first,)
    if not _whole_numbers(numbers) or not _whole_numbers(sizes) or not _whole_numbers(strides):
        raise DamageError("its sizes are no sizes")
    if len(sizes) != len(strides):
        raise DamageError("it has another number of sizes than of strides")
    return PickledTensor(key=key, dtype=dtype, sizes=sizes, strides=strides, first=first)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        type(n) is int and 0 <= n < 1 << 60 for n in cast("tuple[Any, ...]", value)
    )


class _Archive:
    """A zip of torch.save; all members are in one folder of any name."""

    def __init__(self, window: _Window) -> None:
        self._window = window
        self._zip = zipfile.ZipFile(io.BufferedReader(window))
        named = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
        if len(named) != 1:
            raise DamageError("it is no archive of torch.save")
        self._prefix = named[0].removesuffix("data.pkl")

    def value(self, names: Container[str], largest: int = LARGEST_PICKLE) -> Any:
        """What the pickle says."""
        order = f"{self._prefix}byteorder"
        if order in self._zip.namelist() and self._bytes("byteorder", 16) != b"little":
            raise DamageError("it was written on a big-endian machine")
        return read_pickle(self._bytes("data.pkl", largest), names)

    def size(self, member: str) -> int:
        """Bytes of a member."""
        return self._stored(member).file_size

    def read_into(self, member: str, view: memoryview) -> None:
        """Read a whole member into bytes of its size, and compare its checksum."""
        self._window.seek(self._begin(member))
        crc = 0
        for at in range(0, len(view), BLOCK):
            block = view[at : at + BLOCK]
            if self._window.readinto(block) != len(block):
                raise DamageError("it ends early")
            crc = zlib.crc32(block, crc)
        if crc != self._stored(member).CRC:
            raise DamageError("the checksum of its values differs")

    def compare(self, member: str) -> None:
        """Compare the checksum of a member, block by block."""
        left, crc = self.size(member), 0
        self._window.seek(self._begin(member))
        while left:
            block = self._window.read(min(BLOCK, left))
            if not block:
                raise DamageError("it ends early")
            crc, left = zlib.crc32(block, crc), left - len(block)
        if crc != self._stored(member).CRC:
            raise DamageError("the checksum of its values differs")

    def read_range(self, member: str, start: int, view: memoryview) -> None:
        """Read consecutive bytes of a member, which `compare` has looked at."""
        self._window.seek(self._begin(member) + start)
        for at in range(0, len(view), BLOCK):
            if self._window.readinto(block := view[at : at + BLOCK]) != len(block):
                raise DamageError("it ends early")

    def _begin(self, member: str) -> int:
        """Where the bytes of a member begin."""
        info = self._stored(member)
        self._window.seek(info.header_offset)
        header = self._window.read(_HEADER.size)
        signature, name, extra = _HEADER.unpack(header or b"")
        if signature != b"PK\x03\x04":
            raise DamageError(f"its {member} is not where it should be")
        return info.header_offset + _HEADER.size + name + extra

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
