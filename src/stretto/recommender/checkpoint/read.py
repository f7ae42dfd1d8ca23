"""Reads any rows and columns of a table from a checkpoint, however the table was split when saved."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stretto.engine.checkpoint.files import DamageError, plain_file
from stretto.engine.checkpoint.index import DTYPES, SavedPiece, piece_key
from stretto.recommender.checkpoint.names import Named, SavedTable


@dataclass(frozen=True)
class Part:
    """Rows residue, residue + modulus, ... of a table, and its columns [first, last); None: all."""

    residue: int = 0
    modulus: int = 1
    columns: tuple[int, int] | None = None


class TableReader:
    """Reads one table. Files are mapped for the time of a call, so memory is that of what is returned, and
    of what lies between it.
    """

    def __init__(self, folder: Path, table: SavedTable) -> None:
        self.folder, self.table = folder, table

    def spread(self, modulus: int) -> int:
        """Rows that are gone over for each one that is kept, when every `modulus`-th is wanted."""
        return modulus // gcd(modulus, self.table.modulus)

    def rows(self, kind: str, start: int, stop: int, part: Part | None = None) -> Tensor:
        """Rows [start, stop) of a part of the table, counted in the part: [rows, columns], or [rows] of a
        state that is one number a row.

        Args:
            kind: `weight` or a state.
            part: None: the whole table.

        Raises:
            DamageError: a file is not what the index says.
        """
        part = part or Part()
        columns = part.columns or (0, self.table.dim)
        wide = () if self.table.per_row(kind) else (columns[1] - columns[0],)
        block = torch.empty(stop - start, *wide, dtype=getattr(torch, self.table.dtype(kind)))
        # rows that one saved part has follow each other at `step`, and in the saved part at `stride`
        stride = self.spread(part.modulus)
        step = self.table.modulus * stride // part.modulus
        for first in range(start, min(start + step, stop)):
            at, residue = divmod(part.residue + first * part.modulus, self.table.modulus)
            named = self.table.parts[kind][residue]
            for piece in named.saved.pieces:
                target = block[first - start :: step]
                self._copy(target=target, named=named, piece=piece, at=at, stride=stride, columns=columns)
        return block

    def _copy(
        self,
        target: Tensor,
        named: Named,
        piece: SavedPiece,
        at: int,
        stride: int,
        columns: tuple[int, int],
    ) -> None:
        """Copy to `target` [n, columns] what a piece has of rows at, at + stride, ... of a saved tensor."""
        begin, size = piece.offsets[0], piece.sizes[0]
        low = max(0, -(-(begin - at) // stride))
        high = min(len(target), -(-(begin + size - at) // stride))
        if low >= high:
            return
        rows = slice(at + low * stride - begin, at + (high - 1) * stride + 1 - begin)
        if len(named.saved.shape) == 1:
            target[low:high] = read_box(self.folder, named, piece, (rows,))[::stride]
            return
        first = piece.offsets[1]
        left, right = max(columns[0], first), min(columns[1], first + piece.sizes[1])
        if left < right:
            box = rows, slice(left - first, right - first)
            part = target[low:high, left - columns[0] : right - columns[0]]
            part.copy_(read_box(self.folder, named, piece, box)[::stride])


def read_tensor(folder: Path, named: Named) -> Tensor:
    """All of a tensor that is one-dimensional; raises DamageError."""
    tensor = torch.empty(named.saved.shape, dtype=getattr(torch, named.saved.dtype))
    for piece in named.saved.pieces:
        start, size = piece.offsets[0], piece.sizes[0]
        tensor[start : start + size] = read_box(folder, named, piece, (slice(0, size),))
    return tensor


def read_box(folder: Path, named: Named, piece: SavedPiece, box: tuple[slice, ...]) -> Tensor:
    """A box of a piece; raises DamageError."""
    key = piece_key(named.name, named.saved.shape, piece.offsets, piece.sizes)
    try:
        with safe_open(plain_file(folder, piece.file), framework="pt") as file:
            view: Any = file.get_slice(key)
            if tuple(view.get_shape()) != piece.sizes or view.get_dtype() != DTYPES[named.saved.dtype][0]:
                raise DamageError(
                    f"{key} is not the {named.saved.dtype} of shape {list(piece.sizes)} that it should be"
                )
            return view[box]
    except DamageError:
        raise
    except Exception as error:  # the library's own kinds, and those of the system
        raise DamageError(f"file {piece.file}: {error}") from None
