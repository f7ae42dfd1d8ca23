"""Validates the config of a recommender before any process is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from stretto.errors import Problem, StrettoError
from stretto.job.optimiser import Optimiser, optimiser_problems
from stretto.recommender.config.model import TableConfig
from stretto.recommender.config.placement import configured_placements
from stretto.recommender.config.schema import (
    SYNTHETIC,
    ClickDataConfig,
    ElasticRanks,
    RecommenderConfig,
    RecommenderLayout,
    TableOptimConfig,
)
from stretto.recommender.placement import TableSpec
from stretto.run.config.run_checks import guard_problems, missing_sources, raise_first, run_problems, writable
from stretto.run.config.schema import GuardConfig
from stretto.run.config.sources import is_click_folder


def check(config: RecommenderConfig, *, world: int | None = None, devices: int | None = None) -> None:
    """Raise an error for the first problem of the job, with all others after it.

    Args:
        world: number of processes, if a launcher such as torchrun has started them.
        devices: number of GPUs on all machines, if the job runs on GPUs.

    Raises:
        StrettoError: names the field, its value, the rule and the nearest fix.
    """
    raise_first(find_problems(config, world=world, devices=devices))


def find_problems(
    config: RecommenderConfig, *, world: int | None = None, devices: int | None = None
) -> list[Problem]:
    """Return all problems of the job, those of this machine included; arguments as for `check`."""
    broken = list(_ranks(config.layout, config.batch.global_size, world, devices))
    try:
        tables = config.table_specs()
    except StrettoError as error:  # otherwise tables are checked once the data is known
        broken += [error.within("model")] if config.data.is_synthetic else []
    else:
        broken += check_tables(config, tables)
    broken += _optimisers(config.dense_optimiser(), config.optim.tables, config.train.dtype)
    if config.train.dtype == "float64" and config.tables.wire != "float32":
        rule = "float64 training is for exactness"
        broken.append(Problem("tables.wire", config.tables.wire, rule, "tables.wire=float32"))
    broken += _held_out(config.data, evaluates=config.eval.every is not None)
    broken += _sources(config.data)
    if (folder := config.tables.folder) is not None:
        broken += writable("tables.folder", folder, Path(folder).expanduser())
    broken += _guard(config.guard, config.checkpoint.every, config.model.tables or [])
    broken += run_problems(config, config.layout.ranks)
    if broken or config.elastic.ranks == "auto":
        return broken
    for index, ranks in enumerate(config.elastic.ranks):
        field = f"elastic.ranks.{index}"
        if ranks < 1:
            broken.append(Problem(field, ranks, "a job has 1 rank or more", "leave it out"))
            continue
        other = replace(config.for_ranks(ranks), elastic=ElasticRanks())
        broken += [Problem(field, None, problem.message, problem.fix) for problem in find_problems(other)]
    return broken


def _ranks(
    layout: RecommenderLayout, batch: int, world: int | None, devices: int | None
) -> Iterator[Problem]:
    ranks, node = layout.ranks, layout.ranks_per_node
    if world is not None and ranks != world:
        yield Problem(
            "layout.ranks", ranks, f"torchrun has started {world} processes", f"layout.ranks={world}"
        )
    elif devices is not None and ranks > devices:
        yield Problem(
            "layout.ranks",
            ranks,
            f"each rank needs a GPU of its own and there are {devices}",
            f"layout.ranks={devices}, or train.device=cpu",
        )
    if node is not None and ranks % node:
        yield Problem(
            "layout.ranks_per_node",
            node,
            f"it must divide layout.ranks={ranks}",
            "null: one node has them all",
        )
    if batch < ranks:
        yield Problem(
            "batch.global_size",
            batch,
            f"every one of layout.ranks={ranks} needs a sample",
            f"batch.global_size={ranks}",
        )


def check_tables(config: RecommenderConfig, tables: list[TableSpec]) -> Iterator[Problem]:
    """Yield problems of these tables and of their placement in the config."""
    try:
        config.shape(tables)
        placed = configured_placements(config.tables, config.layout, tables)
    except StrettoError as error:
        yield error.within("tables")
        return
    for table in tables:
        if table.ids != "hash":
            continue
        place = placed[table.name].place if placed is not None else config.tables.place or "device"
        if place != "device":
            yield Problem(
                f"place of table {table.name}",
                place,
                "a table with ids: hash grows, and lies on the device only",
                "place: device, or ids: modulo",
            )
        if table.evict == "age" and table.max_age is None:
            yield Problem(
                f"max_age of table {table.name}", "null", "evict: age needs it", "max_age: 1000, in steps"
            )


def _guard(guard: GuardConfig, save_every: int | None, tables: Sequence[TableConfig]) -> Iterator[Problem]:
    yield from guard_problems(guard, save_every, asynchronous=False)
    if guard.rolls_back and any(table.ids == "hash" for table in tables):
        rule = "the new ids of a table with ids: hash cannot be taken back"
        yield Problem("guard.on_nonfinite", guard.on_nonfinite, rule, "skip, or ids: modulo")


def _optimisers(dense: Optimiser, tables: TableOptimConfig, dtype: str) -> Iterator[Problem]:
    yield from optimiser_problems(dense, "optim.dense")
    if not all(0 <= beta < 1 for beta in tables.betas):
        yield Problem(
            "optim.tables.betas", list(tables.betas), "each must be in [0, 1)", "[0.9, 0.999] is usual"
        )
    if tables.name == "split_sgd" and dtype != "float32":
        yield Problem(
            "optim.tables.name",
            tables.name,
            f"it keeps float32 in two halves, and train.dtype is {dtype}",
            "optim.tables.name=sgd, or train.dtype=float32",
        )


def _held_out(data: ClickDataConfig, *, evaluates: bool) -> Iterator[Problem]:
    by_share = data.split == "share" or (data.is_synthetic and data.split == "named")
    if evaluates and data.valid == 0 and by_share:
        yield Problem(
            "data.valid", data.valid, "it must not be 0 with eval.every", "data.valid=0.1, or eval.every=null"
        )
    if data.is_synthetic and data.split == "last-part":
        yield Problem("data.split", data.split, "synthetic clicks have no parts", "data.split=share")
    if data.raw and data.hash_rows is not None:
        rule = f"with data.hash_rows={data.hash_rows} ids are not as they are"
        yield Problem("data.raw", True, rule, "data.raw=false, or data.hash_rows=null")


_OF_FILES = ("format", "threshold", "hash_rows", "raw", "missing_flags", "columns", "on_error")


def _sources(data: ClickDataConfig) -> Iterator[Problem]:
    yield from missing_sources(data.sources, (SYNTHETIC,))
    ready = len(data.sources) == 1 and is_click_folder(Path(data.sources[0]).expanduser())
    if not (ready or data.is_synthetic):
        return
    defaults = type(data)()
    for name in _OF_FILES:
        if (value := getattr(data, name)) != getattr(defaults, name):
            kind = "is a click folder, which was made with settings of its own" if ready else "has no files"
            rule = f"it is for files of a log, and data.source={data.sources[0]} {kind}"
            yield Problem(f"data.{name}", value, rule, "leave it out, or name the files of the log")
