"""Placements of embedding tables as text: a line per table, and the load and memory of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from stretto.recommender.placement import Placements, TableSpec, shards_of

HEAD = ("table", "rows", "dim", "split", "ranks", "place", "bytes", "share")
_RIGHT = {"rows", "dim", "bytes", "share"}
_FULL, _IDLE = "█", "·"
_BAR = 20  # characters of a full bar
_ELEMENT = 4  # bytes of a value, by default


@dataclass(frozen=True)
class RankTables:
    """Load and memory of one rank, over all tables.

    Attributes:
        load: work per step, in any unit that is the same for all ranks.
        held: bytes by place: `device`, `cpu`, `disk`.
    """

    load: float
    held: Mapping[str, float] = field(default_factory=dict)


def placement_text(
    tables: Sequence[TableSpec],
    placements: Placements,
    world: int,
    *,
    bytes_of: Mapping[str, float] | None = None,
    load_of: Mapping[str, float] | None = None,
    ranks: Sequence[RankTables] | None = None,
    room: Mapping[str, float] | None = None,
    most: int = 40,
) -> str:
    """A line for each table, then bars of the load and the device memory of each rank.

    Args:
        tables: the stored tables (`physical_tables`).
        bytes_of: bytes of each table, its optimiser states included; None: its values in 32 bits.
        load_of: work per step for each table, over all ranks, in any unit; None: values read.
        ranks: load and memory of each rank; None: computed by `ranks_of` from `bytes_of` and `load_of`.
        room: bytes available to a rank, by place; memory bars show the fraction of `device` in use. None:
            bars are relative to the fullest rank.
        most: number of tables and of ranks to show, those with the highest load.
    """
    sizes = bytes_of or {table.name: float(_ELEMENT * table.rows * table.dim) for table in tables}
    loads = load_of or {table.name: table.hot * table.dim for table in tables}
    used = ranks or ranks_of(tables, placements, world, sizes, loads)
    lines = _table(tables=tables, placements=placements, world=world, sizes=sizes, loads=loads, most=most)
    return "\n".join([*lines, "", *_bars(used, room or {}, most)])


def ranks_of(
    tables: Sequence[TableSpec],
    placements: Placements,
    world: int,
    bytes_of: Mapping[str, float],
    load_of: Mapping[str, float],
) -> list[RankTables]:
    """Load and memory of each rank. A shard's share of its table's bytes and load is its share of the values;
    a data-parallel table takes its full bytes on every rank, and its load is spread evenly.
    """
    load, held = [0.0] * world, [dict[str, float]() for _ in range(world)]
    for shard in shards_of(tables, placements, world):
        table, copied = tables[shard.table], placements[shard.name].split == "data"
        part = shard.rows * shard.width / (table.rows * table.dim)
        load[shard.rank] += load_of[shard.name] * (1 / world if copied else part)
        size, of = bytes_of[shard.name] * part, held[shard.rank]
        of[shard.place] = of.get(shard.place, 0.0) + size
        if shard.place != "device":
            of["device"] = of.get("device", 0.0) + shard.cache * size
    return [RankTables(one, of) for one, of in zip(load, held, strict=True)]


def ranks_text(ranks: Sequence[int], world: int) -> str:
    """Ranks in the order of the shards, such as `all`, `3`, `0-7`, `0 2 5-7`."""
    if not ranks or list(ranks) == list(range(world)):
        return "all"
    runs = groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    groups = [[rank for _, rank in run] for _, run in runs]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in groups)


def bytes_text(size: float) -> str:
    """A size such as `12 B`, `3.4 KiB`, `421 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 999.5 else f"{size:,.0f} TiB"


# ---------------------------------------------------------------------- a line per table


def _table(
    tables: Sequence[TableSpec],
    placements: Placements,
    world: int,
    sizes: Mapping[str, float],
    loads: Mapping[str, float],
    most: int,
) -> list[str]:
    whole = sum(loads[table.name] for table in tables) or 1.0
    heavy = sorted(tables, key=lambda table: -loads[table.name])[:most]
    shown = {table.name for table in heavy}
    rows: list[tuple[str, ...]] = [HEAD]
    for table in tables:
        if table.name in shown:
            share = f"{loads[table.name] / whole:.1%}"
            rows.append((*_row(table, placements, world), bytes_text(sizes[table.name]), share))
    lines = _columns(rows)
    rest = [table for table in tables if table.name not in shown]
    if rest:
        size = sum(sizes[table.name] for table in rest)
        share = sum(loads[table.name] for table in rest) / whole
        lines.append(f"and {len(rest):,} more that are read less: {bytes_text(size)}, {share:.1%}")
    size = sum(sizes[table.name] for table in tables)
    many = "1 table" if len(tables) == 1 else f"{len(tables):,} tables"
    lines.append(f"{many}, {sum(table.rows for table in tables):,} rows, {bytes_text(size)}")
    return lines


def _row(table: TableSpec, placements: Placements, world: int) -> tuple[str, str, str, str, str, str]:
    placement = placements[table.name]
    place = (
        placement.place
        if placement.place == "device"
        else f"{placement.place}, {100 * placement.cache:.3g}% cached"
    )
    split = f"{placement.split}, hash" if table.ids == "hash" else placement.split
    return table.name, f"{table.rows:,}", str(table.dim), split, ranks_text(placement.ranks, world), place


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [name in _RIGHT for name in rows[0]]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


# ---------------------------------------------------------------------- a line per rank


def _bars(ranks: Sequence[RankTables], room: Mapping[str, float], most: int) -> list[str]:
    busiest = max((one.load for one in ranks), default=0.0)
    device = room.get("device") or max((one.held.get("device", 0.0) for one in ranks), default=0.0)
    heavy = sorted(range(len(ranks)), key=lambda rank: -ranks[rank].load)
    rows = [("rank", "load", "device memory")]
    for rank in sorted(heavy[:most]):
        one = ranks[rank]
        load = f"{_bar(one.load, busiest)} {_part(one.load, busiest):>4.0%}"
        rows.append((str(rank), load, f"{_bar(one.held.get('device', 0.0), device)} {_held(one, room)}"))
    lines = _columns(rows)
    if len(ranks) > most:
        least = ranks[heavy[-1]].load
        lines.append(f"and {len(ranks) - most:,} less loaded, down to {_part(least, busiest):.0%}")
    mean = sum(one.load for one in ranks) / max(1, len(ranks))
    if len(ranks) > 1 and mean:
        lines.append(f"the busiest rank has {busiest / mean:.2f} times the mean load")
    return lines


def _part(value: float, whole: float) -> float:
    return value / whole if whole else 0.0


def _bar(value: float, whole: float) -> str:
    """A bar; a value above 0 gets at least one block."""
    full = min(_BAR, max(1, round(_BAR * _part(value, whole)))) if value > 0 else 0
    return _FULL * full + _IDLE * (_BAR - full)


def _held(one: RankTables, room: Mapping[str, float]) -> str:
    """Bytes on the device, then in other places, each with the capacity if it is known."""
    words = list[str]()
    for place in ("device", "cpu", "disk"):
        if place == "device" or one.held.get(place):
            size = bytes_text(one.held.get(place, 0.0))
            size += f" of {bytes_text(room[place])}" if place in room else ""
            words.append(size if place == "device" else f"{place} {size}")
    return ", ".join(words)
