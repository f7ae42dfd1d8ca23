"""The index of a checkpoint of torch.distributed.checkpoint, `.metadata`: which bytes of which file hold
which box of which tensor.

It is a pickle of the classes in torch/distributed/checkpoint/metadata.py and filesystem.py (torch 2.13). None
of them is imported here: what the pickle says of them is read as plain data, and checked completely before
any tensor is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from stretto.engine.checkpoint.files import DamageError, plain_file, size_text
from stretto.engine.checkpoint.index import DTYPES, MAX_DIMENSIONS, MAX_SIZE, untiled
from stretto.engine.checkpoint.plain_pickle import Name, Record, read_pickle
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
    """A tensor; `dtype` is torch's name without "torch.". The chunks with elements tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DcpIndex:
    """What a checkpoint holds, by the names in the state dict that was saved: tensors, and other objects."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Extent]


def find_folder(path: Path) -> Path:
    """The checkpoint at a path: the folder itself, or the newest of its folders `step-N`, as torchtitan
    names them, that has an index. One that was still being written has none.

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
    except DamageError as error:
        raise _wrong(folder, str(error), "is the copy complete?") from None
    except StrettoError as error:
        raise _wrong(folder, error.message, error.hint) from None


def _wrong(folder: Path, problem: str, hint: str | None) -> StrettoError:
    return StrettoError(f"{folder / METADATA} cannot be read: {problem}", hint=hint)


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
    """Where everything is stored, by name and, for boxes of tensors, offsets."""
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
    boxes = [_box(name, chunk) for chunk in cast("list[Any]", chunks)]
    boxes = list(dict.fromkeys(box for box in boxes if prod(box[1])))  # ranks without rows list empty ones
    if problem := untiled(shape, boxes):
        raise DamageError(f"tensor {name!r}: {problem}")
    for offsets, _ in boxes:
        if (name, offsets) not in extents:
            raise DamageError(f"it does not say where the part of {name!r} at {list(offsets)} is stored")
    stored = (Chunk(offsets, sizes, extents[name, offsets]) for offsets, sizes in boxes)
    return StoredTensor(_dtype(name, fields.get("properties")), shape, tuple(stored))


def _box(name: str, chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    fields = _fields(chunk, f"{_OF}metadata.{_CHUNK}")
    return _sizes(fields.get("offsets"), name), _sizes(fields.get("sizes"), name)


def _dtype(name: str, properties: Any) -> str:
    """From the state of TensorProperties, a tuple that begins with the dtype."""
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
    """The fields of an object of a class, which pickles note as its state."""
    if not isinstance(value, Record) or value.name != name or not isinstance(value.state, dict):
        raise DamageError(f"there is no {name.rpartition('.')[2]} where one is expected")
    return cast("dict[str, Any]", value.state)
