"""Plans the placement of embedding tables: search for the fastest one, or cost of an existing one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.recommender.placement import (
    Place,
    Placements,
    Split,
    TablePlacement,
    TableSpec,
    check_placements,
)
from stretto.recommender.planner.job import TableJob
from stretto.recommender.planner.load_balance import LoadBalance, StepTime
from stretto.recommender.planner.options import (
    DEVICE,
    DISK,
    FETCH,
    HOST,
    LOOKUP,
    SENT,
    UPDATE,
    Option,
    option_of,
    options_of,
)
from stretto.recommender.planner.search import Choice, Search, Solution

GIB = 2**30
_FEW = 256  # tables x ranks up to which slower memories are tried even if faster ones suffice
_FIELDS: tuple[tuple[Place, int], ...] = (("device", DEVICE), ("cpu", HOST), ("disk", DISK))
SPLITS: tuple[Split, ...] = ("table", "column", "row", "data")


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """Load of one rank over all tables: seconds per step, bytes sent per step, and bytes stored."""

    rank: int
    lookup: float
    update: float
    fetch: float
    sent: float
    device: float
    host: float
    disk: float


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Placements and their cost.

    Attributes:
        placements: by table name, in the order of the tables.
        options: option of each table, in the same order.
        ranks: load of each rank.
        step: step time with its breakdown.
        why: explanation by table name.
        over: messages about exceeded memory limits; always empty for a plan from `place_tables`.
    """

    job: TableJob
    placements: Mapping[str, TablePlacement]
    options: tuple[Option, ...]
    ranks: tuple[RankLoad, ...]
    step: StepTime
    why: Mapping[str, str]
    over: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.step.seconds

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks together."""
        return self.job.work.batch / self.seconds


class DoesNotFit(StrettoError):
    """A table fits in no permitted memory."""


Holds = Callable[[TableSpec, Option], bool]


def place_tables(job: TableJob, splits: Sequence[Split] = SPLITS, holds: Holds | None = None) -> TablePlan:
    """Search for the fastest placement. Device memory is tried first; host memory and then files are added
    if it does not suffice. Small problems (up to `_FEW` tables x ranks) always try all of them, and use a
    slower memory if it makes the step at least 1% faster.

    Args:
        holds: whether a table may be placed so; None: all that Stretto can. A table that may be placed in no
            way keeps all options.

    Raises:
        DoesNotFit: a table fits nowhere; the message compares its size with the available memory.
    """
    stuck: int | None = None
    best: Solution | None = None
    for count in range(1, len(job.places) + 1):
        places = job.places[:count]
        if count < len(job.places) and _too_small(job, places):
            continue
        options = [
            options_of(table, popularity, job.work, places, splits)
            for table, popularity in zip(job.tables, job.popularity, strict=True)
        ]
        if holds is not None:
            allowed = zip(job.tables, options, strict=True)
            options = [[one for one in of if holds(table, one)] or of for table, of in allowed]
        search = Search(job, options)
        choice = search.run()
        if choice is None:
            stuck = search.stuck
        elif best is None or choice.seconds < 0.99 * best.seconds:
            best = choice
        if best is not None and len(job.tables) * job.work.ranks > _FEW:
            break
    if best is None:
        raise _does_not_fit(job, 0 if stuck is None else stuck)
    return _plan(job, best.choices)


def price_tables(job: TableJob, placements: Placements) -> TablePlan:
    """Cost of existing placements; exceeded memory limits are reported in `over`.

    Raises:
        StrettoError: an invalid placement.
    """
    check_placements(job.tables, placements, job.work.ranks)
    choices = list[Choice]()
    for table, popularity in zip(job.tables, job.popularity, strict=True):
        placement = placements[table.name]
        option = option_of(table, popularity, job.work, placement)
        choices.append((option, placement.ranks))
    return _plan(job, choices)


def _plan(job: TableJob, choices: Sequence[Choice]) -> TablePlan:
    balance = job.balance()
    for choice in choices:
        balance.add(*choice)
    placements = {
        table.name: option.placement(ranks)
        for table, (option, ranks) in zip(job.tables, choices, strict=True)
    }
    options = tuple(option for option, _ in choices)
    why = {
        table.name: _why(table, option, ranks, job)
        for table, (option, ranks) in zip(job.tables, choices, strict=True)
    }
    loads = tuple(_rank(balance, rank) for rank in range(job.work.ranks))
    return TablePlan(
        job=job,
        placements=placements,
        options=options,
        ranks=loads,
        step=balance.step(),
        why=why,
        over=tuple(_over(job, loads)),
    )


def _rank(balance: LoadBalance, rank: int) -> RankLoad:
    def of(field: int) -> float:
        return balance.columns[field][rank] + balance.everywhere[field]

    return RankLoad(
        rank=rank,
        lookup=of(LOOKUP) + balance.lookup,
        update=of(UPDATE) + balance.update,
        fetch=of(FETCH),
        sent=of(SENT),
        device=of(DEVICE),
        host=of(HOST),
        disk=of(DISK),
    )


def _over(job: TableJob, loads: Sequence[RankLoad]) -> list[str]:
    overfull = list[str]()
    limits = job.limits
    for what, kept, limit in (
        ("device", [load.device for load in loads], limits.device),
        ("host", [load.host for load in loads], limits.host),
        ("files", [load.disk for load in loads], limits.disk),
    ):
        most = max(range(len(loads)), key=lambda rank: kept[rank])
        if kept[most] > limit * (1 + 1e-9):
            there = f"{limit / GIB:.4g} GiB is there"
            overfull.append(f"rank {most} keeps {kept[most] / GIB:.4g} GiB of tables ({what}), {there}")
    return overfull


def _why(table: TableSpec, option: Option, ranks: Sequence[int], job: TableJob) -> str:
    """Explains the option of a table with its key figures."""
    size = sum(part[DEVICE] + part[HOST] + part[DISK] for part in option.parts)
    words = [option.description, f"{size / GIB:.3g} GiB"]
    if option.rows_shipped:
        words.append("rows travel, each once")
    if option.split == "data" and job.work.ranks > 1:
        words.append(f"{option.gathered / 1e6:.3g} MB of rows seen to all")
    if option.place != "device":
        words.append(
            f"in {'host memory' if option.place == 'cpu' else 'files'}, {option.cache:.0%} of rows cached"
        )
    return ", ".join(words)


def _too_small(job: TableJob, places: Sequence[Place]) -> bool:
    """Whether the tables exceed the total capacity of these places over all ranks."""
    room = {"device": job.limits.device, "cpu": job.limits.host, "disk": job.limits.disk}
    there = job.work.ranks * sum(room[place] for place in places)
    return sum(_size(job, table) for table in job.tables) > there


def _size(job: TableJob, table: TableSpec) -> float:
    return table.rows * sum(job.work.row_bytes(table.dim))


def _does_not_fit(job: TableJob, stuck: int) -> DoesNotFit:
    table = job.tables[stuck]
    limits = job.limits
    ranks = job.work.ranks
    room = {"device": limits.device, "cpu": limits.host, "disk": limits.disk}
    names = {"device": "of device", "cpu": "of host memory", "disk": "of files"}
    there = ", ".join(f"{room[place] / GIB:.4g} GiB {names[place]}" for place in job.places)
    whole = sum(_size(job, each) for each in job.tables)
    size = f"{table.rows:,} rows of {table.dim}, {_size(job, table) / GIB:.4g} GiB with its states"
    return DoesNotFit(
        f"table {table.name} ({size}) does not fit: all {len(job.tables)} tables take {whole / GIB:.4g} GiB, "
        f"and each of {ranks} ranks has {there} for tables",
        hint=f"{_ranks_needed(job, whole)} ranks, fewer rows (model.max_rows), a smaller optimiser state, or "
        "more memory",
    )


def _ranks_needed(job: TableJob, whole: float) -> int:
    room = {"device": job.limits.device, "cpu": job.limits.host, "disk": job.limits.disk}
    each = sum(room[place] for place in job.places)
    return max(job.work.ranks + 1, int(-(-whole // each)) if each > 0 else 0)
