"""Measuring, on real ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from stretto.errors import StrettoError
from stretto.job.data_parallel import Precision
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.estimate import estimate
from stretto.run.calibrate.collectives import CollectiveTimer, collective_times, groups_of
from stretto.run.calibrate.kernels import KINDS, rows_of, shapes
from stretto.run.calibrate.profile import calibrate
from stretto.run.calibrate.stopwatch import Stopwatch
from stretto.run.launch.local import run_ranks


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_stopwatch_separates_long_from_short_and_keeps_its_budget() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        watch = Stopwatch(torch.device("cpu"), budget=0.05)
        assert watch.seconds(lambda: spin(2e-3)) == pytest.approx(2e-3, rel=0.2)
        assert watch.seconds(lambda: time.sleep(0.05)) < 0.02  # the time of the others does not count
        calls = list[int]()
        watch.seconds(lambda: (calls.append(1), spin(0.06)))
        assert len(calls) <= 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_take_longer_with_more_rows(kind: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        few, many = rows_of(Stopwatch(torch.device("cpu"), 0.01), torch.device("cpu"), KINDS[kind], (8, 2048))
    finally:
        torch.set_num_threads(threads)
    assert few[0] < many[0]
    assert 0 < few[1] < many[1] < 1


def test_small_models_are_among_the_shapes() -> None:
    cpu = torch.device("cpu")
    assert set(shapes(cpu, quick=True)) < set(shapes(cpu, quick=False))


def test_groups_are_whole_parts_of_the_ranks() -> None:
    assert groups_of(4) == [4, 2]
    assert groups_of(6) == [6, 3, 2]


def _talked() -> dict[str, list[list[float]]]:
    dist.init_process_group("gloo")
    try:
        seconds = dict[str, list[list[float]]]()
        for _, measure in collective_times(CollectiveTimer(torch.device("cpu"), 1, 0.005), quick=True):
            measure(seconds)
        return seconds
    finally:
        dist.destroy_process_group()


def test_ranks_agree_on_the_time_of_a_collective() -> None:
    by_kind, other = run_ranks(2, _talked)
    assert by_kind == other
    assert set(by_kind) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send"}
    for rows in by_kind.values():
        assert [row[:3] for row in rows] == [[2, 2, 4096], [2, 2, 2**20]]
        assert all(0 < row[3] < 1 for row in rows)


@pytest.mark.parametrize(("ranks", "says"), [(10**6, "too many")])
def test_more_ranks_than_the_machine_can_bear_are_refused(ranks: int, says: str) -> None:
    with pytest.raises(StrettoError, match=says):
        calibrate(ranks)


@pytest.mark.slow
def test_a_machine_is_measured_and_its_profile_predicts(capfd: pytest.CaptureFixture[str]) -> None:
    cluster = calibrate(2, quick=True)
    assert "measuring products" in capfd.readouterr().err
    small = ModelShape(family="gpt", layers=4, hidden=256, heads=4, vocab=4096, sequence=128)
    job = Job(
        shape=small,
        layout=Layout(dp=2),
        global_batch=32,
        micro_batch=4,
        sequence=128,
        precision=Precision(dtype="float32"),
    )
    assert 0.02 < estimate(job, cluster.sized(2), memory=False).seconds < 60
