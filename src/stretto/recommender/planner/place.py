"""Plans the placement of embedding tables: search for the fastest one, or cost of an existing one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.recommender.placement import (
    SPLITS,
    Placements,
    Split,
    TablePlacement,
    TableSpec,
    check_placements,
)
from stretto.recommender.planner.job import TableJob
from stretto.recommender.planner.load_balance import TableStepTime
from stretto.recommender.planner.options import Option, option_of, options_of
from stretto.recommender.planner.search import Choice, PlacementSolution, Search
from stretto.recommender.planner.table_times import Load

GIB = 2**30
_FEW = 256  # tables x ranks up to which slower memories are tried even if faster ones suffice


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Placements and their cost.

    Attributes:
        placements: placement of each table by name, in the order of the tables.
        options: option of each table, in the same order.
        ranks: load of each rank over all tables.
        step: step time with its breakdown.
        explanations: key figures of each table's option, as text, by table name.
        over: messages about exceeded memory limits; always empty for a plan from `place_tables`.
        sent: bytes that leave the busiest rank in a step.
    """

    job: TableJob
    placements: Mapping[str, TablePlacement]
    options: tuple[Option, ...]
    ranks: tuple[Load, ...]
    step: TableStepTime
    explanations: Mapping[str, str]
    over: tuple[str, ...] = ()
    sent: float = 0.0

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


def place_tables(
    job: TableJob,
    splits: Sequence[Split] = SPLITS,
    holds: Callable[[TableSpec, Option], bool] | None = None,
) -> TablePlan:
    """Search for the fastest placement.

    Device memory is tried first; host memory and then files are added if it does not suffice. Small problems
    (up to `_FEW` tables x ranks) always try all of them, and use a slower memory if the step is then at least
    1% faster.

    Args:
        holds: returns True if an option of a table is allowed; by default all are. A table without an allowed
            option keeps all of its options.

    Raises:
        DoesNotFit: a table fits nowhere; the message compares its size with the available memory.
    """
    ranks = job.work.ranks
    stuck: int | None = None
    best: PlacementSolution | None = None
    for count in range(1, len(job.places) + 1):
        places = job.places[:count]
        room = sum(job.limits.by_place()[place] for place in places)
        if count < len(job.places) and sum(_size(job, table) for table in job.tables) > ranks * room:
            continue
        options = [
            options_of(table, popularity, job.work, places, splits)
            for table, popularity in zip(job.tables, job.popularity, strict=True)
        ]
        if holds is not None:
            allowed = zip(job.tables, options, strict=True)
            options = [
                [option for option in every if holds(table, option)] or every for table, every in allowed
            ]
        search = Search(job, options)
        choice = search.run()
        if choice is None:
            stuck = search.stuck
        elif best is None or choice.seconds < 0.99 * best.seconds:
            best = choice
        if best is not None and len(job.tables) * ranks > _FEW:
            break
    if best is None:
        table = job.tables[stuck or 0]
        room = {place: job.limits.by_place()[place] for place in job.places}
        names = {"device": "of device", "cpu": "of host memory", "disk": "of files"}
        available = ", ".join(f"{size / GIB:.4g} GiB {names[place]}" for place, size in room.items())
        total, per_rank = sum(_size(job, other) for other in job.tables), sum(room.values())
        needed = max(ranks + 1, int(-(-total // per_rank)) if per_rank > 0 else 0)
        size = f"{table.rows:,} rows of {table.dim}, {_size(job, table) / GIB:.4g} GiB with its states"
        raise DoesNotFit(
            f"table {table.name} ({size}) does not fit: all {len(job.tables)} tables take "
            f"{total / GIB:.4g} GiB, and each of {ranks} ranks has {available} for tables",
            hint=f"{needed} ranks, fewer rows (model.max_rows), a smaller optimiser state, or more memory",
        )
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
    loads = list[Load]()
    for rank in range(job.work.ranks):
        load = Load(
            *(column[rank] + extra for column, extra in zip(balance.columns, balance.everywhere, strict=True))
        )
        loads.append(load._replace(lookup=load.lookup + balance.lookup, update=load.update + balance.update))
    exceeded = list[str]()
    limits = job.limits.by_place().values()
    for name, field, limit in zip(
        ("device", "host", "files"), ("device", "host", "disk"), limits, strict=True
    ):
        sizes: list[float] = [getattr(load, field) for load in loads]
        rank = max(range(len(loads)), key=sizes.__getitem__)
        if sizes[rank] > limit * (1 + 1e-9):
            exceeded.append(
                f"rank {rank} needs {sizes[rank] / GIB:.4g} GiB for tables ({name}), and has "
                f"{limit / GIB:.4g} GiB"
            )
    return TablePlan(
        job=job,
        placements=placements,
        options=options,
        ranks=tuple(loads),
        step=balance.step(),
        explanations={
            table.name: _explain(option, job) for table, option in zip(job.tables, options, strict=True)
        },
        over=tuple(exceeded),
        # parameters have the elements of tables, in whatever precision they are multiplied
        sent=balance.bytes_sent(job.network.parameters * job.work.weight),
    )


def _explain(option: Option, job: TableJob) -> str:
    """Describe the option of a table with its key figures."""
    size = sum(part.stored for part in option.parts)
    phrases = [option.description, f"{size / GIB:.3g} GiB"]
    if option.rows_shipped:
        phrases.append("unique rows are sent")
    if option.split == "data" and job.work.ranks > 1:
        phrases.append(f"{option.gathered / 1e6:.3g} MB of unique rows to all ranks")
    if option.place != "device":
        phrases.append(
            f"in {'host memory' if option.place == 'cpu' else 'files'}, {option.cache:.0%} of rows cached"
        )
    return ", ".join(phrases)


def _size(job: TableJob, table: TableSpec) -> float:
    return table.rows * sum(job.work.row_bytes(table.dim))
