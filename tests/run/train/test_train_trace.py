"""Traced steps: every action of every rank, once, and a replay at the costs that were measured."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Pipeline
from stretto.program import lower
from stretto.program.replay import Costs, simulate
from stretto.run.config.job import job_of
from stretto.run.train import prediction
from stretto.run.train.trace import busiest, gather, replay, start, step_parts, waiting_text, write
from stretto.view.measured import seconds
from stretto.view.trace import TraceEvent, read_trace, trace_of
from tiny_job import LLAMA, job
from train_runs import train

WIDTH = 4


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "interleaved", "pipedream"])
def test_the_replay_at_the_times_of_a_replay_is_that_replay(name: str):
    program = lower(schedule(name, 4, 8))
    uneven = [(1.0 + s % 3, 2.0, 1.0 + 0.25 * (s % 2)) for s in range(program.depth)]
    shown = simulate(program, Costs(per_stage=uneven, hop=0.125))
    again = replay(program, trace_of(shown, second=1.0).events)
    assert again.makespan <= shown.makespan  # a trace has no latency where no rank waited
    without = simulate(program, Costs(per_stage=uneven))
    events = trace_of(without, second=1.0).events
    assert replay(program, events).makespan == pytest.approx(without.makespan)


def traced(layout: Layout, name: str, folder: Path) -> tuple[list[float], list[float], str | None]:
    """Losses with and without a recorder, and the report of rank 0."""
    mesh, program = Mesh(layout), schedule(name, layout.pp, 4)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(program.depth)]
    pipe = Pipeline(layers, program, mesh, squares)
    data = [torch.randn(2, WIDTH, dtype=torch.float64) for _ in range(4)]
    plain = pipe.step(data, data)
    recorder = start(mesh)
    watched = pipe.step(data, data, recorder=recorder)
    pipelines = gather(recorder, mesh)
    table = None
    if pipelines is not None:
        assert len(pipelines) == layout.dp
        for events in pipelines:
            done = sorted((e.rank, e.action) for e in events if not e.action.startswith(("the ", "wait ")))
            wanted = [(rank, str(a)) for rank, order in enumerate(pipe.program.orders) for a in order]
            if program.copies == 1:
                assert done == sorted(wanted)
            assert all(0 <= e.start <= e.end for e in events)
        report = write("a test", folder, 7, pipe.program, pipelines)
        trace = read_trace(report.trace.read_text())
        assert trace.source == "measured"
        assert len(trace.events) == len(pipelines[0])
        assert read_trace(report.predicted.read_text()).source == "replay"
        assert "predicted" in report.page.read_text()
        table = report.text
    pipe.close()
    mesh.close()
    losses = [[] if x is None else x.tolist() for x in (plain, watched)]
    return losses[0], losses[1], table


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_a_step_is_recorded_whole_and_computes_the_same(tmp_path: Path, name: str):
    results = on_ranks(4, traced, Layout(pp=2, dp=2), name, tmp_path)
    assert any(plain for plain, _, _ in results)
    for plain, watched, _ in results:
        assert plain == watched
    text = results[0][2]
    assert text is not None
    assert "F forward" in text
    assert "data (reductions and gathers)" in text
    assert text.splitlines()[1].split()[-1] == "step"
    assert sorted(p.name for p in (tmp_path / "trace").iterdir()) == [
        "step-7.json",
        "step-7.pipeline-1.json",
        "step-7.predicted.json",
    ]


def test_one_process(tmp_path: Path):
    traced(Layout(), "gpipe", tmp_path)
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "overrides",
    [("layout.pp=2", "schedule.name=zb-h1"), ("layout.pp=2", "schedule.name=pipedream", "optim.clip=null")],
)
def test_a_run_reports_its_traced_step(tmp_path: Path, overrides: tuple[str, ...]):
    config = job(tmp_path, *overrides, "metrics.trace=2", "train.steps=3", "sample.tokens=0", model=LLAMA)
    train(config)
    run = config.run.folder
    assert (run / "trace" / "step-2.json").exists()
    page = (run / "report.html").read_text()
    assert f"{config.run.name}, llama on " in page
    assert platform.node() in page
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row.get("mfu") for row in rows} == {None}, "a CPU's peak is not known"
    measured = read_trace((run / "trace" / "step-2.json").read_text()).events
    assert {e.rank for e in measured} == {0, 1}
    asynchronous = "schedule.name=pipedream" in overrides
    for rank in (0, 1):
        calls = {e.action for e in measured if e.rank == rank}
        assert {"the batch", "the agreement", "the reductions"} <= calls
        assert ("the update" in calls) is not asynchronous


@pytest.mark.parametrize(
    "overrides",
    [
        ("layout.pp=2", "layout.dp=2", "schedule.name=1f1b"),
        ("layout.tp=2", "recompute.mode=full"),
        ("layout.pp=2", "schedule.name=pipedream", "optim.clip=null"),
    ],
)
def test_the_parts_of_a_traced_step_are_the_step_and_the_run_s_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # no profile of this machine
    config = job(tmp_path, *overrides, "metrics.trace=2", "train.steps=2", "sample.tokens=0", model=LLAMA)
    train(config)
    run = config.run.folder
    measured = read_trace((run / "trace" / "step-2.json").read_text()).events
    expected = prediction.predict(job_of(config), config.train.device, config.train.threads)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["bubble"] == expected.bubble
    assert f'"{seconds(expected.seconds)}"' in (run / "report.html").read_text()
    for rank in {event.rank for event in measured}:
        events = [event for event in measured if event.rank == rank]
        parts = {part.name: part for part in step_parts(events, expected)}
        outer = [part for part in parts.values() if not part.within]
        assert sum(part.measured or 0.0 for part in outer) == pytest.approx(max(e.end for e in events))
        assert sum(part.predicted or 0.0 for part in outer) == pytest.approx(expected.seconds)
        assert all((part.measured or 0.0) >= 0 for part in outer)
        assert parts["optimiser"].measured
        assert parts["reading the batch"].measured
        forwards = sum(e.end - e.start for e in events if re.fullmatch(r"\d+F\d+", e.action))
        assert parts["forward"].measured == pytest.approx(forwards)
    shown = read_trace((run / "trace" / "step-2.predicted.json").read_text()).events
    if "schedule.name=pipedream" not in overrides:  # its updates come within the program
        outside = sum(expected.parts.get(name, 0.0) for name in ("data", "optimiser", "offload"))
        assert max(e.end for e in shown) == pytest.approx(expected.seconds - outside)


def test_measured_parts_are_of_the_rank_whose_parts_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    config = job(tmp_path, "layout.pp=2", "schedule.name=1f1b", model=LLAMA)
    expected = prediction.predict(job_of(config), config.train.device, config.train.threads)
    program = lower(schedule("1f1b", 2, 4))
    slow_first = Costs(per_stage=[(9.0, 9.0, 9.0), (1.0, 1.0, 1.0)])
    events = trace_of(simulate(program, slow_first), second=1.0).events
    assert busiest(events) == 0
    text = write("a test", tmp_path, 2, program, [events], expected).text
    assert text.startswith("pipeline rank 1, predicted busiest:\n"), "it has the output layer"
    assert "forward" in text.splitlines()[2]
    assert " 4 s " in text.splitlines()[2]
    text = write("a test", tmp_path, 2, program, [events]).text
    assert text.startswith("pipeline rank 0, the busiest:\n")


def test_the_busiest_rank_computes_for_longest() -> None:
    events = [
        TraceEvent(0, "0F0", 0, 1),
        TraceEvent(1, "1F0", 1, 3),
        TraceEvent(0, "the batch", 3, 9, "other"),
    ]
    assert busiest(events) == 1


@pytest.mark.parametrize(
    ("measured", "replayed", "says"),
    [
        (2.0, 1.5, "25.0% of the time from the first to the last action is not in it (late messages)"),
        (1.0, 1.141, "14.1% longer than from the first to the last action"),
    ],
)
def test_a_replay_longer_than_the_step_is_not_reported_as_waiting(
    measured: float, replayed: float, says: str
) -> None:
    assert waiting_text(measured, replayed).endswith(says)
