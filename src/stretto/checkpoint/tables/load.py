"""Tables from a checkpoint into shards: any placement on any number of ranks reads any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from stretto.checkpoint.files import DamageError
from stretto.checkpoint.load import tensor_index, verify
from stretto.checkpoint.tables.names import WEIGHT, SavedTable, saved_tables, spec_of
from stretto.checkpoint.tables.read import Part, TableReader
from stretto.checkpoint.together import gather, together
from stretto.errors import StrettoError, nearest
from stretto.layout.tables import TableSpec
from stretto.parallel.tables.held import HeldShard

CHUNK = 1 << 25  # bytes of a shard in memory at a time
LOW = "low"  # the state that, with a weight of 16 bits, is a float32
_OLDER = "use an older one: `stretto checkpoint list`"

Encode = Callable[[Tensor], Mapping[str, Tensor]]


def load_tables(
    path: str | Path,
    held: Sequence[HeldShard],
    tables: Sequence[TableSpec],
    *,
    states: bool = True,
    encode: Encode | None = None,
    check: bool = True,
    chunk: int = CHUNK,
) -> None:
    """Write to this rank's shards what a checkpoint has of their tables.

    Called by every rank with all shards that it holds. `checkpoint.load` reads what else there is, with
    `ignore=[TABLES]`.

    Args:
        path: one checkpoint.
        tables: as they are stored (`physical_tables`), in any order.
        states: also those of the optimiser; without, they become zeros.
        encode: without `states`, what the optimiser's rule makes of values: `weight`, and states that are
            part of it. None: the values are the weight.
        check: verify sizes and checksums of all files first.
        chunk: bytes in memory at a time.

    Raises:
        StrettoError: no checkpoint there, damaged, or of other tables or another optimiser; on all ranks
            alike, and nothing was written then.
        CheckpointError: reading failed half-way; what the shards hold is then undefined.
    """
    folder = Path(path)
    if check and (wrong := verify(folder)):
        raise StrettoError(f"checkpoint {folder} is damaged: {'; '.join(wrong[:3])}", hint=_OLDER)
    saved = together(lambda: _matched(folder, held, tables, states))
    wanted = {name for names in gather(sorted({one.shard.name for one in held})) for name in names}
    if extra := sorted(set(saved) - wanted):
        raise StrettoError(
            f"checkpoint of another model: it holds table {extra[0]}, which the model does not have",
            hint="load it into the model that it was made from",
        )
    together(lambda: _read(folder, saved, held, states, encode, chunk))


def read_tables(path: str | Path) -> dict[str, SavedTable]:
    """The tables of a checkpoint by name.

    Raises:
        StrettoError: no checkpoint there, or it is damaged.
    """
    index = tensor_index(path)
    try:
        return saved_tables(index)
    except DamageError as error:
        raise StrettoError(f"checkpoint {path} is damaged: {error}", hint=_OLDER) from None


def values_of(reader: TableReader, start: int, stop: int, part: Part | None = None) -> Tensor:
    """Rows of a table as numbers, whatever the optimiser kept them as; arguments as of `TableReader.rows`."""
    weight = reader.rows(WEIGHT, start, stop, part)
    if LOW not in reader.table.states:
        return weight
    low = reader.rows(LOW, start, stop, part)
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _matched(
    folder: Path, held: Sequence[HeldShard], tables: Sequence[TableSpec], states: bool
) -> dict[str, SavedTable]:
    found = read_tables(folder)
    for one in held:
        name, spec = one.shard.name, spec_of(one.shard.name, tables)
        if name not in found:
            near = nearest(name, list(found))
            raise StrettoError(
                f"checkpoint of another model: it has no table {name}",
                hint=f"the nearest name in it is {near}"
                if near
                else f"it has {len(found)} tables" + (f": {', '.join(list(found)[:5])}" if found else ""),
            )
        if (there := (found[name].rows, found[name].dim)) != (spec.rows, spec.dim):
            raise StrettoError(
                f"checkpoint of another model: table {name} has {there[0]} rows of {there[1]}, the model "
                f"wants {spec.rows} rows of {spec.dim}",
                hint="give the table the size that the checkpoint was made with",
            )
        if states:
            _same_states(one, found[name])
    return found


def _same_states(one: HeldShard, saved: SavedTable) -> None:
    own = {name: (state.dim() == 1, state.dtype) for name, state in one.store.states.items()}
    own[WEIGHT] = False, one.store.weight.dtype
    hint = "go on with the optimiser that it was made with, or load the weights alone"
    if set(own) - {WEIGHT} != set(saved.states):
        raise StrettoError(
            f"checkpoint of another optimiser: table {saved.name} has {_list(saved.states)}, this one wants "
            f"{_list(sorted(set(own) - {WEIGHT}))}",
            hint=hint,
        )
    for name, (per_row, dtype) in own.items():
        type_there: torch.dtype = getattr(torch, saved.dtype(name))
        if saved.per_row(name) != per_row:
            there, own = ("a row", "an element") if saved.per_row(name) else ("an element", "a row")
            raise StrettoError(
                f"checkpoint of another optimiser: state {name} of table {saved.name} is one number {there}, "
                f"this one wants one {own}",
                hint=hint,
            )
        exact = LOW in own  # halves of one number: neither may be rounded
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
    saved: Mapping[str, SavedTable],
    held: Sequence[HeldShard],
    states: bool,
    encode: Encode | None,
    chunk: int,
) -> None:
    for one in held:
        shard, reader = one.shard, TableReader(folder, saved[one.shard.name])
        part = Part(shard.residue, shard.modulus, (shard.start, shard.stop))
        rows = _rows_at_a_time(one, reader, chunk)
        for start in range(0, shard.rows, rows):
            stop = min(start + rows, shard.rows)
            if states:
                kinds = (WEIGHT, *one.store.states)
                one.write(start, {kind: reader.rows(kind, start, stop, part) for kind in kinds})
            else:
                one.write(start, _fresh(one, values_of(reader, start, stop, part), encode))


def _fresh(one: HeldShard, values: Tensor, encode: Encode | None) -> dict[str, Tensor]:
    """Weights with the states that an optimiser begins with."""
    zeros = {
        name: torch.zeros(len(values), *state.shape[1:], dtype=state.dtype)
        for name, state in one.store.states.items()
    }
    return {**zeros, **(encode(values) if encode else {WEIGHT: values})}


def _rows_at_a_time(one: HeldShard, reader: TableReader, chunk: int) -> int:
    tensors = [one.store.weight, *one.store.states.values()]
    row = sum(prod(tensor.shape[1:]) * tensor.element_size() for tensor in tensors)
    return max(1, chunk // (row * reader.spread(one.shard.modulus)))
