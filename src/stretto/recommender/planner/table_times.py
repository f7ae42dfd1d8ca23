"""Load of a table shard: seconds on its rank, bytes stored and bytes sent.

A part is the shard of a table on one rank: some of its rows or columns. A lookup reads rows, repeated ones
from hardware caches, and writes pooled embeddings. An update sorts the ids, gathers gradients in that order,
and reads and writes each unique row with its optimiser states once. Rows that are not cached on the device
are fetched from host memory or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from stretto.errors import StrettoError
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Device
from stretto.planner.machines.reading import shipped
from stretto.planner.time.constants import bandwidth, chip
from stretto.recommender.placement import Place
from stretto.recommender.popularity import Popularity

TableOptimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "split_sgd"]
# Optimiser states: elements per column, and extra bytes per row. split_sgd stores BF16 weights (the upper
# halves of FP32 weights) and keeps the lower halves as state.
_STATES: dict[TableOptimizer, tuple[float, int]] = {
    "sgd": (0.0, 0),
    "adagrad": (1.0, 0),
    "rowwise_adagrad": (0.0, 4),
    "lazy_adam": (2.0, 4),
    "split_sgd": (0.5, 0),
}
_NUMBER = 4.0  # bytes of an id, or of a length
_FEWER = 0.9  # ratio of rows to sums below which rows are sent; as in `recommender.tables.lookup_plan`
OPTIMIZERS = tuple(_STATES)


@dataclass(frozen=True, kw_only=True)
class TableSoftware:
    """Costs of a training program; `data/tables.yaml` documents each field and its source."""

    host: float = 0.0
    passes: float = 1.0
    each: float = 0.0
    each_id: float = 0.0
    slower: float = 1.0
    prefetch: bool = True
    overlap: bool = True
    ships: Literal["smaller", "sums"] = "smaller"
    cached_host: bool = True
    host_row: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of row accesses; `data/tables.yaml` documents each field and its source."""

    rows: float
    cached: float
    grain: float
    sort_bytes: float
    host_rows: float
    page: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """Parameters that all tables of a job share.

    Attributes:
        ranks: world size, for both samples and tables.
        local: ranks per node.
        batch: global batch size.
        weight: bytes per element of tables and their optimiser states.
        wire: bytes per element sent between ranks.
    """

    cluster: Cluster
    ranks: int
    local: int
    batch: int
    optimizer: TableOptimizer = "sgd"
    weight: int = 4
    wire: int = 4
    program: TableSoftware = TableSoftware()

    def row_bytes(self, width: int) -> tuple[float, float]:
        """Bytes of weights and of optimiser states in a row of `width` columns."""
        if self.optimizer == "split_sgd":
            return 2.0 * width, 2.0 * width
        per_column, per_row = _STATES[self.optimizer]
        return float(self.weight * width), per_column * self.weight * width + per_row


class Load(NamedTuple):
    """Load on a rank of a table's part, or of all tables.

    Attributes:
        lookup, update: seconds per step on the device.
        fetch: seconds per step of moving rows between device, host and files.
        sent: bytes per step of sums (or rows) sent to all ranks; as many bytes of gradients return.
        ids: bytes per step of ids received.
        device, host, disk: bytes stored.
    """

    lookup: float = 0.0
    update: float = 0.0
    fetch: float = 0.0
    sent: float = 0.0
    ids: float = 0.0
    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    @property
    def stored(self) -> float:
        """Bytes stored in all memories."""
        return self.device + self.host + self.disk


LOOKUP, UPDATE, FETCH, SENT, IDS, DEVICE, HOST, DISK = range(8)
"""Indices of the fields of `Load`."""


@dataclass(frozen=True, kw_only=True)
class TablePart:
    """A part of a table: rows, columns, share of the lookups, and where it is stored."""

    rows: int
    width: int
    share: float
    popularity: Popularity
    place: Place = "device"
    cache: float = 1.0
    parts: int = 1


def ship_rows(work: Work, popularity: Popularity, by_rows: int) -> bool:
    """True if sending unique rows takes over 10% fewer rows than sending sums, one per sample and row-wise
    shard (`by_rows` shards)."""
    if work.program.ships == "sums" or work.ranks == 1:
        return False
    samples = work.batch / work.ranks
    return popularity.unique(samples * popularity.hot) < _FEWER * samples * by_rows


def part_load(work: Work, part: TablePart, rows_shipped: bool) -> Load:
    """Return the load of a part on the rank that stores it."""
    device, rates = work.cluster.device, rates_of(work.cluster.device)
    table_lookups = work.batch * part.popularity.hot  # of all ranks, in all parts
    lookups = table_lookups * part.share
    # fraction of the table's unique ids that belong to the part
    unique_share = 1.0 if part.parts == 1 else part.share if part.popularity.rows == 1 else 1.0 / part.parts
    unique = min(float(part.rows), part.popularity.unique(table_lookups) * unique_share)
    # if rows are sent, every rank requests each of its unique ids once
    requested = lookups
    results = float(work.batch)
    if rows_shipped:
        requested = results = work.ranks * part.popularity.unique(table_lookups / work.ranks) * unique_share
    weight, state = work.row_bytes(part.width)
    row = weight + state
    number = work.weight * part.width
    load = Load(
        lookup=_read_seconds(device, rates, requested, unique, weight)
        + _copy_seconds(device, results * number),
        update=(
            requested * work.program.each_id
            + _copy_seconds(device, requested * rates.sort_bytes)
            + _read_seconds(device, rates, requested, results, number)
            + _row_seconds(device, rates, unique, 2 * row)
        ),
        sent=results * part.width * work.wire,
        ids=requested * _NUMBER,
        device=(part.cache if part.place != "device" else 1.0) * part.rows * row,
    )
    if part.place == "device":
        return load
    host, stored = work.cluster.host, part.rows * row
    if part.place == "cpu" and not work.program.cached_host:
        link = 2 * min(load.sent, lookups * part.width * work.wire) / host.link
        fetch = link + lookups * work.program.host_row
        return Load(fetch=fetch, sent=load.sent, ids=load.ids, host=stored)
    missed = part.popularity.unique(table_lookups, part.cache * part.popularity.rows) * unique_share
    moved = missed * row  # host to device; evicted rows go back in parallel, as the link is full duplex
    memory = host.bandwidth * rates.host_rows / work.local
    fetch = max(moved / host.link, 2 * moved / memory)
    if part.place == "cpu":
        return load._replace(fetch=fetch, host=stored)
    paged = 2 * missed * max(row, rates.page) / (host.disk_bandwidth / work.local)
    return load._replace(fetch=fetch + paged, disk=stored)


def copied_load(work: Work, rows: int, dim: int, popularity: Popularity) -> tuple[Load, float]:
    """Return the load of a replicated table on each rank, and the bytes of its all-gather.

    Gathered are unique ids and their gradients or, if that is smaller and the program chooses, all ids and
    the gradients of their sums.
    """
    device, rates = work.cluster.device, rates_of(work.cluster.device)
    lookups = work.batch / work.ranks * popularity.hot
    unique, unique_of_all = popularity.unique(lookups), popularity.unique(lookups * work.ranks)
    weight, state = work.row_bytes(dim)
    number = float(work.weight * dim)
    gathered = unique * work.ranks
    load = Load(
        lookup=_read_seconds(device, rates, lookups, unique, weight)
        + _copy_seconds(device, work.batch / work.ranks * number),
        update=(
            lookups * work.program.each_id
            + _copy_seconds(device, (lookups + (gathered if work.ranks > 1 else 0)) * rates.sort_bytes)
            + _read_seconds(device, rates, lookups, work.batch / work.ranks, number)
            + (_copy_seconds(device, 2 * gathered * number) if work.ranks > 1 else 0.0)
            + _row_seconds(device, rates, unique_of_all, 2 * (weight + state))
        ),
        device=rows * (weight + state),
    )
    sent = gathered * (dim * work.wire + _NUMBER)
    if work.program.ships == "smaller":
        sent = min(sent, lookups * work.ranks * _NUMBER + work.batch * (dim * work.wire + _NUMBER))
    return load, sent if work.ranks > 1 else 0.0


def requester_seconds(work: Work, dim: int, popularity: Popularity, by_rows: int) -> tuple[float, float]:
    """Return seconds on the requesting rank, forward and backward: pooling received rows (`by_rows` 0), or
    adding the partial sums of `by_rows` row-wise shards."""
    device, rates = work.cluster.device, rates_of(work.cluster.device)
    samples, number = work.batch / work.ranks, float(work.weight * dim)
    if by_rows == 0:  # rows are sent
        lookups = samples * popularity.hot
        unique = popularity.unique(lookups)
        reading = _read_seconds(device, rates, lookups, unique, number) + _copy_seconds(
            device, samples * number
        )
        back = _read_seconds(device, rates, lookups, samples, number) + _copy_seconds(
            device, unique * number + lookups * rates.sort_bytes
        )
        return reading, back
    if by_rows > 1:
        return _copy_seconds(device, (by_rows + 1) * samples * number), 0.0
    return 0.0, 0.0


@lru_cache(maxsize=256)
def rates_of(device: Device) -> Rates:
    """Row access rates of a device."""
    rates: dict[str, dict[str, float]] = _constants()["rates"]
    # chip() maps every device name that ends in "cpu" to "cpu"
    return Rates(**{**rates["default"], **rates.get(chip(device), {})})


def program_of(name: str) -> TableSoftware:
    """Return the costs of a program by name.

    Raises:
        StrettoError: no such program.
    """
    programs: dict[str, dict[str, Any]] = _constants()["programs"]
    if name not in programs:
        raise StrettoError(f"no program {name!r}", hint=f"allowed are {', '.join(programs)}")
    fitted: dict[str, dict[str, Any]] = _constants("tables_fitted")
    return TableSoftware(**{**programs[name], **fitted.get(name, {})})


@cache
def _constants(name: str = "tables") -> dict[str, Any]:
    return shipped("stretto.recommender.planner", name) or {}


def _row_seconds(device: Device, rates: Rates, rows: float, size: float) -> float:
    """Seconds of random access to `rows` rows of `size` bytes."""
    return rows * max(size, rates.grain) / (rates.rows * device.bandwidth)


def _read_seconds(device: Device, rates: Rates, rows: float, unique: float, size: float) -> float:
    """Seconds of reading rows, with repeated rows read from a hardware cache."""
    again = max(0.0, rows - unique)
    return _row_seconds(device, rates, min(rows, unique) + again / rates.cached, size)


def _copy_seconds(device: Device, size: float) -> float:
    rate, _ = bandwidth(device, "copy")
    return size / rate
