"""The index of a checkpoint, `metadata.json`: the file of every box of every tensor.

It replaces the metadata file of torch.distributed.checkpoint, a pickle, which can run code when it is read.
The index is JSON with a fixed schema, checked completely before any tensor is allocated.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from stretto.engine.checkpoint.files import (
    DamageError,
    FileEntry,
    dump_json,
    read_json,
    safe_name,
    write_file,
)

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


def untiled(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why `boxes` do not cover every element of a tensor of `shape` exactly once; None if they do.

    They do if they are inside, pairwise disjoint, and of the same volume as the tensor. Disjointness is
    checked by a sweep along the dimension with the most cuts, in O(n log n) for regular shardings.
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"piece {_text(offsets, sizes)} has another number of dimensions"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(offsets, sizes, shape, strict=True)):
            return f"piece {_text(offsets, sizes)} lies outside"
    volume = sum(prod(sizes) for _, sizes in boxes)
    if volume != prod(shape):
        return f"pieces have {volume} elements of {prod(shape)}"
    dimensions = len(shape)
    filled = [box for box in boxes if prod(box[1])]
    if len(filled) < 2 or not dimensions:
        return None if len(filled) < 2 else "it has more than one piece"
    axis = max(range(dimensions), key=lambda d: len({offsets[d] for offsets, _ in filled}))
    active: list[tuple[int, int]] = []  # (end along axis, box)
    order = sorted(range(len(filled)), key=lambda i: filled[i][0][axis])
    for current in order:
        offsets, sizes = filled[current]
        del active[: bisect_right(active, (offsets[axis], len(filled)))]
        for _, other in active:
            sides = zip(offsets, sizes, *filled[other], strict=True)
            if all(o < p + m and p < o + n for o, n, p, m in sides):
                return f"pieces {_text(*filled[other])} and {_text(offsets, sizes)} overlap"
        insort(active, (offsets[axis] + sizes[axis], current))
    return None


def box_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the box as slices, "0:4,8:16"; empty for a scalar."""
    return ",".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes, strict=True))


def _text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    return f"[{','.join(f'{o}+{n}' for o, n in zip(offsets, sizes, strict=False))}]"


INDEX = "metadata.json"
MODEL, OPTIM = "model.", "optim."  # prefixes of the names of parameters, and of optimiser states
FORMAT = "stretto-index"
VERSION = 1
MAX_DIMENSIONS = 16
MAX_SIZE = 1 << 48  # elements along a dimension, and of a tensor

# torch dtype: (name in a safetensors header, bytes per element)
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


@dataclass(frozen=True)
class SavedPiece:
    """A box of a tensor, and its file."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the plain model as stored in a checkpoint; `dtype` is torch's name without "torch."."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]

    @property
    def bytes(self) -> int:
        """Size of the full tensor in bytes."""
        return prod(self.shape) * DTYPES[self.dtype][1]


Index = dict[str, SavedTensor]


def piece_key(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """Return the key of a piece in a shard file: the tensor's name, followed by the box if it is only a
    part.
    """
    return name if tuple(sizes) == tuple(shape) else f"{name}[{box_text(offsets, sizes)}]"


def write_index(folder: Path, index: Index) -> FileEntry:
    """Write the index; raises ValueError if the pieces do not tile their tensors."""
    files = sorted({piece.file for saved in index.values() for piece in saved.pieces})
    number = {file: i for i, file in enumerate(files)}
    tensors = {
        name: {
            "dtype": saved.dtype,
            "shape": list(saved.shape),
            "pieces": [[number[p.file], list(p.offsets), list(p.sizes)] for p in saved.pieces],
        }
        for name, saved in sorted(index.items())
    }
    for name, saved in index.items():
        if problem := untiled(saved.shape, [(p.offsets, p.sizes) for p in saved.pieces]):
            raise ValueError(f"tensor {name} of shape {list(saved.shape)}: {problem}")
    body = {"format": FORMAT, "version": VERSION, "files": files, "tensors": tensors}
    return write_file(folder / INDEX, dump_json(body))


def read_index(folder: Path, files: Mapping[str, FileEntry]) -> Index:
    """Read and check the index of a checkpoint whose manifest lists `files`; raises DamageError."""
    body = _fields(read_json(folder, INDEX), {"format", "version", "files", "tensors"}, "it")
    if body["format"] != FORMAT or body["version"] != VERSION:
        raise _bad(
            f"format is {body['format']!r} version {body['version']!r}, not {FORMAT} version {VERSION}"
        )
    names = body["files"]
    if not isinstance(names, list) or not all(isinstance(n, str) and safe_name(n) for n in names):
        raise _bad("its files are not a list of plain names")
    if unknown := [n for n in names if n not in files]:
        raise _bad(f"file {unknown[0]} is not in the manifest")
    if not isinstance(body["tensors"], dict):
        raise _bad("tensors is not an object")
    return {name: _tensor(name, value, names) for name, value in body["tensors"].items()}


def _tensor(name: str, value: Any, files: list[str]) -> SavedTensor:
    body = _fields(value, {"dtype", "shape", "pieces"}, f"tensor {name!r}")
    if not isinstance(body["dtype"], str) or body["dtype"] not in DTYPES:
        raise _bad(f"tensor {name!r} has dtype {body['dtype']!r}")
    shape = _sizes(body["shape"], name)
    if prod(shape) > MAX_SIZE:
        raise _bad(f"tensor {name!r} has {prod(shape)} elements")
    if not isinstance(body["pieces"], list):
        raise _bad(f"tensor {name!r} has no list of pieces")
    pieces = tuple(_piece(name, piece, files) for piece in body["pieces"])
    if problem := untiled(shape, [(p.offsets, p.sizes) for p in pieces]):
        raise _bad(f"tensor {name!r}: {problem}")
    return SavedTensor(body["dtype"], shape, pieces)


def _piece(name: str, value: Any, files: list[str]) -> SavedPiece:
    if not isinstance(value, list) or len(value) != 3:
        raise _bad(f"tensor {name!r} has a piece that is not [file, offsets, sizes]")
    file, offsets, sizes = value
    if type(file) is not int or not 0 <= file < len(files):
        raise _bad(f"tensor {name!r} has a piece in file number {file!r}")
    return SavedPiece(files[file], _sizes(offsets, name), _sizes(sizes, name))


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise _bad(f"tensor {name!r} has a shape that is not a short list")
    if not all(type(n) is int and 0 <= n <= MAX_SIZE for n in value):
        raise _bad(f"tensor {name!r} has {value!r} for a shape")
    return tuple(value)


def _fields(value: Any, names: set[str], owner: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != names:
        raise _bad(f"{owner} does not have exactly the fields {', '.join(sorted(names))}")
    return value


def _bad(problem: str) -> DamageError:
    return DamageError(f"file {INDEX}: {problem}")
