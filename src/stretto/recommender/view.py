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
        bytes: bytes stored by place: `device`, `cpu`, `disk`.
    """

    load: float
    bytes: Mapping[str, float] = field(default_factory=dict)


def placement_text(
    tables: Sequence[TableSpec],
    placements: Placements,
    world: int,
    *,
    bytes_of: Mapping[str, float] | None = None,
    load_of: Mapping[str, float] | None = None,
    ranks: Sequence[RankTables] | None = None,
    room: Mapping[str, float] | None = None,
    limit: int = 40,
) -> str:
    """Return a line for each table, then bars of the load and the device memory of each rank.

    Args:
        tables: the stored tables (`physical_tables`).
        bytes_of: bytes of each table with its optimiser states; by default its values in 32 bits.
        load_of: work per step for each table, over all ranks, in any unit; by default the values read.
        ranks: load and memory of each rank; by default computed by `ranks_of` from `bytes_of` and `load_of`.
        room: bytes available to a rank, by place; memory bars show the fraction of `device` in use. By
            default bars are relative to the fullest rank.
        limit: number of tables and of ranks to show, those with the highest load.
    """
    sizes = bytes_of or {table.name: float(_ELEMENT * table.rows * table.dim) for table in tables}
    loads = load_of or {table.name: table.hot * table.dim for table in tables}
    used = ranks or ranks_of(tables, placements, world, sizes, loads)
    total_load = sum(loads[table.name] for table in tables) or 1.0
    busiest = sorted(tables, key=lambda table: -loads[table.name])[:limit]
    shown = {table.name for table in busiest}
    rows: list[tuple[str, ...]] = [HEAD]
    for table in tables:
        if table.name not in shown:
            continue
        placement = placements[table.name]
        place = placement.place
        if place != "device":
            place = f"{place}, {100 * placement.cache:.3g}% cached"
        split = f"{placement.split}, hash" if table.ids == "hash" else placement.split
        cells = (table.name, f"{table.rows:,}", str(table.dim), split, ranks_text(placement.ranks, world))
        share = f"{loads[table.name] / total_load:.1%}"
        rows.append((*cells, place, bytes_text(sizes[table.name]), share))
    lines = _columns(rows)
    hidden = [table for table in tables if table.name not in shown]
    if hidden:
        size = sum(sizes[table.name] for table in hidden)
        share = sum(loads[table.name] for table in hidden) / total_load
        lines.append(f"and {len(hidden):,} more with less load: {bytes_text(size)}, {share:.1%}")
    size = sum(sizes[table.name] for table in tables)
    count = "1 table" if len(tables) == 1 else f"{len(tables):,} tables"
    lines.append(f"{count}, {sum(table.rows for table in tables):,} rows, {bytes_text(size)}")
    return "\n".join([*lines, "", *_rank_bars(used, room or {}, limit)])


def ranks_of(
    tables: Sequence[TableSpec],
    placements: Placements,
    world: int,
    bytes_of: Mapping[str, float],
    load_of: Mapping[str, float],
) -> list[RankTables]:
    """Return the load and memory of each rank.

    A shard's share of its table's bytes and load is its share of the values; a data-parallel table takes its
    full bytes on every rank, and its load is spread evenly.
    """
    loads, sizes = [0.0] * world, [dict[str, float]() for _ in range(world)]
    for shard in shards_of(tables, placements, world):
        table, replicated = tables[shard.table], placements[shard.name].split == "data"
        part = shard.rows * shard.width / (table.rows * table.dim)
        loads[shard.rank] += load_of[shard.name] * (1 / world if replicated else part)
        size, by_place = bytes_of[shard.name] * part, sizes[shard.rank]
        by_place[shard.place] = by_place.get(shard.place, 0.0) + size
        if shard.place != "device":
            by_place["device"] = by_place.get("device", 0.0) + shard.cache * size
    return [RankTables(load, by_place) for load, by_place in zip(loads, sizes, strict=True)]


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


def _rank_bars(ranks: Sequence[RankTables], room: Mapping[str, float], limit: int) -> list[str]:
    """Lines with the load of each rank, and its bytes on the device and in other places."""
    busiest = max((rank.load for rank in ranks), default=0.0)
    device = room.get("device") or max((rank.bytes.get("device", 0.0) for rank in ranks), default=0.0)
    by_load = sorted(range(len(ranks)), key=lambda rank: -ranks[rank].load)
    rows = [("rank", "load", "device memory")]
    for index in sorted(by_load[:limit]):
        rank = ranks[index]
        memory = list[str]()
        for place in ("device", "cpu", "disk"):
            if place == "device" or rank.bytes.get(place):
                size = bytes_text(rank.bytes.get(place, 0.0))
                size += f" of {bytes_text(room[place])}" if place in room else ""
                memory.append(size if place == "device" else f"{place} {size}")
        load = f"{_bar(rank.load, busiest)} {_ratio(rank.load, busiest):>4.0%}"
        rows.append((str(index), load, f"{_bar(rank.bytes.get('device', 0.0), device)} {', '.join(memory)}"))
    lines = _columns(rows)
    if len(ranks) > limit:
        idlest = _ratio(ranks[by_load[-1]].load, busiest)
        lines.append(f"and {len(ranks) - limit:,} less loaded, down to {idlest:.0%}")
    mean = sum(rank.load for rank in ranks) / max(1, len(ranks))
    if len(ranks) > 1 and mean:
        lines.append(f"the busiest rank has {busiest / mean:.2f} times the mean load")
    return lines


def _ratio(value: float, full: float) -> float:
    return value / full if full else 0.0


def _bar(value: float, full: float) -> str:
    """A bar; a value above 0 gets at least one block."""
    blocks = min(_BAR, max(1, round(_BAR * _ratio(value, full)))) if value > 0 else 0
    return _FULL * blocks + _IDLE * (_BAR - blocks)
