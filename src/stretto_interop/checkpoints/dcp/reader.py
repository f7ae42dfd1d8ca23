"""Checkpoints of torch.distributed.checkpoint (torch 2.13), read as plain data: nothing in them is run.

The index, `.metadata`, is a pickle of the classes in torch/distributed/checkpoint/metadata.py and
filesystem.py that tells which bytes of which file hold which box of which tensor. Torch reads it with an
unpickler that can run code. Here its classes are noted by name, and all that it says is checked before any
tensor is allocated.

Those bytes are an archive of torch.save, a zip of a pickle and raw values; the pickle refers to the values by
the name of the zip's member (torch/serialization.py). Members are stored uncompressed, so that a tensor is
read from its file straight into memory. torch.load would read them too, but compares neither checksums nor a
tensor's sizes with the values that are stored, and cannot read a part of a tensor in a file of many.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch
from torch import Tensor

from stretto.engine.checkpoint.files import BLOCK, DamageError, plain_file, size_text
from stretto.engine.checkpoint.index import DTYPES, MAX_DIMENSIONS, MAX_SIZE, untiled
from stretto.engine.checkpoint.plain_pickle import Name, Record, read_pickle
from stretto.engine.checkpoint.storage import as_bytes
from stretto.errors import StrettoError

METADATA = ".metadata"
LARGEST_METADATA = 1 << 30  # bytes
LONGEST_KEY = 1000  # characters of a tensor's name
_STEP = re.compile(r"step-(\d{1,18})")

_OF = "torch.distributed.checkpoint."
_INDEX, _INFO = "MetadataIndex", "_StorageInfo"
_TENSOR, _BYTES = "TensorStorageMetadata", "BytesStorageMetadata"
_CHUNK, _PROPERTIES = "ChunkStorageMetadata", "TensorProperties"
_CLASSES = ("Metadata", "StorageMeta", "_MEM_FORMAT_ENCODING", _INDEX, _CHUNK, _TENSOR, _BYTES, _PROPERTIES)
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_MCORE = "megatron.core.dist_checkpointing.strategies.torch."  # for a while, classes derived from torch's
_PATHS = ("PosixPath", "WindowsPath")  # where it was written
_GETATTR = ("builtins.getattr", "__builtin__.getattr")  # how Python 3.11 notes a member of an enumeration
NAMES = frozenset(
    {
        *(f"{_OF}metadata.{name}" for name in _CLASSES),
        *(f"{_OF}planner.{name}" for name in _PLANNER),  # what each rank wrote, which Megatron notes beside
        f"{_OF}filesystem.{_INFO}",
        f"{_OF}filesystem._StoragePrefix",
        *(f"{_MCORE}{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
        *(f"torch.{name}" for name in DTYPES),
        "torch.Size",
        "torch.serialization._get_layout",
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
        *_GETATTR,
    }
)


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a file: one archive as torch.save writes it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint. `dtype` is torch's name without "torch."; the chunks that have elements tile
    the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DcpIndex:
    """The contents of a checkpoint by their names in the saved state dict: tensors, and other objects."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Extent]


def find_folder(path: Path) -> Path:
    """Return the checkpoint at a path: the folder itself, or the newest of its folders `step-N` (torchtitan's
    names) that has an index. A checkpoint that is still being written has none.

    Raises:
        StrettoError: there is none.
    """
    if (path / METADATA).is_file():
        return path
    named = [(child, _STEP.fullmatch(child.name)) for child in (path.iterdir() if path.is_dir() else ())]
    complete = [(int(match[1]), child) for child, match in named if match and (child / METADATA).is_file()]
    if complete:
        return max(complete)[1]
    files = list(path.glob("*.safetensors")) if path.is_dir() else []
    raise StrettoError(
        f"{path} is no checkpoint of torch.distributed.checkpoint: it has no {METADATA}",
        hint="it has safetensors: import it without --format dcp"
        if files
        else "name the folder of one step, with .metadata and .distcp files, or the one that holds it",
    )


def read_dcp_index(folder: Path) -> DcpIndex:
    """Read and check the index.

    Raises:
        StrettoError: no index, a damaged one, or one that holds more than an index.
    """
    try:
        path = folder / METADATA
        if path.is_symlink() or not path.is_file():
            raise DamageError("it is no plain file")
        if (size := path.stat().st_size) > LARGEST_METADATA:
            raise DamageError(f"it has {size_text(size)}, at most {size_text(LARGEST_METADATA)} are read")
        value = read_pickle(path.read_bytes(), NAMES, LARGEST_METADATA)
        derived = isinstance(value, Record) and value.name == f"{_MCORE}MCoreMetadata"
        complete = f"{_MCORE}MCoreMetadata" if derived else f"{_OF}metadata.Metadata"
        return _index(folder, _fields(value, complete))
    except (DamageError, StrettoError) as error:
        hint = error.hint if isinstance(error, StrettoError) else "is the copy complete?"
        problem = error.message if isinstance(error, StrettoError) else str(error)
        raise StrettoError(f"{folder / METADATA} cannot be read: {problem}", hint=hint) from None


def _index(folder: Path, fields: Mapping[str, Any]) -> DcpIndex:
    entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise DamageError("it lists no tensors, or not where they are stored")
    extents = _extents(folder, cast("dict[Any, Any]", places))
    tensors, objects = dict[str, StoredTensor](), dict[str, Extent]()
    for name, entry in cast("dict[Any, Any]", entries).items():
        if not isinstance(name, str) or len(name) > LONGEST_KEY:
            raise DamageError("it lists something whose name is not a text of usual length")
        if isinstance(entry, Record) and entry.name == f"{_OF}metadata.{_BYTES}":
            if (name, None) not in extents:
                raise DamageError(f"it does not say where {name!r} is stored")
            objects[name] = extents[name, None]
        else:
            tensors[name] = _tensor(name, entry, extents)
    return DcpIndex(folder, tensors, objects)


_Extents = dict[tuple[str, tuple[int, ...] | None], Extent]


def _extents(folder: Path, places: Mapping[Any, Any]) -> _Extents:
    """Return the extent of every object and, by its offsets, of every box of a tensor."""
    sizes = dict[str, int]()
    extents = _Extents()
    for key, info in places.items():
        index, place = _fields(key, f"{_OF}metadata.{_INDEX}"), _fields(info, f"{_OF}filesystem.{_INFO}")
        name, offsets = index.get("fqn"), index.get("offset")
        if not isinstance(name, str):
            raise DamageError("it says where something is stored that has no name")
        if place.get("transform_descriptors"):
            raise DamageError("its files are compressed or encoded by an extension, which is not read here")
        file, offset, length = (place.get(field) for field in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or type(offset) is not int or type(length) is not int:
            raise DamageError(f"it does not say where {name[:LONGEST_KEY]!r} is stored")
        if file not in sizes:
            sizes[file] = plain_file(folder, file).stat().st_size
        if offset < 0 or length < 0 or offset + length > sizes[file]:
            raise DamageError(
                f"{name[:LONGEST_KEY]!r} should be bytes {offset} to {offset + length} of {file}, which has "
                f"{sizes[file]}"
            )
        at = None if offsets is None else _sizes(offsets, name)
        if extents.setdefault((name, at), extent := Extent(file, offset, length)) != extent:
            raise DamageError(f"it names two places for the same part of {name[:LONGEST_KEY]!r}")
    return extents


def _tensor(name: str, entry: Any, extents: _Extents) -> StoredTensor:
    fields = _fields(entry, f"{_OF}metadata.{_TENSOR}")
    shape, chunks = _sizes(fields.get("size"), name), fields.get("chunks")
    if prod(shape) > MAX_SIZE:
        raise DamageError(f"tensor {name!r} has {prod(shape)} elements")
    if not isinstance(chunks, list):
        raise DamageError(f"tensor {name!r} has no list of its parts")
    fields_of_chunks = [_fields(chunk, f"{_OF}metadata.{_CHUNK}") for chunk in cast("list[Any]", chunks)]
    boxes = [
        (_sizes(each.get("offsets"), name), _sizes(each.get("sizes"), name)) for each in fields_of_chunks
    ]
    boxes = list(dict.fromkeys(box for box in boxes if prod(box[1])))  # ranks without rows list empty ones
    if problem := untiled(shape, boxes):
        raise DamageError(f"tensor {name!r}: {problem}")
    for offsets, _ in boxes:
        if (name, offsets) not in extents:
            raise DamageError(f"it does not say where the part of {name!r} at {list(offsets)} is stored")
    stored = (Chunk(offsets, sizes, extents[name, offsets]) for offsets, sizes in boxes)
    return StoredTensor(_dtype(name, fields.get("properties")), shape, tuple(stored))


def _dtype(name: str, properties: Any) -> str:
    """Return the dtype from the state of a TensorProperties, a tuple that begins with it."""
    if not isinstance(properties, Record) or properties.name != f"{_OF}metadata.{_PROPERTIES}":
        raise DamageError(f"tensor {name!r} has no properties")
    state = properties.state
    first: Any = cast("tuple[Any, ...]", state)[0] if isinstance(state, tuple) and state else None
    if not isinstance(first, Name) or first.text.removeprefix("torch.") not in DTYPES:
        raise DamageError(f"tensor {name!r} has no type that is read here")
    return first.text.removeprefix("torch.")


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    """Sizes or offsets, from a torch.Size."""
    if isinstance(value, Record) and value.name == "torch.Size" and len(value.arguments) == 1:
        sizes: Any = value.arguments[0]
        if isinstance(sizes, tuple) and len(cast("tuple[Any, ...]", sizes)) <= MAX_DIMENSIONS:
            numbers = cast("tuple[Any, ...]", sizes)
            if all(type(n) is int and 0 <= n <= MAX_SIZE for n in numbers):
                return numbers
    raise DamageError(f"{name[:LONGEST_KEY]!r} has sizes or offsets that are no short list of sizes")


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of an object of a class, which a pickle has as the object's state."""
    if not isinstance(value, Record) or value.name != name or not isinstance(value.state, dict):
        raise DamageError(f"there is no {name.rpartition('.')[2]} where one is expected")
    return cast("dict[str, Any]", value.state)


# ------------------------------------------------------------------ archives of torch.save

LARGEST_PICKLE = 1 << 20  # bytes, of one tensor's or small object's
LARGEST_FILE = 1 << 26  # of a whole file's
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
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
_TENSOR_NAMES = frozenset({_REBUILD_TENSOR, _DICT, *_STORAGES})
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
        """Return an object: a number, text, or container of them; if `names` may occur, also tensors, as in
        `read_saved`.

        Raises:
            StrettoError: it is damaged, or something else.
        """
        return self._guarded(
            name, self.index.objects[name], lambda archive: _numbers(archive, archive.value(names))
        )

    def read_tensor(self, name: str, into: Tensor) -> None:
        """Read a tensor, chunk by chunk, into one of its dtype and shape, with at most one more chunk in
        memory.

        Raises:
            StrettoError: it is damaged.
        """
        self.read_box(name, (0,) * into.dim(), into)

    def read_box(self, name: str, offsets: tuple[int, ...], into: Tensor) -> None:
        """Read the box of a tensor that begins at `offsets` into a tensor of the box's shape and the tensor's
        dtype. Only the rows of a chunk that the box covers are in memory.

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
        """Return a number or truth value that is stored as an object or as a tensor of one element, or the
        default if there is none.

        Raises:
            StrettoError: it is damaged, or something else.
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
        """Return a number, in the same way, that must be a whole number of at least 0.

        Raises:
            StrettoError: it is damaged, or something else.
        """
        value = self.number(name, otherwise)
        if not 0 <= value < 1 << 53 or value != int(value):
            raise StrettoError(f"{name} in {self.index.folder} is {value}, which counts nothing")
        return int(value)

    def _guarded(self, name: str, extent: Extent, read: Callable[[_Archive], T]) -> T:
        """Call `read` with the archive at an extent; any failure is one error that names the place."""
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
    """Read a small file of torch.save as plain data; tensors of one element become numbers.

    Args:
        names: classes, functions and constants that may occur; each object made with one is a `Record`.

    Raises:
        StrettoError: the file does not exist, is damaged, or holds something else.
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
    """Return the value with a number for each tensor of one element and a `_SavedTensor` for each other."""
    if isinstance(value, dict):
        return {key: _numbers(archive, item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        items = [_numbers(archive, item) for item in cast("list[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Record) and value.name == _REBUILD_TENSOR:
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
    """Read part of a chunk, after checking that the archive's pickle agrees with the index."""
    saved = _saved(archive.value(_TENSOR_NAMES))
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
    if not isinstance(value, Record) or value.name != _REBUILD_TENSOR or len(value.arguments) < 4:
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
    """A zip of torch.save, whose members are all in one folder of any name.

    Args:
        intact: members whose checksums were compared; others are added once they are.
    """

    def __init__(self, window: _Window, intact: set[str]) -> None:
        self._window, self.intact = window, intact
        self._zip = zipfile.ZipFile(io.BufferedReader(window))
        named = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
        if len(named) != 1:
            raise DamageError("it is no archive of torch.save")
        self._prefix = named[0].removesuffix("data.pkl")

    def value(self, names: Container[str], largest: int = LARGEST_PICKLE) -> Any:
        """Return the contents of the pickle."""
        if self._prefix + "byteorder" in self._zip.namelist() and self._bytes("byteorder", 16) != b"little":
            raise DamageError("it was written on a big-endian machine")
        return read_pickle(self._bytes("data.pkl", largest), names)

    def read(self, member: str, start: int, into: memoryview) -> None:
        """Read consecutive bytes of a member; its checksum is compared the first time."""
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
        """Return the member after checking that it has at least `size` bytes."""
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
