"""Traced steps: every action of every rank, once, and a replay at the costs that were measured."""

from __future__ import annotations

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
from stretto.run.train.trace import gather, predict, start, waiting_text, write
from stretto.view.trace import read_trace, trace_of
from tiny_job import LLAMA, job
from train_runs import train

WIDTH = 4


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "interleaved", "pipedream"])
def test_the_prediction_from_a_replay_is_that_replay(name: str):
    program = lower(schedule(name, 4, 8))
    uneven = [(1.0 + s % 3, 2.0, 1.0 + 0.25 * (s % 2)) for s in range(program.depth)]
    shown = simulate(program, Costs(per_stage=uneven, hop=0.125))
    again = predict(program, trace_of(shown, second=1.0).events)
    assert again.makespan <= shown.makespan  # a trace has no latency where no rank waited
    without = simulate(program, Costs(per_stage=uneven))
    events = trace_of(without, second=1.0).events
    assert predict(program, events).makespan == pytest.approx(without.makespan)


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
        report = write(folder, 7, pipe.program, pipelines)
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
    assert results[0][2] is not None
    assert "F forward" in results[0][2]
    assert "step" in results[0][2]
    assert sorted(p.name for p in (tmp_path / "trace").iterdir()) == [
        "step-7.json",
        "step-7.pipeline-1.json",
        "step-7.predicted.json",
    ]


def test_one_process(tmp_path: Path):
    traced(Layout(), "gpipe", tmp_path)
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "words",
    [("layout.pp=2", "schedule.name=zb-h1"), ("layout.pp=2", "schedule.name=pipedream", "optim.clip=null")],
)
def test_a_run_reports_its_traced_step(tmp_path: Path, words: tuple[str, ...]):
    config = job(tmp_path, *words, "metrics.trace=2", "train.steps=3", "sample.tokens=0", model=LLAMA)
    train(config)
    run = config.run.folder
    assert (run / "trace" / "step-2.json").exists()
    assert (run / "report.html").exists()
    measured = read_trace((run / "trace" / "step-2.json").read_text())
    assert {e.rank for e in measured.events} == {0, 1}


@pytest.mark.parametrize(
    ("measured", "replayed", "says"),
    [
        (2.0, 1.5, "25.0% of the step is not in the replay (waiting, messages)"),
        (1.0, 1.141, "14.1% of the step longer than measured"),
    ],
)
def test_a_replay_longer_than_the_step_is_not_reported_as_waiting(
    measured: float, replayed: float, says: str
) -> None:
    assert waiting_text(measured, replayed).endswith(says)
