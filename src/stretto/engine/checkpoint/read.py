"""Read the full tensors of a checkpoint in one process, whatever layout wrote it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stretto.engine.checkpoint.files import DamageError, plain_file
from stretto.engine.checkpoint.index import DTYPES, MODEL, SavedPiece, SavedTensor, piece_key
from stretto.engine.checkpoint.load import Loaded, load, tensor_index
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError
from stretto.job.shape import ModelShape, shape_from_record


class StoredTensors:
    """Reads the tensors whose names begin with `prefix`, one at a time, by their names without the prefix.

    A tensor with a single piece is a view of the mapped file; others are assembled from their pieces.

        with StoredTensors(path) as stored:
            stored.read("embed.tok.weight")

    Attributes:
        saved: dtype, shape and pieces by name.
        meta: metadata of the checkpoint.

    Raises:
        StrettoError: the path is no checkpoint, its manifest or index is damaged, or it has no such tensors.
    """

    def __init__(self, path: str | Path, prefix: str = MODEL) -> None:
        self.path = Path(path)
        self.saved: dict[str, SavedTensor] = {
            name.removeprefix(prefix): saved
            for name, saved in tensor_index(self.path).items()
            if name.startswith(prefix)
        }
        if not self.saved:
            raise StrettoError(f"checkpoint {path} has no tensors named {prefix}...")
        self.meta = read_manifest(self.path).meta
        self._prefix = prefix
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()

    def read(self, name: str) -> Tensor:
        """Return the full tensor on the CPU, in its stored dtype; it must not be modified.

        Raises:
            StrettoError: a file of the tensor is damaged.
        """
        saved = self.saved[name]
        if len(saved.pieces) == 1:
            return self._piece(name, saved, saved.pieces[0])
        result = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        for piece in saved.pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            result[box] = self._piece(name, saved, piece)
        return result

    def _piece(self, name: str, saved: SavedTensor, piece: SavedPiece) -> Tensor:
        key = piece_key(self._prefix + name, saved.shape, piece.offsets, piece.sizes)
        try:
            if piece.file not in self._files:
                opened = safe_open(plain_file(self.path, piece.file), framework="pt")
                self._files[piece.file] = self._open.enter_context(opened)
            tensor: Tensor = self._files[piece.file].get_tensor(key)
            if tuple(tensor.shape) != piece.sizes or tensor.dtype != getattr(torch, saved.dtype):
                wanted = f"{DTYPES[saved.dtype][0]} of shape {list(piece.sizes)}"
                raise DamageError(f"{key} is not {wanted}, as in the index")
        except Exception as error:  # errors of the library, and a missing key
            raise StrettoError(
                f"checkpoint {self.path} is damaged: file {piece.file}: {error}",
                hint="use an older one: `stretto checkpoint list`",
            ) from None
        return tensor


def read_whole(path: str | Path, prefix: str = MODEL) -> tuple[dict[str, Tensor], Loaded]:
    """Return all tensors whose names begin with `prefix`, by their names without it, and the checkpoint's
    step and metadata.

    The tensors are in memory on the CPU, in their stored dtype. Every byte of the checkpoint is verified.

    Raises:
        StrettoError: the path is no checkpoint, or a damaged one, or it has no such tensors.
    """
    index = tensor_index(path)
    result = {
        name: torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        for name, saved in index.items()
        if name.startswith(prefix)
    }
    if not result:
        raise StrettoError(f"checkpoint {path} has no tensors named {prefix}...")
    places = {
        name: (tensor, ShardPlacement.unsharded(name, tuple(tensor.shape))) for name, tensor in result.items()
    }
    loaded = load(path, places, ignore=[name for name in index if name not in result])
    return {name.removeprefix(prefix): tensor for name, tensor in result.items()}, loaded


def shape_of(path: str | Path, meta: dict[str, Any]) -> ModelShape:
    """Return the shape in a checkpoint's `meta["model"]`.

    Raises:
        StrettoError: the metadata has no shape, or the model is a recommender.
    """
    sizes = meta.get("model")
    if isinstance(sizes, dict) and isinstance(tables := sizes.get("tables"), dict):
        table = next(iter(tables), "NAME")
        raise StrettoError(
            f"checkpoint {path} is of a recommender, for which other libraries have no model",
            hint=f"export each of its {len(tables)} tables to a file: stretto checkpoint export {path} "
            f"--table {table} --out {table}.npy; `stretto score` applies the model to new logs",
        )
    if isinstance(sizes, dict) and "parameters" in sizes:
        raise StrettoError(
            f"checkpoint {path} is of a model from a file, {sizes.get('family')}, which other libraries lack",
            hint="`stretto.engine.checkpoint.read.read_whole(FOLDER)[0]` returns its weights by name",
        )
    try:
        if isinstance(sizes, dict):
            return shape_from_record(sizes)
    except TypeError:
        pass
    raise StrettoError(
        f"checkpoint {path} has no model sizes in its metadata",
        hint="only this library's models can be exported; read other tensors with `read_whole`",
    )
