"""Planned layouts for other numbers of ranks: which is taken, what stays as it is, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch.distributed as dist

from recommender_job import config_of
from stretto.cli import jobs
from stretto.errors import StrettoError
from stretto.recommender.config.check import check as check_recommender
from stretto.run.config import TrainConfig
from stretto.run.config.check import check
from stretto.run.config.for_ranks import rank_choices
from stretto.run.config.load import parse
from stretto.run.config.section import config_fields, plain_section
from stretto.run.launch import restart
from stretto.run.launch.failure import Failure
from stretto.run.launch.local import RankFailed, run_ranks
from stretto.run.launch.rendezvous import attempt_store
from stretto.run.train import launch as launch_module
from stretto.run.train import replan
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from stretto.run.train.replan import for_ranks, join_for_ranks
from tiny_job import LLAMA, job

CONFIG = """
model: {family: llama, layers: 4, hidden: 32, heads: 4}
layout: {dp: 2, tp: 2, order: dp-tp-pp}
dp: {mode: zero3, reduce: microbatch}
batch: {global_size: 12, micro_size: 3}
optim: {name: lamb, clip: 0.7}
train: {device: cpu, dtype: bfloat16, seed: 5}
elastic: {layouts: auto}
"""


def tiny(*overrides: str) -> TrainConfig:
    return parse(CONFIG, overrides=overrides)


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_a_number_of_ranks_takes_a_legal_layout_of_so_many(ranks: int) -> None:
    config, lines = tiny(), list[str]()
    other = for_ranks(config, ranks, lines.append)
    check(other)
    assert other.layout.to_layout().world == ranks
    assert other.batch.global_size == 12
    assert lines[0].startswith(f"elastic: {ranks} rank{'s take' if ranks > 1 else ' takes'} ")
    assert "s a step predicted on " in lines[0]
    planned = {"layout", "dp", "recompute", "schedule", "batch"}
    for name in set(config_fields(TrainConfig)) - planned:
        assert getattr(other, name) == getattr(config, name), name
    assert other.layout.order == "tp-cp-ep-dp-pp"  # for which the groups were priced
    assert other.dp.reduce == "auto"


def test_its_own_number_keeps_its_layout() -> None:
    config, lines = tiny(), list[str]()
    assert for_ranks(config, 4, lines.append) is config
    assert not lines
    assert rank_choices(config) == [4, 3, 2, 1]


HUGE = "{family: llama, layers: 80, hidden: 16384, heads: 128}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((f"model={HUGE}",), "there is no layout of 3 ranks: nothing fits; nearest is"),
        (("train.device=npu",), "there is no layout of 3 ranks: nothing is known of this machine's device"),
    ],
)
def test_without_a_layout_there_is_an_error(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(StrettoError) as caught:
        for_ranks(tiny(*overrides), 3, print)
    assert caught.value.message.startswith(f"elastic.layouts is auto, and {says}"), caught.value.message
    assert caught.value.hint == "start 4 ranks, as in layout; or list elastic.layouts"


def test_asynchronous_schedules_are_not_replanned() -> None:
    pipeline = ("layout={pp: 2}", "schedule.name=pipedream", "dp={mode: ddp}", "optim.clip=null")
    with pytest.raises(StrettoError, match=r"elastic.layouts is auto: in asynchronous schedules"):
        check(tiny(*pipeline))


# ------------------------------------------------------------------ under torchrun


def as_rank(overrides: tuple[str, ...]) -> tuple[Any, int]:
    """What a rank takes, or the error, and how many lines it prints; only rank 0 may plan."""
    config, lines = tiny(*overrides), list[str]()
    if os.environ["RANK"] != "0":
        replan.search = None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return plain_section(join_for_ranks(config, lines.append)), len(lines)
    except StrettoError as error:
        return [error.message, error.hint], len(lines)


def as_rank_twice() -> list[tuple[Any, int]]:
    """Of a model that fits, and then of one that does not; each time the ranks must be able to go on."""
    answers = list[tuple[Any, int]]()
    for overrides in ((), (f"model={HUGE}",)):
        answers.append(as_rank(overrides))
        attempt = attempt_store(30.0, timedelta(seconds=30))
        dist.init_process_group("gloo", store=attempt.store, rank=attempt.rank, world_size=attempt.world)
        dist.barrier()
        dist.destroy_process_group()
        attempt.ended.set()
    return answers


def test_all_ranks_take_what_the_first_has_planned() -> None:
    first, second = run_ranks(2, as_rank_twice)
    (taken, lines), (error, _) = first
    assert second == [(taken, 0), (error, 0)]
    assert lines == 1
    assert taken["layout"] != plain_section(tiny())["layout"]
    assert "there is no layout of 2 ranks: nothing fits" in error[0]


PLANNED = (
    *("layout={tp: 2}", "dp={mode: zero1}", "recompute.mode=full", "schedule.name=gpipe"),
    "batch={global_size: 12, micro_size: 6}",
)


def taken_of_plan() -> dict[str, Any]:
    """What a rank takes where rank 0's plan changes every section that a plan may change."""
    replan.for_ranks = lambda *_: tiny(*PLANNED)  # pyright: ignore[reportAttributeAccessIssue]
    return plain_section(join_for_ranks(tiny(), print))


def test_every_planned_section_reaches_all_ranks() -> None:
    planned, given = (plain_section(tiny(*overrides)) for overrides in (PLANNED, ()))
    sections = {"layout", "dp", "recompute", "schedule", "batch"}
    assert {name for name in planned if planned[name] != given[name]} == sections
    assert run_ranks(2, taken_of_plan) == [planned, planned]


def stop_while_waiting(folder: str) -> bool:
    """Whether a signal reaches rank 1 while it waits for rank 0's plan, as both see it."""
    stopped = Path(folder) / "stopped"
    if os.environ["RANK"] == "0":

        def search(_: object) -> None:
            end = time.monotonic() + 20
            while not stopped.exists() and time.monotonic() < end:
                time.sleep(0.05)
            raise StrettoError("stopped")

        replan.search = search  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(StrettoError, match="stopped"):
            join_for_ranks(tiny(), print)
        return stopped.exists()

    def end(*_: object) -> None:
        stopped.touch()
        raise SystemExit(75)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a launcher's ranks block it
    Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit):
        join_for_ranks(tiny(), print)
    return True


def test_a_signal_ends_a_rank_that_waits_for_the_plan(tmp_path: Path) -> None:
    assert run_ranks(2, stop_while_waiting, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("layouts", ["auto", [{"dp": 2}]])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_number_that_is_none_is_refused(layouts: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for variable, text in (numbers | {name: "two"}).items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(StrettoError, match=f"^{name} is 'two', and must be a whole number"):
        jobs.for_ranks(tiny(f"elastic.layouts={json.dumps(layouts)}"), None, quiet=True)


# ------------------------------------------------------------------ devices that are gone


class Machine:
    """Stands for devices and ranks: one device is gone when the first attempt has failed."""

    def __init__(self, devices: int) -> None:
        self.devices, self.ranks = devices, list[int]()

    def count(self, *_: Any) -> int:
        return self.devices

    def run(self, ranks: int, *_: Any, **__: Any) -> list[Any]:
        self.ranks.append(ranks)
        if len(self.ranks) == 1:
            self.devices -= 1
            raise RankFailed(Failure.died(ranks - 1, -9))
        return [{"step": 6, "stopped": False}] * ranks


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(devices=4)
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(launch_module, "_device_count", machine.count)
    monkeypatch.setattr(launch_module, "run_ranks", machine.run)
    return machine


@pytest.mark.parametrize(
    ("elastic", "then"), [("elastic.layouts=[{dp: 2}, {}]", 2), ("elastic.layouts=auto", 3)]
)
def test_a_job_goes_on_with_the_devices_that_are_left(
    tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str], elastic: str, then: int
) -> None:
    config = job(tmp_path, "layout.dp=4", "train.restarts=3", elastic, model=LLAMA)
    assert run_job(LANGUAGE, config).restarts == 1
    assert machine.ranks == [4, then]
    assert f"continuing with {then} of 4 ranks, for this machine has 3 devices now" in capsys.readouterr().out


def test_too_few_devices_without_a_layout_end_the_job(tmp_path: Path, machine: Machine) -> None:
    with pytest.raises(
        StrettoError, match="this machine has 3 devices now, and there is no layout for so few"
    ):
        run_job(LANGUAGE, job(tmp_path, "layout.dp=4", "train.restarts=3", model=LLAMA))
    assert machine.ranks == [4]


# ------------------------------------------------------------------ recommenders


def test_a_recommender_takes_any_number_of_ranks(tmp_path: Path) -> None:
    config = config_of(tmp_path, "layout.ranks=3", "elastic.ranks=auto")
    check_recommender(config)
    assert config.rank_choices == [3, 2, 1]
    assert config.for_ranks(7).layout.ranks == 7
