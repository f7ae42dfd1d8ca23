"""Stages with given layers, and programs from files: planned, trained and proved like any other job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from proofs import verify
from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.layout import Layout
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import one_rank
from stretto.planner.rank_step.counts import counts
from stretto.program import schedule
from stretto.program.text import to_csv, to_json
from stretto.run.config.check import check
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.dryrun.run import dry_run
from stretto.verify.language.cases import (
    cases_from_file,
    configured_job,
    describe,
    every_layout,
    smaller,
    vary,
)
from tiny_job import EIGHT, LLAMA, job

PP2 = ("layout.pp=2", "model.layers=4", EIGHT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("custom")


def prove(config: TrainConfig) -> str:
    check(config)
    (verdict,) = verify(config, [configured_job(config)], steps=1)
    assert verdict.equal, verdict
    return verdict.layout


def test_given_stages_equal_one_process(folder: Path) -> None:
    """With tied embeddings, whose two copies are on the first and the last stage."""
    config = job(folder, *PP2, "layout.stages=[1,5]")
    assert prove(config) == "tp1 dp1 pp2 stages=1-5 1f1b"
    chunked = job(folder, *PP2, "layout.stages=[3,1,1,1]", "schedule.name=interleaved", "schedule.chunks=2")
    assert prove(chunked) == "tp1 dp1 pp2 stages=3-1-1-1 interleaved chunks=2"


def test_given_stages_are_delayed_as_their_schedule_promises(folder: Path) -> None:
    options = ("layout.stages=[5,1]", "schedule.name=pipedream", "optim.clip=null")
    prove(job(folder, *PP2, *options, model=LLAMA))


def test_programs_from_files_equal_one_process(folder: Path, tmp_path: Path) -> None:
    program = schedule("zb-h1", 2, 8)
    for name, text in (("mine.csv", to_csv(program)), ("mine.json", to_json(replace(program, name="mine")))):
        path = tmp_path / name
        path.write_text(text)
        config = job(folder, *PP2, f"schedule.file={path}")
        assert job_of(config).program().orders == program.orders
    assert prove(config) == "tp1 dp1 pp2 mine"


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("zb-v", 2),
        pytest.param("interleaved-zb", 2, marks=pytest.mark.slow),
        pytest.param("dualpipe-v", 2, marks=pytest.mark.slow),
    ],
)
def test_what_torch_dumps_comes_back(folder: Path, tmp_path: Path, name: str, chunks: int) -> None:
    """Compute only, and with the UNSHARD, RESHARD, SEND, RECV and REDUCE_GRAD that torch has added."""
    program = schedule(name, 2, 8)
    (tmp_path / "ours.csv").write_text(to_csv(program))
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=2 * chunks,
            group_size=2,
            group_rank=0,
            stage_index=stage,
            submod=nn.Identity(),
            is_first=stage == 0,
            is_last=stage == 2 * chunks - 1,
        )
        for stage in program.stages_of(0)
    ]
    runtime = _PipelineScheduleRuntime(stages, 8)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    for form in ("compute_only", "compute_comms"):
        path = tmp_path / f"{form}.csv"
        runtime._dump_csv(str(path), format=form)
        assert ("SEND_F" in path.read_text()) == ("UNSHARD" in path.read_text()) == (form == "compute_comms")
        config = job(folder, *PP2, f"schedule.file={path}")
        assert job_of(config).program().orders == program.orders
        assert job_of(config).program().pairs == program.pairs
    assert prove(config) == "tp1 dp1 pp2 compute_comms"


def test_a_changed_file_is_read_again(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    for name in ("gpipe", "1f1b"):
        path.write_text(to_csv(schedule(name, 2, 8)))
        assert job_of(job(folder, *PP2, f"schedule.file={path}")).program().orders == (
            schedule(name, 2, 8).orders
        )


def test_bad_programs_are_refused_before_a_process_is_started(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"

    def error(text: str, *overrides: str) -> str:
        path.write_text(text)
        with pytest.raises(StrettoError) as caught:
            check(job(folder, *PP2, f"schedule.file={path}", *overrides))
        return str(caught.value)

    good = to_csv(schedule("1f1b", 2, 8))
    assert "2 ranks and 8 microbatches" in error(good, "batch.global_size=16")
    assert "hint: layout.pp=2 and batch.global_size=8" in error(good, "batch.global_size=16")
    assert "schedule.name is gpipe: schedule.file is the program already" in error(
        good, "schedule.name=gpipe"
    )
    assert "schedule.chunks is 2: it is an option of named schedules" in error(good, "schedule.chunks=2")
    assert "line 1" in error("0F0,nonsense\n1F0\n")
    late = to_csv(schedule("pipedream", 2, 8))
    assert "optim.clip is 0.5" in error(late, "model.tied=false")


@pytest.mark.parametrize("stage_layers", [(1, 5), pytest.param((4, 2), marks=pytest.mark.slow)])
def test_memory_and_counts_of_given_stages_are_those_of_the_code(stage_layers: tuple[int, ...]) -> None:
    shape = ModelShape(family="gpt", layers=4, hidden=64, heads=4, vocab=301, sequence=48)
    uneven = Job(
        shape=shape,
        layout=Layout(pp=2),
        global_batch=8,
        micro_batch=2,
        stage_layers=stage_layers,
    )
    assert not problems(uneven)
    even = replace(uneven, stage_layers=None)
    for rank in (0, 1):
        ran, memory = dry_run(uneven, rank), memory_of(uneven)
        counted = counts(uneven, rank, memory)
        assert {key: count for key, count in ran.flops.items() if count} == counted.flops
        assert ran.bytes == counted.bytes
        predicted = one_rank(memory, rank).total
        assert predicted == pytest.approx(ran.peak, rel=0.06)
        assert predicted != one_rank(memory_of(even), rank).total


def test_other_pipelines_are_cut_evenly(folder: Path, tmp_path: Path) -> None:
    """What belongs to one number of pipeline ranks does not go over to another."""
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule("gpipe", 2, 8)))
    config = job(folder, *PP2, "layout.stages=[1,5]", f"schedule.file={path}")
    configured = configured_job(config)
    assert vary(configured, tp=2).stage_layers == (1, 5)
    four = vary(configured, pp=4)
    assert (four.stage_layers, four.custom_program) == (None, None)
    assert describe(vary(configured, schedule="zb-h1")) == "tp1 dp1 pp2 zb-h1"
    small = smaller(config, 2)
    assert (small.layout.stages, small.schedule.file) == (None, None)
    assert [case.layout.pp for case in every_layout(config, 2)] == [2, 1, 1]


def test_a_row_without_a_schedule_keeps_the_configs_stages_and_program(folder: Path, tmp_path: Path) -> None:
    program, rows = tmp_path / "mine.csv", tmp_path / "rows.yaml"
    program.write_text(to_csv(schedule("gpipe", 2, 8)))
    rows.write_text("- {pp: 2}\n- {pp: 2, schedule: zb-h1}\n")
    config = job(folder, *PP2, "layout.stages=[1,5]", f"schedule.file={program}")
    assert [describe(case) for case in cases_from_file(rows, config)] == [
        "tp1 dp1 pp2 stages=1-5 mine",
        "tp1 dp1 pp2 zb-h1",
    ]
