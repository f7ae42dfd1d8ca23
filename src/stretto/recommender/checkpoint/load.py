"""Loads tables from a checkpoint into shards, whatever placement and number of ranks they were saved with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stretto.engine.checkpoint.files import DamageError, plain_file
from stretto.engine.checkpoint.index import DTYPES, SavedPiece, piece_key
from stretto.engine.checkpoint.load import tensor_index, verify
from stretto.engine.parallel.control import gather_json, run_on_all
from stretto.errors import StrettoError, nearest
from stretto.recommender.checkpoint.names import WEIGHT, Named, SavedHash, SavedTable, saved_tables, spec_of
from stretto.recommender.optim.rules import glue
from stretto.recommender.placement import TableSpec
from stretto.recommender.stores.store import GrowingStore
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.pools import LocalShard


@dataclass(frozen=True)
class Part:
    """Rows residue, residue + modulus, ... of a table, and columns [first, last); None: all columns."""

    residue: int = 0
    modulus: int = 1
    columns: tuple[int, int] | None = None


class TableReader:
    """Reads one table. Files are memory-mapped only during a call, so memory use is the returned rows and any
    skipped rows between them.
    """

    def __init__(self, folder: Path, table: SavedTable) -> None:
        self.folder, self.table = folder, table

    def spread(self, modulus: int) -> int:
        """Rows read for each row kept when only every `modulus`-th row is wanted."""
        return modulus // gcd(modulus, self.table.modulus)

    def rows(self, kind: str, start: int, stop: int, part: Part | None = None) -> Tensor:
        """Rows [start, stop) of a part of the table, indexed within the part: [rows, columns], or [rows] for
        a per-row state.

        Args:
            kind: `weight` or the name of a state.
            part: None: the whole table.

        Raises:
            DamageError: a file does not match the index.
        """
        part = part or Part()
        columns = part.columns or (0, self.table.dim)
        wide = () if self.table.per_row(kind) else (columns[1] - columns[0],)
        block = torch.empty(stop - start, *wide, dtype=getattr(torch, self.table.dtype(kind)))
        # rows from the same saved part are `step` apart in the block and `stride` apart in the saved part
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
        """Copy rows at, at + stride, ... of a saved tensor from a piece to `target` [n, columns]."""
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
    """Read a whole one-dimensional tensor. Raises DamageError."""
    tensor = torch.empty(named.saved.shape, dtype=getattr(torch, named.saved.dtype))
    for piece in named.saved.pieces:
        start, size = piece.offsets[0], piece.sizes[0]
        tensor[start : start + size] = read_box(folder, named, piece, (slice(0, size),))
    return tensor


def read_box(folder: Path, named: Named, piece: SavedPiece, box: tuple[slice, ...]) -> Tensor:
    """Read a box of a piece. Raises DamageError."""
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
    """Add to part `part` of `parts` its ids and rows from one saved shard. The table may have been saved with
    a different number of parts.

    Args:
        state: the shard's id map, as `HashIds.state` returned it.
        read: returns saved rows [start, stop), with the columns of `store`: `weight`, and states by name.
            States that are missing become zeros.

    Raises:
        StrettoError: `state` is not a valid id map, or one of its ids is already present.
    """
    taken = ids.load_state(state, part, parts)
    store.grow(ids.extent)
    old, order = torch.sort(taken.old)
    new = taken.new[order]
    first = 0
    while first < len(old):  # chunks without rows of this part are not read
        start = int(old[first])
        last = int(torch.searchsorted(old, start + ID_CHUNK))
        values = read(start, int(old[last - 1]) + 1)
        which = old[first:last] - start
        store.set(new[first:last], {name: value.to(which.device)[which] for name, value in values.items()})
        first = last


CHUNK = 1 << 25  # bytes of a shard in memory at a time
LOW = "low"  # the state with the low half of a float32, whose high half is the weight
_OLDER = "use an older one: `stretto checkpoint list`"

Encode = Callable[[Tensor], Mapping[str, Tensor]]


def load_tables(
    path: str | Path,
    held: Sequence[LocalShard],
    tables: Sequence[TableSpec],
    *,
    states: bool = True,
    encode: Encode | None = None,
    check: bool = True,
    chunk: int = CHUNK,
) -> None:
    """Load this rank's table shards from a checkpoint.

    Collective: every rank passes all shards that it holds. All other tensors are loaded by
    `engine.checkpoint.load` with `ignore=[TABLES]`.

    Args:
        path: a checkpoint.
        tables: the stored tables (`physical_tables`), in any order.
        states: load the optimiser states too; otherwise they are set to zero.
        encode: used without `states`; converts values to the optimiser's storage: `weight`, and states that
            hold part of it. None: the values are the weight.
        check: verify sizes and checksums of all files first.
        chunk: bytes in memory at a time.

    Raises:
        StrettoError: the checkpoint does not exist, is damaged, or has other tables or optimiser states.
            Raised on all ranks, before any shard is written.
        CollectiveError: reading failed half-way; the contents of the shards are then undefined.
    """
    folder = Path(path)
    if check and (wrong := verify(folder)):
        raise StrettoError(f"checkpoint {folder} is damaged: {'; '.join(wrong[:3])}", hint=_OLDER)
    saved = run_on_all(lambda: _matched(folder, held, tables, states))
    wanted = {name for names in gather_json(sorted({one.shard.name for one in held})) for name in names}
    if extra := sorted(set(saved) - wanted):
        raise StrettoError(
            f"checkpoint of another model: it holds table {extra[0]}, which the model does not have",
            hint="load it into the model that it was made from",
        )
    run_on_all(
        lambda: _read(folder=folder, saved=saved, held=held, states=states, encode=encode, chunk=chunk)
    )


def read_tables(path: str | Path) -> dict[str, SavedTable | SavedHash]:
    """The tables of a checkpoint by name.

    Raises:
        StrettoError: the checkpoint does not exist or is damaged.
    """
    index = tensor_index(path)
    try:
        return saved_tables(index)
    except DamageError as error:
        raise StrettoError(f"checkpoint {path} is damaged: {error}", hint=_OLDER) from None


def values_of(reader: TableReader, start: int, stop: int, part: Part | None = None) -> Tensor:
    """Weight rows of a table, with split halves joined to float32; arguments as for `TableReader.rows`."""
    weight = reader.rows(WEIGHT, start, stop, part)
    if LOW not in reader.table.states:
        return weight
    return glue(weight, reader.rows(LOW, start, stop, part))


def _matched(
    folder: Path, held: Sequence[LocalShard], tables: Sequence[TableSpec], states: bool
) -> dict[str, SavedTable | SavedHash]:
    known = read_tables(folder)
    for one in held:
        name, spec = one.shard.name, spec_of(one.shard.name, tables)
        if name not in known:
            near = nearest(name, list(known))
            raise StrettoError(
                f"checkpoint of another model: it has no table {name}",
                hint=f"the nearest name in it is {near}"
                if near
                else f"it has {len(known)} tables" + (f": {', '.join(list(known)[:5])}" if known else ""),
            )
        saved = known[name]
        _same_size(saved, spec)
        if states:
            _same_states(one, saved.shards[0] if isinstance(saved, SavedHash) else saved)
    return known


def _same_size(saved: SavedTable | SavedHash, spec: TableSpec) -> None:
    if isinstance(saved, SavedHash) != (spec.ids == "hash"):
        there = "ids: hash" if isinstance(saved, SavedHash) else "rows of a fixed number"
        raise StrettoError(
            f"checkpoint of another model: table {spec.name} was saved with {there}, the model has "
            f"ids: {spec.ids}",
            hint="give the table the ids that the checkpoint was made with",
        )
    rows = spec.rows if isinstance(saved, SavedHash) else saved.rows  # the limit of a hash table may change
    if (rows, saved.dim) != (spec.rows, spec.dim):
        raise StrettoError(
            f"checkpoint of another model: table {spec.name} has {rows} rows of {saved.dim}, the model wants "
            f"{spec.rows} rows of {spec.dim}",
            hint="give the table the size that the checkpoint was made with",
        )


def _same_states(one: LocalShard, saved: SavedTable) -> None:
    states = {name: (state.dim() == 1, state.dtype) for name, state in one.store.states.items()}
    states[WEIGHT] = False, one.store.weight.dtype
    hint = "go on with the optimiser that it was made with, or load the weights alone"
    if set(states) - {WEIGHT} != set(saved.states):
        raise StrettoError(
            f"checkpoint of another optimiser: table {saved.name} has {_list(saved.states)}, this one wants "
            f"{_list(sorted(set(states) - {WEIGHT}))}",
            hint=hint,
        )
    for name, (per_row, dtype) in states.items():
        type_there: torch.dtype = getattr(torch, saved.dtype(name))
        if saved.per_row(name) != per_row:
            there, states = ("a row", "an element") if saved.per_row(name) else ("an element", "a row")
            raise StrettoError(
                f"checkpoint of another optimiser: state {name} of table {saved.name} is one number {there}, "
                f"this one wants one {states}",
                hint=hint,
            )
        exact = LOW in states  # two halves of one float32: neither may be rounded
        floats = dtype.is_floating_point and type_there.is_floating_point
        if dtype != type_there and (exact or not floats):
            raise StrettoError(
                f"checkpoint of another optimiser: {name} of table {saved.name} is {saved.dtype(name)}, this "
                f"one wants {str(dtype).removeprefix('torch.')}",
                hint=hint,
            )


def _list(states: Sequence[str]) -> str:
    return f"the states {', '.join(states)}" if states else "no states"


def _read(
    folder: Path,
    saved: Mapping[str, SavedTable | SavedHash],
    held: Sequence[LocalShard],
    states: bool,
    encode: Encode | None,
    chunk: int,
) -> None:
    for one in held:
        there, shard = saved[one.shard.name], one.shard
        if isinstance(there, SavedHash):
            _read_hash(folder, there, one, states, encode)
            continue
        reader = TableReader(folder, there)
        part = Part(shard.residue, shard.modulus, (shard.start, shard.stop))
        rows = _rows_at_a_time(one, reader, chunk)
        for start in range(0, shard.rows, rows):
            stop = min(start + rows, shard.rows)
            if states:
                kinds = (WEIGHT, *one.store.states)
                one.write(start, {kind: reader.rows(kind, start, stop, part) for kind in kinds})
            else:
                one.write(start, _fresh(one, values_of(reader, start, stop, part), encode))


def _read_hash(folder: Path, saved: SavedHash, one: LocalShard, states: bool, encode: Encode | None) -> None:
    """Load into this shard its ids and rows from every saved shard."""
    shard = one.shard
    assert one.ids is not None
    assert isinstance(one.store, GrowingStore)
    part = Part(columns=(shard.start, shard.stop))
    for there, ids in zip(saved.shards, saved.maps, strict=True):
        reader = TableReader(folder, there)

        def rows(start: int, stop: int, reader: TableReader = reader) -> Mapping[str, Tensor]:
            if states:
                return {kind: reader.rows(kind, start, stop, part) for kind in (WEIGHT, *one.store.states)}
            return _fresh(one, values_of(reader, start, stop, part), encode)

        state = {name: read_tensor(folder, named) for name, named in ids.items()}
        restore(ids=one.ids, store=one.store, state=state, read=rows, part=shard.residue, parts=shard.modulus)


def _fresh(one: LocalShard, values: Tensor, encode: Encode | None) -> dict[str, Tensor]:
    """The weight, with the optimiser states at their initial values."""
    zeros = {
        name: torch.zeros(len(values), *state.shape[1:], dtype=state.dtype)
        for name, state in one.store.states.items()
    }
    return {**zeros, **(encode(values) if encode else {WEIGHT: values})}


def _rows_at_a_time(one: LocalShard, reader: TableReader, chunk: int) -> int:
    tensors = [one.store.weight, *one.store.states.values()]
    row = sum(prod(tensor.shape[1:]) * tensor.element_size() for tensor in tensors)
    return max(1, chunk // (row * reader.spread(one.shard.modulus)))
