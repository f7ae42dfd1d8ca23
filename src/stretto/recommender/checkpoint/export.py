"""Exports tables of a checkpoint, however they were sharded, to files that other programs can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.engine.checkpoint.files import CheckedWriter, DamageError
from stretto.engine.checkpoint.index import DTYPES
from stretto.engine.checkpoint.storage import TensorSource, as_bytes, write_tensors
from stretto.errors import StrettoError, nearest
from stretto.recommender.checkpoint.load import LOW, TableReader, read_tables, read_tensor, read_weight
from stretto.recommender.checkpoint.names import WEIGHT, SavedHash, SavedTable

CHUNK = 1 << 25  # bytes in memory at a time
IDS = "ids"
PUBLIC = 0o666  # mode before the umask: exports are meant to be shared


class Exported(NamedTuple):
    """An exported file, and the shape and dtype of the table in it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


def export_table(path: str | Path, table: str, out: str | Path, state: str | None = None) -> Exported:
    """Write the weight of a table, or one of its optimiser states, with the rows in order.

    In a .safetensors file the tensor is named `table` or `table.state`. A weight stored as two 16-bit halves
    is written as float32. A hash table needs a .safetensors file: its rows are written in arbitrary order,
    and a second tensor, `ids`, holds the id of each row.

    Args:
        path: a checkpoint.
        state: the optimiser state to export instead of the weight.
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
        raise StrettoError(f"{out} exists already", hint="name a new file")
    tables = read_tables(path)
    if table not in tables:
        names = sorted(tables)
        close = nearest(table, names)
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        hint = f"the nearest name is {close}" if close else f"it has {shown}" if names else "it has no tables"
        raise StrettoError(f"checkpoint {path} has no table {table}", hint=hint)
    saved = tables[table]
    first = saved.shards[0] if isinstance(saved, SavedHash) else saved
    if kind not in first.parts:
        states = ", ".join(first.states) or "none"
        raise StrettoError(f"table {table} has no state {kind}", hint=f"its states: {states}")
    if isinstance(saved, SavedHash) and out.suffix != ".safetensors":
        raise StrettoError(
            f"{table} is a hash table: its rows are exported with their ids", hint="a .safetensors file"
        )
    try:
        rows = open_rows(Path(path), saved, kind)
        if out.suffix == ".safetensors":
            write_rows(out, table if kind == WEIGHT else f"{table}.{kind}", rows)
        else:
            _write_npy(out, rows)
        return Exported(out, rows.shape, rows.dtype)
    except DamageError as error:
        out.unlink(missing_ok=True)
        raise StrettoError(f"checkpoint {path} is damaged: {error}", hint="use an older one") from None
    except OSError as error:
        out.unlink(missing_ok=True)
        raise StrettoError(
            f"cannot write {out}: {error.strerror}", hint="does the folder exist, and is the disk full?"
        ) from None
    except BaseException:
        out.unlink(missing_ok=True)
        raise


class StoredRows(NamedTuple):
    """The rows of a table's weight or state, in order.

    Attributes:
        ids: id of each row of a hash table, int64; None for other tables.
        blocks: reads them, a few at a time; raises DamageError.
    """

    dtype: str
    shape: tuple[int, ...]
    ids: Tensor | None
    blocks: Callable[[], Iterator[Tensor]]


def open_rows(
    folder: Path, saved: SavedTable | SavedHash, kind: str = WEIGHT, *, joined: bool = True
) -> StoredRows:
    """Return the weight or a state of a table of a checkpoint.

    Args:
        joined: a weight in two halves is their float32; otherwise the upper half, which lookups read.

    Raises:
        DamageError: the ids of a hash table do not match the index.
    """
    first = saved.shards[0] if isinstance(saved, SavedHash) else saved
    joined = joined and kind == WEIGHT and LOW in first.states
    dtype = "float32" if joined else first.dtype(kind)
    columns = () if first.per_row(kind) else (saved.dim,)
    if isinstance(saved, SavedTable):
        reader = TableReader(folder, saved)
        return StoredRows(dtype, (saved.rows, *columns), None, lambda: _read_rows(reader, kind, joined))
    ids, rows_by_shard = list[Tensor](), list[Tensor]()
    for id_map in saved.maps:
        shard_ids, rows = (read_tensor(folder, id_map[name]) for name in ("ids", "rows"))
        order = torch.argsort(rows)[int((rows < 0).sum()) :]  # ids that wait for a row have -1
        ids.append(shard_ids[order])
        rows_by_shard.append(rows[order])

    def read() -> Iterator[Tensor]:
        for table, rows in zip(saved.shards, rows_by_shard, strict=True):
            start = 0
            for block in _read_rows(TableReader(folder, table), kind, joined):
                in_block = rows[(rows >= start) & (rows < start + len(block))]
                yield block[in_block - start]
                start += len(block)

    all_ids = torch.cat(ids)
    return StoredRows(dtype, (len(all_ids), *columns), all_ids, read)


def _read_rows(reader: TableReader, kind: str, joined: bool) -> Iterator[Tensor]:
    """Yield the weight or a state of a table, a block of rows at a time."""
    table = reader.table
    size = DTYPES[table.dtype(kind)][1] * (1 if table.per_row(kind) else table.dim)
    rows = max(1, CHUNK // (4 * size))  # both halves of a split weight and the joined float32 are in memory
    for start in range(0, table.rows, rows):
        stop = min(start + rows, table.rows)
        yield read_weight(reader, start, stop) if joined else reader.rows(kind, start, stop)


def write_rows(out: Path, key: str, rows: StoredRows) -> None:
    """Write rows as a tensor of a new .safetensors file; with those of a hash table, their `ids`."""
    entries = [TensorSource(key, rows.dtype, rows.shape, rows.blocks)]
    if (ids := rows.ids) is not None:
        entries.append(TensorSource(IDS, "int64", tuple(ids.shape), lambda: ids))
    write_tensors(out, entries, {"format": "pt"}, PUBLIC)


def _write_npy(out: Path, rows: StoredRows) -> None:
    dtype, shape = rows.dtype, rows.shape
    if not hasattr(np, dtype):
        raise StrettoError(f"a .npy file has no {dtype}", hint="name a .safetensors file")
    # version 1.0 (numpy.lib.format): magic, length, a dict literal, padding
    header = f"{{'descr': {np.dtype(dtype).str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    with CheckedWriter(out, PUBLIC) as file:
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1"))
        for block in rows.blocks():
            file.write(as_bytes(block))
        file.close()
