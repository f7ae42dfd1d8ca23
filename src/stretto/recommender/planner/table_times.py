"""Load of a table shard: seconds on its rank, bytes stored and bytes sent.

A part is the shard of a table on one rank: a range of rows or columns. A lookup reads rows, repeated ones
from hardware caches, and writes pooled embeddings. An update sorts the ids, gathers gradients in that order,
and reads and writes each unique row with its optimiser states once. Rows that are not cached on the device
are fetched from host memory or files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal

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
class Program:
    """The software profile of a training program; `data/tables.yaml` documents each field and its source."""

    host: float = 0.0
    passes: float = 1.0
    each: float = 0.0
    each_id: float = 0.0
    slower: float = 1.0
    ahead: bool = True
    beside: bool = True
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
        optimizer: table optimiser.
        weight: bytes per element of tables and their optimiser states.
        wire: bytes per element sent between ranks.
        program: software profile.
    """

    cluster: Cluster
    ranks: int
    local: int
    batch: int
    optimizer: TableOptimizer = "sgd"
    weight: int = 4
    wire: int = 4
    program: Program = Program()

    def row_bytes(self, width: int) -> tuple[float, float]:
        """Bytes of weights and of optimiser states in a row of `width` columns."""
        columns, beside = _STATES[self.optimizer]
        weight = 2 if self.optimizer == "split_sgd" else self.weight
        if self.optimizer == "split_sgd":
            return float(weight * width), 2.0 * width
        return float(weight * width), columns * self.weight * width + beside


@dataclass(frozen=True, kw_only=True)
class PartLoad:
    """Load of a part on its rank.

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

    def as_tuple(self) -> tuple[float, float, float, float, float, float, float, float]:
        """All fields in order."""
        return (
            self.lookup,
            self.update,
            self.fetch,
            self.sent,
            self.ids,
            self.device,
            self.host,
            self.disk,
        )


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
    """Whether sending unique rows takes over 10% fewer rows than sending sums, one per sample and row shard
    (`by_rows` shards).
    """
    if work.program.ships == "sums" or work.ranks == 1:
        return False
    samples = work.batch / work.ranks
    return popularity.unique(samples * popularity.hot) < _FEWER * samples * by_rows


def part_load(work: Work, part: TablePart, rows_shipped: bool) -> PartLoad:
    """Load of a part on the rank that stores it."""
    device, rates = work.cluster.device, rates_of(work.cluster.device)
    hot = part.popularity.hot
    whole = work.batch * hot  # lookups of all ranks in the whole table
    lookups = whole * part.share
    unique = min(float(part.rows), part.popularity.unique(whole) * _share_of_unique(part))
    # if rows are sent, every rank requests each of its unique ids once
    requested = lookups
    results = float(work.batch)
    if rows_shipped:
        requested = results = work.ranks * part.popularity.unique(whole / work.ranks) * _share_of_unique(part)
    weight, state = work.row_bytes(part.width)
    number = work.weight * part.width
    kept = part.cache if part.place != "device" else 1.0
    load = PartLoad(
        lookup=_read_seconds(device, rates, requested, unique, weight)
        + _copy_seconds(device, results * number),
        update=(
            requested * work.program.each_id
            + _copy_seconds(device, requested * rates.sort_bytes)
            + _read_seconds(device, rates, requested, results, number)
            + _row_seconds(device, rates, unique, 2 * (weight + state))
        ),
        sent=results * part.width * work.wire,
        ids=requested * _NUMBER,
        device=kept * part.rows * (weight + state),
    )
    if part.place == "device":
        return load
    return _off_device_load(work, part, load, lookups, weight + state)


def _off_device_load(work: Work, part: TablePart, load: PartLoad, lookups: float, row: float) -> PartLoad:
    """Load of a part stored in host memory or in files."""
    rates = rates_of(work.cluster.device)
    host = work.cluster.host
    program = work.program
    whole = part.rows * row
    if part.place == "cpu" and not program.cached_host:
        sums = min(load.sent, lookups * part.width * work.wire)
        link = 2 * sums / host.link
        return PartLoad(fetch=link + lookups * program.host_row, sent=load.sent, ids=load.ids, host=whole)
    missed = part.popularity.unique(work.batch * part.popularity.hot, part.cache * part.popularity.rows)
    missed *= _share_of_unique(part)
    moved = missed * row  # host to device; evicted rows go back in parallel, as the link is full duplex
    memory = host.bandwidth * rates.host_rows / work.local
    fetch = max(moved / host.link, 2 * moved / memory)
    if part.place == "cpu":
        return replace(load, fetch=fetch, host=whole)
    paged = 2 * missed * max(row, rates.page) / (host.disk_bandwidth / work.local)
    return replace(load, fetch=fetch + paged, disk=whole)


def copied_load(work: Work, rows: int, dim: int, popularity: Popularity) -> tuple[PartLoad, float]:
    """Load of a replicated table on each rank, and the bytes of the all-gather of unique ids and their
    gradients, or for programs that send what is smaller, of all ids and the gradients of their sums.
    """
    device, rates = work.cluster.device, rates_of(work.cluster.device)
    lookups = work.batch / work.ranks * popularity.hot
    mine, all_seen = popularity.unique(lookups), popularity.unique(lookups * work.ranks)
    weight, state = work.row_bytes(dim)
    number = float(work.weight * dim)
    gathered = mine * work.ranks
    load = PartLoad(
        lookup=_read_seconds(device, rates, lookups, mine, weight)
        + _copy_seconds(device, work.batch / work.ranks * number),
        update=(
            lookups * work.program.each_id
            + _copy_seconds(device, (lookups + (gathered if work.ranks > 1 else 0)) * rates.sort_bytes)
            + _read_seconds(device, rates, lookups, work.batch / work.ranks, number)
            + (_copy_seconds(device, 2 * gathered * number) if work.ranks > 1 else 0.0)
            + _row_seconds(device, rates, all_seen, 2 * (weight + state))
        ),
        device=rows * (weight + state),
    )
    sent = gathered * (dim * work.wire + _NUMBER)
    if work.program.ships == "smaller":
        sent = min(sent, lookups * work.ranks * _NUMBER + work.batch * (dim * work.wire + _NUMBER))
    return load, sent if work.ranks > 1 else 0.0


def requester_seconds(work: Work, dim: int, popularity: Popularity, by_rows: int) -> tuple[float, float]:
    """Seconds on the requesting rank, forward and backward: pooling received rows (`by_rows` 0), or adding
    the partial sums of `by_rows` row shards.
    """
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
    known: dict[str, dict[str, float]] = _constants()["rates"]
    # chip() maps every device name that ends in "cpu" to "cpu"
    return Rates(**{**known["default"], **known.get(chip(device), {})})


def program_of(name: str) -> Program:
    """The software profile of a program by name.

    Raises:
        StrettoError: no such program.
    """
    known: dict[str, dict[str, Any]] = _constants()["programs"]
    if name not in known:
        raise StrettoError(f"program {name!r} is not known", hint=", ".join(known))
    fitted: dict[str, dict[str, Any]] = _constants("tables_fitted")
    return Program(**{**known[name], **fitted.get(name, {})})


@cache
def _constants(name: str = "tables") -> dict[str, Any]:
    return shipped("stretto.recommender.planner", name) or {}


def _share_of_unique(part: TablePart) -> float:
    """Fraction of the table's unique ids that belong to a part."""
    return 1.0 if part.parts == 1 else part.share if part.popularity.rows == 1 else 1.0 / part.parts


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
