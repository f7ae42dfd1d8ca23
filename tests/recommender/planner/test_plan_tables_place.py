"""Placements against all that there are, on small cases; limits, refusals and the time of large ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import find_cluster
from stretto.recommender.placement import Place, TablePlacement, TableSpec, check_placements
from stretto.recommender.planner.job import TableJob, table_job
from stretto.recommender.planner.network_times import network_of
from stretto.recommender.planner.options import Option, options_of
from stretto.recommender.planner.place import GIB, TablePlan, place_tables, price_tables
from stretto.recommender.planner.table_times import TableSoftware
from stretto.recommender.planner.uniform import UNIFORM, uniform
from stretto.recommender.popularity import measured
from stretto.recommender.shape import dlrm_preset, table_specs

A100, CPU = find_cluster("dgx-a100-80gb"), find_cluster("cpu")


def ways(option: Option, ranks: int, local: int) -> Iterator[tuple[int, ...]]:
    """All ranks that an option may be on: any order of the parts where they differ."""
    if option.split == "data":
        yield ()
        return
    if option.scope == "any":
        yield from itertools.permutations(range(ranks), len(option.parts))
        return
    step = ranks if option.scope == "all" else local
    for start in range(0, ranks - step + 1, step):
        yield from itertools.permutations(range(start, start + step))


def optimum(job: TableJob) -> float:
    """The least seconds of a step over all options and ranks that keep the limits; infinite: none does."""
    ranks, local, best = job.work.ranks, job.work.local, float("inf")
    choices = list[list[tuple[Option, tuple[int, ...]]]]()
    for table, popularity in zip(job.tables, job.popularity, strict=True):
        options = options_of(table, popularity, job.work, job.places)
        choices.append([(option, where) for option in options for where in ways(option, ranks, local)])
    balance = job.balance()

    def visit(i: int) -> None:
        nonlocal best
        if i == len(choices):
            best = min(best, balance.seconds())
            return
        for option, where in choices[i]:
            balance.add(option, where)
            if balance.fits():
                visit(i + 1)
            balance.add(option, where, -1.0)

    visit(0)
    return best


@st.composite
def jobs(draw: st.DrawFn) -> TableJob:
    ranks = draw(st.integers(1, 3))
    count = draw(st.integers(1, 4 if ranks < 3 else 2))
    tables = [
        TableSpec(
            name=f"t{i}",
            rows=draw(st.sampled_from([3, 1000, 50_000, 4_000_000])),
            dim=draw(st.sampled_from([4, 16, 128])),
            hot=draw(st.sampled_from([0.5, 1.0, 7.0, 60.0])),
            skew=draw(st.sampled_from([None, 1.05, 1.6])),
            ids=draw(st.sampled_from(["modulo", "modulo", "hash"])),
        )
        for i in range(count)
    ]
    optimizer = draw(st.sampled_from(["sgd", "rowwise_adagrad", "lazy_adam"]))
    total_bytes = (
        sum(t.rows * t.dim * 4 for t in tables)
        * {"sgd": 1, "rowwise_adagrad": 2, "lazy_adam": 3.5}[optimizer]
    )
    room = draw(st.sampled_from([2.0, 1.2 / ranks, 0.4 / ranks]))
    places: list[Place] = ["device", "cpu"] if draw(st.booleans()) else ["device"]
    return table_job(
        tables,
        draw(st.sampled_from([A100, CPU])),
        ranks,
        draw(st.sampled_from([64, 8192])),
        optimizer=optimizer,
        wire_bytes=draw(st.sampled_from([2, 4])),
        ranks_per_node=draw(st.sampled_from([None, 2])),
        device_bytes=room * total_bytes,
        places=places,
        # nothing constant beside what placements change
        program=draw(
            st.sampled_from(
                [TableSoftware(each=5e-6), TableSoftware(prefetch=False, overlap=False, ships="sums")]
            )
        ),
    )


def moved_together() -> TableJob:
    """Neither table gains by moving alone; with t1 whole on one rank, t0 is faster over the other two."""
    return table_job(
        [
            TableSpec(name="t0", rows=50_000, dim=128, hot=7.0, ids="hash"),
            TableSpec(name="t1", rows=3, dim=128, hot=7.0),
        ],
        A100,
        3,
        8192,
        optimizer="sgd",
        wire_bytes=2,
        ranks_per_node=2,
        device_bytes=51_203_072.0,
        places=["device"],
        program=TableSoftware(prefetch=False, overlap=False, ships="sums"),
    )


@example(moved_together())
@given(jobs())
def test_within_a_tenth_of_the_optimum(job: TableJob):
    best = optimum(job)
    try:
        placed = place_tables(job)
    except StrettoError:
        assert best == float("inf")
        return
    assert not placed.over
    check_placements(job.tables, placed.placements, job.work.ranks)
    assert best * (1 - 1e-9) <= placed.seconds
    assert placed.seconds <= 1.1 * best
    again = price_tables(job, placed.placements)
    assert again.seconds == pytest.approx(placed.seconds, rel=1e-9)
    assert again.ranks == placed.ranks


def test_parts_add_up_and_a_plan_beats_all_tables_alike():
    shape = dlrm_preset("dlrm-dcnv2")
    tables = table_specs(shape)
    job = table_job(tables, A100, 8, 65536, network=network_of(shape))
    placed = place_tables(job)
    assert sum(placed.step.parts.values()) == pytest.approx(placed.seconds)
    assert placed.samples_per_s == pytest.approx(65536 / placed.seconds)
    placed_bytes = sum(load.device for load in placed.ranks)
    expected = 0.0
    for table in tables:
        placement = placed.placements[table.name]
        statistics = len(placement.ranks) if placement.split == "column" else 1  # each run of columns has one
        expected += table.rows * (table.dim * 4 + 4 * statistics) * (8 if placement.split == "data" else 1)
    assert placed_bytes == pytest.approx(expected, rel=1e-6)
    for split in UNIFORM:
        alike = price_tables(job, uniform(tables, split, 8))
        assert alike.over or alike.seconds >= placed.seconds * (1 - 1e-9)
    assert price_tables(job, uniform(tables, "data", 8)).over


def test_what_does_not_fit_goes_to_the_host_then_to_files_then_is_refused():
    tables = [
        TableSpec(name="small", rows=1000, dim=16),
        TableSpec(name="large", rows=1 << 22, dim=16, skew=1.1),
        TableSpec(name="vast", rows=1 << 24, dim=16),
    ]

    def plan(device: float, host: float, disk: float) -> TablePlan:
        return place_tables(
            table_job(
                tables, A100, 2, 4096, optimizer="sgd", device_bytes=device, host_bytes=host, disk_bytes=disk
            )
        )

    assert {placement.place for placement in plan(GIB, 0, 0).placements.values()} == {"device"}
    placed = plan(0.2 * GIB, GIB, 0)
    assert (placed.placements["small"].place, placed.placements["vast"].place) == ("device", "cpu")
    placed = plan(0.15 * GIB, 0.05 * GIB, 2 * GIB)
    assert placed.placements["vast"].place == "disk"
    assert placed.step.parts["fetch"] > 0 or placed.ranks[0].fetch > 0
    with pytest.raises(StrettoError) as error:
        plan(0.1 * GIB, 0.1 * GIB, 0.1 * GIB)
    assert "table vast (16,777,216 rows of 16, 1 GiB" in error.value.message
    assert "0.1 GiB of device, 0.1 GiB of host memory, 0.1 GiB of files" in error.value.message
    assert error.value.hint is not None
    assert "ranks" in error.value.hint


def test_what_cannot_be_split_or_moved_is_whole_on_a_device():
    tables = [
        TableSpec(name="one", rows=1, dim=8),
        TableSpec(name="grows", rows=1000, dim=8, ids="hash"),
        TableSpec(name="a", rows=10**6, dim=8),
    ]
    placements = place_tables(table_job(tables, A100, 2, 64, places=["cpu"]), ["row"]).placements
    assert (placements["one"].split, placements["one"].place) == ("table", "cpu")
    assert (placements["grows"].split, placements["grows"].place) == ("row", "device")
    assert (placements["a"].split, placements["a"].place) == ("row", "cpu")
    alone = place_tables(table_job(tables, A100, 1, 64), ["row"]).placements
    assert {placement.split for placement in alone.values()} == {"table"}


def test_popularity_that_was_measured_counts():
    tables = [
        TableSpec(name="a", rows=10**6, dim=64, hot=20.0),
        TableSpec(name="b", rows=10**6, dim=64, hot=20.0),
    ]
    few = measured(10**6, 20.0, [(10, 0.9), (1000, 0.1)])
    alike = place_tables(table_job(tables, A100, 4, 8192))
    popular = place_tables(table_job(tables, A100, 4, 8192, popularity={"a": few, "b": few}))
    assert popular.seconds < alike.seconds
    assert {placement.split for placement in popular.placements.values()} == {"data"}


@pytest.mark.parametrize("ranks", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_ranks_that_fill_no_node(ranks: int):
    tables = [TableSpec(name=f"t{i}", rows=10**5, dim=32, hot=4.0) for i in range(4)]
    placed = place_tables(table_job(tables, A100, ranks, 1000, ranks_per_node=2))
    check_placements(tables, placed.placements, ranks)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_tables_on_128_ranks_in_seconds(count: int):
    tables = [
        TableSpec(name=f"t{i}", rows=10 ** (2 + i % 6), dim=64, hot=1.0 + i % 13, skew=1.05)
        for i in range(count)
    ]
    start = time.process_time()
    job = table_job(tables, A100, 128, 65536)
    placed = place_tables(job)
    assert time.process_time() - start < 15
    for split in UNIFORM:
        assert placed.seconds <= price_tables(job, uniform(tables, split, 128, 8)).seconds * (1 + 1e-9)


def test_what_is_no_job():
    with pytest.raises(StrettoError, match="0 tables"):
        table_job([], A100, 2, 64)
    with pytest.raises(StrettoError, match="optimiser 'adam'"):
        table_job([TableSpec(name="a", rows=4, dim=4)], A100, 2, 64, optimizer="adam")
    job = table_job([TableSpec(name="a", rows=4, dim=4)], A100, 2, 64)
    with pytest.raises(StrettoError, match="table a: ranks"):
        price_tables(job, {"a": TablePlacement("table", (5,))})
