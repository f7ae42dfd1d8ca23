"""Exports one table of a checkpoint, however it was sharded, to a file that other programs can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stretto.engine.checkpoint.files import CheckedWriter, DamageError
from stretto.engine.checkpoint.index import DTYPES
from stretto.engine.checkpoint.storage import Entry, as_bytes, write_tensors
from stretto.errors import StrettoError, nearest
from stretto.recommender.checkpoint.load import LOW, TableReader, read_tables, read_tensor, values_of
from stretto.recommender.checkpoint.names import WEIGHT, SavedHash, SavedTable

CHUNK = 1 << 25  # bytes in memory at a time
IDS = "ids"
PUBLIC = 0o666  # before the umask: exports are meant to be shared


@dataclass(frozen=True)
class Exported:
    """An exported file, and the shape and dtype of the table in it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


def export_table(path: str | Path, table: str, out: str | Path, state: str | None = None) -> Exported:
    """Write the weight of a table, or one of its optimiser states, with the rows in order. In a .safetensors
    file the tensor is named `table` or `table.state`. A weight stored as two 16-bit halves is written as
    float32.

    A hash table needs a .safetensors file: its rows are written in arbitrary order, and a second tensor,
    `ids`, holds the id of each row.

    Args:
        path: a checkpoint.
        state: the optimiser state to export; None: the weight.
        out: the file to create, .npy or .safetensors.

    Raises:
        StrettoError: the checkpoint, table or state does not exist, the checkpoint is damaged, or `out` has
            another extension, exists already or cannot be written.
    """
    out, kind = Path(out), state or WEIGHT
    if out.suffix not in (".npy", ".safetensors"):
        raise StrettoError(
            f"{out} is neither .npy nor .safetensors", hint="name a file of one of these kinds"
        )
    if out.exists():
        raise StrettoError(f"{out} is there already", hint="name a new file")
    saved = _find(path, table, kind)
    first = saved.shards[0] if isinstance(saved, SavedHash) else saved
    halves = kind == WEIGHT and LOW in first.states
    dtype = "float32" if halves else first.dtype(kind)
    wide = () if first.per_row(kind) else (saved.dim,)
    try:
        if isinstance(saved, SavedHash):
            return _export_hash(folder=Path(path), saved=saved, kind=kind, out=out, dtype=dtype, wide=wide)
        rows = _rows(TableReader(Path(path), saved), kind)
        return _write(out, table if state is None else f"{table}.{state}", dtype, (saved.rows, *wide), rows)
    except DamageError as error:
        out.unlink(missing_ok=True)
        raise StrettoError(f"checkpoint {path} is damaged: {error}", hint="use an older one") from None
    except OSError as error:
        out.unlink(missing_ok=True)
        raise StrettoError(
            f"cannot write {out}: {error.strerror}", hint="is the folder there, and not full?"
        ) from None
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def _find(path: str | Path, table: str, kind: str) -> SavedTable | SavedHash:
    tables = read_tables(path)
    if table not in tables:
        names = sorted(tables)
        near = nearest(table, names)
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        hint = f"the nearest name is {near}" if near else f"it has {some}" if names else "it has no tables"
        raise StrettoError(f"checkpoint {path} has no table {table}", hint=hint)
    saved = tables[table]
    kinds = (saved.shards[0] if isinstance(saved, SavedHash) else saved).parts
    if kind not in kinds:
        there = ", ".join(sorted(set(kinds) - {WEIGHT})) or "none"
        raise StrettoError(f"table {table} has no state {kind}", hint=f"its states: {there}")
    return saved


def _rows(reader: TableReader, kind: str) -> Iterator[Tensor]:
    table = reader.table
    size = DTYPES[table.dtype(kind)][1] * (1 if table.per_row(kind) else table.dim)
    rows = max(1, CHUNK // (4 * size))  # both halves of a split weight and the joined float32 are in memory
    for start in range(0, table.rows, rows):
        stop = min(start + rows, table.rows)
        yield values_of(reader, start, stop) if kind == WEIGHT else reader.rows(kind, start, stop)


def _write(out: Path, key: str, dtype: str, shape: tuple[int, ...], rows: Iterator[Tensor]) -> Exported:
    if out.suffix == ".safetensors":
        write_tensors(out, [Entry(key, dtype, shape, lambda: rows)], {"format": "pt"}, PUBLIC)
        return Exported(out, shape, dtype)
    if not hasattr(np, dtype):
        raise StrettoError(f"a .npy file has no {dtype}", hint="name a .safetensors file")
    with CheckedWriter(out, PUBLIC) as file:
        file.write(_npy_header(shape, dtype))
        for part in rows:
            file.write(as_bytes(part))
        file.close()
    return Exported(out, shape, dtype)


def _npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """The header of a .npy file, version 1.0 (numpy.lib.format): magic, length, a dict literal, padding."""
    text = f"{{'descr': {np.dtype(dtype).str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


def _export_hash(
    folder: Path, saved: SavedHash, kind: str, out: Path, dtype: str, wide: tuple[int, ...]
) -> Exported:
    if out.suffix != ".safetensors":
        raise StrettoError(
            f"{saved.name} is a hash table: its rows need their ids beside them", hint="a .safetensors file"
        )
    ids, wanted = list[Tensor](), list[Tensor]()
    for saved_ids in saved.maps:
        numbers, rows = (read_tensor(folder, saved_ids[name]) for name in ("ids", "rows"))
        order = torch.argsort(rows)[int((rows < 0).sum()) :]
        ids.append(numbers[order])
        wanted.append(rows[order])

    def values() -> Iterator[Tensor]:
        for table, rows in zip(saved.shards, wanted, strict=True):
            start = 0
            for part in _rows(TableReader(folder, table), kind):
                here = rows[(rows >= start) & (rows < start + len(part))]
                yield part[here - start]
                start += len(part)

    every = torch.cat(ids)
    key = saved.name if kind == WEIGHT else f"{saved.name}.{kind}"
    shape = (len(every), *wide)
    write_tensors(
        out,
        [Entry(IDS, "int64", tuple(every.shape), lambda: every), Entry(key, dtype, shape, values)],
        {"format": "pt"},
        PUBLIC,
    )
    return Exported(out, shape, dtype)
