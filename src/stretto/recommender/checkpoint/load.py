"""Loads tables from a checkpoint into shards, whatever placement and number of ranks they were saved with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from stretto.engine.checkpoint.files import DamageError, plain_file
from stretto.engine.checkpoint.index import DTYPES, SavedPiece, piece_key
from stretto.engine.checkpoint.load import tensor_index, verify
from stretto.engine.parallel.control import gather_json, run_on_all
from stretto.errors import StrettoError, nearest
from stretto.recommender.checkpoint.names import (
    WEIGHT,
    NamedTensor,
    SavedHash,
    SavedTable,
    find_table,
    saved_tables,
)
from stretto.recommender.optim.rules import join_halves
from stretto.recommender.placement import TableSpec
from stretto.recommender.stores.store import GrowingStore
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.pools import LocalShard


class ShardSlice(NamedTuple):
    """Rows residue, residue + modulus, ... of a table, and columns [first, last), by default all."""

    residue: int = 0
    modulus: int = 1
    columns: tuple[int, int] | None = None


class TableReader:
    """Reads one table. Files are mapped only during a call: memory is bounded by the returned rows and the
    skipped rows between them."""

    def __init__(self, folder: Path, table: SavedTable) -> None:
        self.folder, self.table = folder, table

    def read_ratio(self, modulus: int) -> int:
        """Rows read from files for each returned row, if every `modulus`-th row is returned."""
        return modulus // gcd(modulus, self.table.modulus)

    def rows(self, kind: str, start: int, stop: int, part: ShardSlice | None = None) -> Tensor:
        """Read rows [start, stop) of a part of the table, indexed within the part.

        Args:
            kind: `weight` or the name of a state.
            part: by default the entire table.

        Returns:
            [rows, columns], or [rows] for a per-row state.

        Raises:
            DamageError: a file does not match the index.
        """
        part = part or ShardSlice()
        columns = part.columns or (0, self.table.dim)
        shape = () if self.table.per_row(kind) else (columns[1] - columns[0],)
        block = torch.empty(stop - start, *shape, dtype=getattr(torch, self.table.dtype(kind)))
        # rows from the same saved part are `step` apart in the block and `stride` apart in the saved part
        stride = self.read_ratio(part.modulus)
        step = self.table.modulus * stride // part.modulus
        for first in range(start, min(start + step, stop)):
            row, residue = divmod(part.residue + first * part.modulus, self.table.modulus)
            named = self.table.parts[kind][residue]
            for piece in named.saved.pieces:
                # rows row, row + stride, ... of the saved tensor, as far as they are in the piece
                target = block[first - start :: step]
                begin, size = piece.offsets[0], piece.sizes[0]
                low = max(0, -(-(begin - row) // stride))
                high = min(len(target), -(-(begin + size - row) // stride))
                if low >= high:
                    continue
                rows = slice(row + low * stride - begin, row + (high - 1) * stride + 1 - begin)
                if len(named.saved.shape) == 1:
                    target[low:high] = read_box(self.folder, named, piece, (rows,))[::stride]
                    continue
                offset = piece.offsets[1]
                column, end = max(columns[0], offset), min(columns[1], offset + piece.sizes[1])
                if column < end:
                    box = rows, slice(column - offset, end - offset)
                    values = read_box(self.folder, named, piece, box)[::stride]
                    target[low:high, column - columns[0] : end - columns[0]] = values
        return block


def read_tensor(folder: Path, named: NamedTensor) -> Tensor:
    """Read a one-dimensional tensor. Raises DamageError."""
    tensor = torch.empty(named.saved.shape, dtype=getattr(torch, named.saved.dtype))
    for piece in named.saved.pieces:
        start, size = piece.offsets[0], piece.sizes[0]
        tensor[start : start + size] = read_box(folder, named, piece, (slice(0, size),))
    return tensor


def read_box(folder: Path, named: NamedTensor, piece: SavedPiece, box: tuple[slice, ...]) -> Tensor:
    """Read a box of a piece. Raises DamageError."""
    key = piece_key(named.name, named.saved.shape, piece.offsets, piece.sizes)
    try:
        with safe_open(plain_file(folder, piece.file), framework="pt") as file:
            view: Any = file.get_slice(key)
            if tuple(view.get_shape()) != piece.sizes or view.get_dtype() != DTYPES[named.saved.dtype][0]:
                raise DamageError(f"{key} is not of type {named.saved.dtype} and shape {list(piece.sizes)}")
            return view[box]
    except DamageError:
        raise
    except Exception as error:  # errors of safetensors and of the operating system
        raise DamageError(f"file {piece.file}: {error}") from None


ID_CHUNK = 1 << 16  # saved rows in memory at a time


def restore(
    ids: HashIds,
    store: GrowingStore,
    state: Mapping[str, Tensor],
    read: Callable[[int, int], Mapping[str, Tensor]],
    part: int = 0,
    parts: int = 1,
) -> None:
    """Add ids and rows of one saved shard to the part of the table that owns them.

    The table may have been saved with a different number of parts.

    Args:
        ids, store: the part's.
        state: the saved shard's id map, as `HashIds.state` returned it.
        read: returns saved rows [start, stop), with the columns of `store`: `weight`, and states by name.
            Missing states become zeros.
        part, parts: index of the part, and number of parts.

    Raises:
        StrettoError: `state` is not a valid id map, or one of its ids is already present.
    """
    mapping = ids.load_state(state, part, parts)
    store.grow(ids.extent)
    old, order = torch.sort(mapping.old)
    new = mapping.new[order]
    first = 0
    while first < len(old):  # chunks without rows of this part are not read
        start = int(old[first])
        last = int(torch.searchsorted(old, start + ID_CHUNK))
        values = read(start, int(old[last - 1]) + 1)
        rows = old[first:last] - start
        store.set(new[first:last], {name: value.to(rows.device)[rows] for name, value in values.items()})
        first = last


CHUNK = 1 << 25  # bytes of a shard in memory at a time
LOW = "low"  # the state with the low half of a float32, whose high half is the weight
_OLDER = "use an older one: `stretto checkpoint list`"

Encode = Callable[[Tensor], Mapping[str, Tensor]]


def load_tables(
    path: str | Path,
    shards: Sequence[LocalShard],
    tables: Sequence[TableSpec],
    *,
    states: bool = True,
    encode: Encode | None = None,
    check: bool = True,
    chunk: int = CHUNK,
) -> None:
    """Load this rank's table shards from a checkpoint.

    Collective: every rank passes all of its shards. All other tensors are loaded by `engine.checkpoint.load`
    with `ignore=[TABLES]`.

    Args:
        path: a checkpoint.
        tables: the stored tables (`physical_tables`), in any order.
        states: load the optimiser states too; otherwise they are set to zero.
        encode: used without `states`; converts values to the optimiser's storage: `weight`, and states that
            hold part of it. By default the values are the weight.
        check: verify sizes and checksums of all files first.
        chunk: bytes in memory at a time.

    Raises:
        StrettoError: the checkpoint does not exist, is damaged, or has other tables or optimiser states.
            Raised on all ranks, before any shard is written.
        CollectiveError: reading failed half-way; the contents of the shards are then undefined.
    """
    folder = Path(path)
    if check and (problems := verify(folder)):
        raise StrettoError(f"checkpoint {folder} is damaged: {'; '.join(problems[:3])}", hint=_OLDER)

    def read_index() -> dict[str, SavedTable | SavedHash]:
        saved = read_tables(folder)
        _check_tables(saved, shards, tables, states)
        return saved

    saved = run_on_all(read_index)
    names_of_ranks = gather_json(sorted({local.shard.name for local in shards}))
    if extra := sorted(set(saved) - {name for names in names_of_ranks for name in names}):
        raise StrettoError(
            f"checkpoint of another model: it has table {extra[0]}, which the model does not have",
            hint="load it into the model that it was made from",
        )

    def read_shards() -> None:
        for local in shards:
            _read_shard(folder, saved[local.shard.name], local, states=states, encode=encode, chunk=chunk)

    run_on_all(read_shards)


def read_tables(path: str | Path) -> dict[str, SavedTable | SavedHash]:
    """Return the tables of a checkpoint by name.

    Raises:
        StrettoError: the checkpoint does not exist or is damaged.
    """
    index = tensor_index(path)
    try:
        return saved_tables(index)
    except DamageError as error:
        raise StrettoError(f"checkpoint {path} is damaged: {error}", hint=_OLDER) from None


def read_weight(reader: TableReader, start: int, stop: int, part: ShardSlice | None = None) -> Tensor:
    """Read rows of the weight, with split halves joined to float32; arguments as for `TableReader.rows`."""
    weight = reader.rows(WEIGHT, start, stop, part)
    if LOW not in reader.table.states:
        return weight
    return join_halves(weight, reader.rows(LOW, start, stop, part))


def _check_tables(
    saved: Mapping[str, SavedTable | SavedHash],
    shards: Sequence[LocalShard],
    tables: Sequence[TableSpec],
    states: bool,
) -> None:
    """Raise StrettoError if a table is missing or differs in size or, with `states`, in its states."""
    for local in shards:
        spec = find_table(local.shard.name, tables)
        if spec.name not in saved:
            close = nearest(spec.name, list(saved))
            raise StrettoError(
                f"checkpoint of another model: it has no table {spec.name}",
                hint=f"the nearest name in it is {close}"
                if close
                else f"it has {len(saved)} tables" + (f": {', '.join(list(saved)[:5])}" if saved else ""),
            )
        table = saved[spec.name]
        hashed = isinstance(table, SavedHash)
        if hashed != (spec.ids == "hash"):
            raise StrettoError(
                f"checkpoint of another model: table {spec.name} was saved with "
                f"{'ids: hash' if hashed else 'a fixed number of rows'}, the model has ids: {spec.ids}",
                hint="give the table the ids that the checkpoint was made with",
            )
        rows = spec.rows if isinstance(table, SavedHash) else table.rows  # a hash table's limit may change
        if (rows, table.dim) != (spec.rows, spec.dim):
            raise StrettoError(
                f"checkpoint of another model: table {spec.name} has {rows} rows of {table.dim}, the model "
                f"wants {spec.rows} rows of {spec.dim}",
                hint="give the table the size that the checkpoint was made with",
            )
        if states:
            _check_states(local, table.shards[0] if isinstance(table, SavedHash) else table)


def _check_states(local: LocalShard, saved: SavedTable) -> None:
    """Raise StrettoError if a saved table lacks the shard's optimiser states, or has them in other types."""
    states = {name: (state.dim() == 1, state.dtype) for name, state in local.store.states.items()}
    hint = "continue with the optimiser that it was made with, or load the weights alone"

    def listed(names: Sequence[str]) -> str:
        return f"the states {', '.join(names)}" if names else "no states"

    if set(states) != set(saved.states):
        raise StrettoError(
            f"checkpoint of another optimiser: table {saved.name} has {listed(saved.states)}, this one wants "
            f"{listed(sorted(states))}",
            hint=hint,
        )
    exact = LOW in states  # two halves of one float32: neither may be rounded
    for name, (per_row, dtype) in {**states, WEIGHT: (False, local.store.weight.dtype)}.items():
        saved_dtype: torch.dtype = getattr(torch, saved.dtype(name))
        if saved.per_row(name) != per_row:
            units = ("an element", "a row")
            raise StrettoError(
                f"checkpoint of another optimiser: state {name} of table {saved.name} is one number "
                f"{units[saved.per_row(name)]}, this one wants one {units[per_row]}",
                hint=hint,
            )
        floats = dtype.is_floating_point and saved_dtype.is_floating_point
        if dtype != saved_dtype and (exact or not floats):
            raise StrettoError(
                f"checkpoint of another optimiser: {name} of table {saved.name} is {saved.dtype(name)}, this "
                f"one wants {str(dtype).removeprefix('torch.')}",
                hint=hint,
            )


def _read_shard(
    folder: Path,
    saved: SavedTable | SavedHash,
    local: LocalShard,
    states: bool,
    encode: Encode | None,
    chunk: int,
) -> None:
    """Fill a shard from a saved table, at most about `chunk` bytes at a time."""
    shard, store = local.shard, local.store

    def read(reader: TableReader, start: int, stop: int, part: ShardSlice) -> dict[str, Tensor]:
        if states:
            return {kind: reader.rows(kind, start, stop, part) for kind in (WEIGHT, *store.states)}
        values = read_weight(reader, start, stop, part)
        zeros = {
            name: torch.zeros(len(values), *state.shape[1:], dtype=state.dtype)
            for name, state in store.states.items()
        }
        return {**zeros, **(encode(values) if encode else {WEIGHT: values})}

    if isinstance(saved, SavedHash):
        assert local.ids is not None
        assert isinstance(store, GrowingStore)
        columns = ShardSlice(columns=(shard.start, shard.stop))
        for table, id_map in zip(saved.shards, saved.maps, strict=True):
            reader = TableReader(folder, table)
            restore(
                ids=local.ids,
                store=store,
                state={name: read_tensor(folder, named) for name, named in id_map.items()},
                read=lambda start, stop, reader=reader: read(reader, start, stop, columns),
                part=shard.residue,
                parts=shard.modulus,
            )
        return
    reader = TableReader(folder, saved)
    part = ShardSlice(shard.residue, shard.modulus, (shard.start, shard.stop))
    row_bytes = sum(prod(t.shape[1:]) * t.element_size() for t in (store.weight, *store.states.values()))
    rows = max(1, chunk // (row_bytes * reader.read_ratio(shard.modulus)))
    for start in range(0, shard.rows, rows):
        local.write(start, read(reader, start, min(start + rows, shard.rows), part))
