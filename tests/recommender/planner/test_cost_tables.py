"""What a part of a table costs: against counts of drawn ids, against published totals, and in its order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import find_cluster
from stretto.recommender.placement import TablePlacement, TableSpec
from stretto.recommender.planner.job import table_job
from stretto.recommender.planner.network_times import DenseNetwork, network_of, network_time
from stretto.recommender.planner.options import option_of
from stretto.recommender.planner.place import place_tables
from stretto.recommender.planner.table_times import (
    OPTIMIZERS,
    TablePart,
    TableSoftware,
    Work,
    copied_load,
    part_load,
    program_of,
    rates_of,
    ship_rows,
)
from stretto.recommender.popularity import by_skew
from stretto.recommender.shape import count_dlrm, dlrm_bytes, dlrm_preset, dlrm_state_bytes, table_specs

A100 = find_cluster("dgx-a100-80gb")
WORK = Work(cluster=A100, ranks=8, local=8, batch=4096, optimizer="adagrad")


def test_sums_of_mlperf_are_as_published():
    """872 MB of sums for 65536 samples; ids of 4 bytes, not 8, are half of 112 MB."""
    shape = dlrm_preset("dlrm-dcnv2")
    work = replace(WORK, batch=65536, program=TableSoftware(ships="sums"))
    sent = ids = device = 0.0
    for table in table_specs(shape):
        option = option_of(table, by_skew(table.rows, table.hot), work, TablePlacement("table", (0,)))
        sent, ids = sent + option.parts[0].sent, ids + option.parts[0].ids
        device += option.parts[0].device
    published = dlrm_bytes(shape, 65536, 8)
    assert sent == pytest.approx(published.pooled)
    assert ids == pytest.approx(published.ids / 2)
    assert device == pytest.approx(4 * count_dlrm(shape).tables + dlrm_state_bytes(shape, "adagrad"))


@pytest.mark.parametrize("split", ["table", "column", "row"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parts_keep_the_table_and_its_states(split: str, optimizer: str):
    table = TableSpec(name="a", rows=1000, dim=64, hot=3.0, skew=1.1)
    states = {"sgd": 0, "adagrad": 256, "rowwise_adagrad": 4, "lazy_adam": 516, "split_sgd": 0}[optimizer]
    ranks = (0,) if split == "table" else tuple(range(8))
    work = replace(WORK, optimizer=optimizer)
    option = option_of(table, by_skew(1000, 3.0, 1.1), work, TablePlacement(split, ranks))  # pyright: ignore[reportArgumentType]
    statistic_bytes = 4 if optimizer in ("rowwise_adagrad", "lazy_adam") else 0
    copies = 7 * statistic_bytes * (split == "column")  # a number a row, of each run of columns
    assert sum(part.device for part in option.parts) == pytest.approx(1000 * (256 + states + copies))
    assert option.alike == (split != "table")


def test_rows_travel_where_drawn_ids_are_fewer_than_samples():
    """As counted: of every rank's samples the different ids, or a sum for every sample (and part)."""
    rng = np.random.default_rng(1)
    for rows, hot, skew, parts in (
        (50, 1, None, 1),
        (10**6, 3, None, 1),
        (10**5, 3, 1.2, 8),
        (10**5, 30, 0.0, 8),
    ):
        samples = WORK.batch // WORK.ranks
        p = np.arange(1, rows + 1.0) ** -(skew or 0.0)
        drawn = len(np.unique(rng.choice(rows, samples * hot, p=p / p.sum())))
        popularity = by_skew(rows, float(hot), skew)
        assert ship_rows(WORK, popularity, parts) == (drawn < 0.9 * samples * parts)
        part = TablePart(rows=rows, width=64, share=1.0, popularity=popularity)
        sent = part_load(WORK, part, True).sent
        assert sent == pytest.approx(WORK.ranks * drawn * 64 * 4, rel=0.05)
        assert part_load(WORK, part, False).sent == WORK.batch * 64 * 4
        _, gathered = copied_load(WORK, rows, 64, popularity)
        vector = 64 * 4 + 4
        of_rows = WORK.ranks * drawn * vector
        of_sums = WORK.batch * (hot * 4 + vector)
        assert gathered == pytest.approx(min(of_rows, of_sums), rel=0.05)
        sums = replace(WORK, program=replace(WORK.program, ships="sums"))
        assert copied_load(sums, rows, 64, popularity)[1] == pytest.approx(of_rows, rel=0.05)
    assert not ship_rows(replace(WORK, ranks=1), by_skew(2), 1)


def test_more_work_takes_longer():
    few, many = by_skew(10**6, 1.0, 1.05), by_skew(10**6, 50.0, 1.05)
    less, more = (
        part_load(WORK, TablePart(rows=10**6, width=64, share=1.0, popularity=each), False)
        for each in (few, many)
    )
    assert more.lookup > less.lookup
    assert more.update > less.update
    wide = part_load(WORK, TablePart(rows=10**6, width=128, share=1.0, popularity=few), False)
    assert wide.lookup > less.lookup
    popular = part_load(
        WORK, TablePart(rows=10**6, width=64, share=1.0, popularity=by_skew(10**6, 50.0, 1.6)), False
    )
    assert popular.lookup < more.lookup  # rows seen before come from caches
    assert popular.update < more.update


def test_what_is_away_is_fetched_but_for_what_the_cache_has():
    popularity = by_skew(10**7, 10.0, 1.05)
    parts = [
        TablePart(rows=10**7, width=64, share=1.0, popularity=popularity, place="cpu", cache=cache)
        for cache in (0.001, 0.01, 0.1)
    ]
    loads = [part_load(WORK, part, False) for part in parts]
    assert [load.fetch for load in loads] == sorted((load.fetch for load in loads), reverse=True)
    assert loads[0].host == 10**7 * 512
    assert loads[2].device == pytest.approx(0.1 * loads[2].host)
    disk = part_load(WORK, replace(parts[1], place="disk"), False)
    assert disk.fetch > loads[1].fetch
    assert (disk.disk, disk.host) == (loads[1].host, 0)
    missed = popularity.unique(WORK.batch * 10.0, 0.01 * 10**7)
    assert loads[1].fetch >= missed * 512 / A100.host.link * (1 - 1e-12)


def test_networks_take_flops_and_bytes():
    device, shape = A100.device, dlrm_preset("dlrm-113b")
    net = network_of(shape)
    assert net.parameters == count_dlrm(shape).dense
    assert network_of(dlrm_preset("dlrm-dcnv2")).parameters == count_dlrm(dlrm_preset("dlrm-dcnv2")).dense
    full, half = (network_time(net, device, "tf32", n) for n in (65536, 8192))
    assert 6 < full.seconds / half.seconds < 8.1
    assert network_time(net, device, "fp16", 65536).seconds < full.seconds
    assert network_time(net, device, "tf32", 65536, passes=2.0).joint > full.joint
    assert (
        network_time(
            DenseNetwork(bottom=(), top=(4, 1), wide=3, vectors=1, interaction="concat"), device, "fp32", 0
        ).seconds
        == 0
    )
    # 0.96 TFLOP at no more than the peak
    assert full.seconds > 0.96e12 / device.peak("tf32")


# Measured samples a second of the 113B model: NVIDIA/DeepLearningExamples, TensorFlow2 DLRM, doc/DLRM.md, and
# its older release's 11.9M. Of each of the first two rows one constant of the program is fitted on the row.
SEED = (
    ("epyc-7742-2x", 1, "tensorflow-cpu", "fp32", 4, 17_700),
    ("dgx-a100", 1, "nvidia-tf2", "fp16", 2, 768_000),
    ("dgx-a100", 8, "nvidia-tf2", "fp16", 2, 11_500_000),
    ("dgx-a100", 8, "nvidia-tf2", "fp16", 2, 11_900_000),
)


def test_the_113b_model_comes_out_as_measured():
    shape, rates = dlrm_preset("dlrm-113b"), list[float]()
    for cluster, ranks, program, precision, wire, measured in SEED:
        job = table_job(
            *(table_specs(shape), find_cluster(cluster), ranks, 65536),
            network=network_of(shape),
            optimizer="sgd",
            program=program,
            precision=precision,  # pyright: ignore[reportArgumentType]
            wire_bytes=wire,
            places=["device", "cpu"],
        )
        plan = place_tables(job, ("table", "column"))
        rates.append(plan.samples_per_s)
        assert plan.samples_per_s == pytest.approx(measured, rel=0.35)
        assert (ranks == 1 and cluster == "dgx-a100") == (plan.ranks[0].host > 0)  # 421 GiB are no 80
    assert rates[0] < rates[1] < rates[2]


def test_programs_by_name():
    assert program_of("nvidia-tf2").host > 0
    assert program_of("stretto").ships == "smaller"
    with pytest.raises(StrettoError, match="program 'jax'"):
        program_of("jax")
    assert rates_of(find_cluster("cpu").device).rows != rates_of(A100.device).rows
