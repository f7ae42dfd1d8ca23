"""The studio's answers about runs: what a folder has, what grows, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from run_folders import HOSTILE, append, step, write_run
from stretto.errors import StrettoError
from stretto.run.launch.lease import lease
from stretto.view.trace import COMMUNICATION, Trace, TraceEvent, write_trace
from stretto.web.folder import StudioFolder
from stretto.web.jobs import StudioJobs, config_arguments
from stretto.web.runs import Runs


def runs_of(root: Path) -> Runs:
    folder = StudioFolder(root)
    return Runs(folder, StudioJobs(folder), Event())


def newest(answers: Iterator[Any]) -> Any:
    """The next answer with something new in it."""
    return next(answer for answer in answers if answer is not None)


def lines(answer: Any, title: str) -> dict[str, Any]:
    """The lines of a plot by their labels: steps and values."""
    (plot,) = [plot for plot in answer["plots"] if plot["title"] == title]
    return {line["label"]: (line["x"], line["y"]) for line in plot["lines"]}


def test_a_run_grows_while_it_is_watched(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", step(1))
    answers = runs_of(tmp_path).watch({"selected": ["runs/a"]})
    first = next(answers)
    assert first is not None
    (summary,) = first["runs"]
    assert (summary["name"], summary["state"], summary["step"], summary["steps"]) == (
        "runs/a",
        "stopped",
        1,
        4,
    )
    assert lines(first, "loss") == {"runs/a": ([1], [4.0])}
    assert next(answers) is None
    append(run, step(2), step(3, loss="NaN"), {"step": "no"}, step(4))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5')  # a line that is being written
    grown = newest(answers)
    assert lines(grown, "loss") == {"runs/a": ([1, 2, 3, 4], [4.0, 3.0, None, 1.0])}
    assert grown["runs"][0]["state"] == "finished"


def test_a_run_of_an_address_may_come_later(tmp_path: Path) -> None:
    answers = runs_of(tmp_path).watch({"selected": ["runs/a"]})
    first = next(answers)
    assert first is not None
    assert (first["runs"], first["plots"]) == ([], [])
    write_run(tmp_path, "a", step(1))
    assert lines(newest(answers), "loss") == {"runs/a": ([1], [4.0])}


def test_records_that_a_resumed_run_drops_vanish(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", step(1), step(2), step(3))
    answers = runs_of(tmp_path).watch({"selected": ["runs/a"]})
    next(answers)
    rewritten = run / "metrics.jsonl.new"
    rewritten.write_text(json.dumps(step(1)) + "\n")
    rewritten.replace(run / "metrics.jsonl")
    assert lines(newest(answers), "loss") == {"runs/a": ([1], [4.0])}


def test_a_search_that_ends_early_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.web.folder.MOST_FOLDERS", 4)
    monkeypatch.setattr("stretto.web.runs.MOST_FOLDERS", 4)
    write_run(tmp_path, "a", step(1))
    assert newest(runs_of(tmp_path).watch({}))["most_folders"] is None
    for name in "bcd":
        write_run(tmp_path, name, step(1))
    answer = newest(runs_of(tmp_path).watch({}))
    assert answer["most_folders"] == 4
    assert len(answer["runs"]) == 2


def test_several_runs_share_plots_and_long_ones_are_means(tmp_path: Path) -> None:
    write_run(tmp_path, "long", *(step(n, loss=float(n % 2)) for n in range(1, 4001)))
    write_run(tmp_path, "short", step(1), step(2))
    answer = newest(runs_of(tmp_path).watch({"selected": ["runs/long", "runs/short"]}))
    drawn = lines(answer, "loss")
    assert drawn["runs/short"] == ([1, 2], [4.0, 3.0])
    steps, values = drawn["runs/long"]
    assert len(steps) == len(values) <= 1500
    assert steps[-1] == 4000
    assert sum(values[:-1]) / len(values[:-1]) == pytest.approx(0.5, abs=0.01)
    assert answer["steps_of_a_point"] == 3
    strokes = {line["stroke"] for line in answer["plots"][0]["lines"]}
    assert len(strokes) == 2


def test_held_out_loss_memory_of_ranks_and_a_recommender(tmp_path: Path) -> None:
    memory = {"memory/host_max_gib": 2.0, "memory/host_gib/rank_0": 1.0, "memory/host_gib/rank_1": 2.0}
    run = write_run(tmp_path, "a", step(1, memory=memory))
    append(run, {"step": 1, "loss": 4.5}, name="eval.jsonl")
    clicks = write_run(tmp_path, "clicks", {"step": 1, "loss": 0.5, "lr_tables": 1.0, "samples_per_s": 7.0})
    append(clicks, {"step": 1, "auc": 0.75, "logloss": 0.4, "entropy": 0.9}, name="eval.jsonl")
    runs = runs_of(tmp_path)
    update = newest(runs.watch({"selected": ["runs/a"]}))
    assert lines(update, "loss")["runs/a, held out"] == ([1], [4.5])
    assert lines(update, "memory of the host, peak") == {"rank 0": ([1], [1.0]), "rank 1": ([1], [2.0])}
    both = newest(runs.watch({"selected": ["runs/a", "runs/clicks"]}))
    assert lines(both, "memory of the host, peak") == {"runs/a, fullest rank": ([1], [2.0])}
    assert lines(both, "AUC") == {"runs/clicks": ([1], [0.75])}
    assert lines(both, "log loss") == {"runs/clicks": ([1], [0.4])}
    assert lines(both, "samples per second") == {"runs/clicks": ([1], [7.0])}
    assert [run["unit"] for run in both["runs"]] == ["tokens/s", "samples/s"]


def test_configs_are_compared_field_by_field(tmp_path: Path) -> None:
    write_run(tmp_path, "a", config="run: {name: a}\noptim: {lr: 1e-2}\ny: null\nlayout: {tp: 2, pp: 2}\n")
    write_run(
        tmp_path, "b", config=f"run: {{name: b}}\noptim: {{lr: 1e-3}}\nlayout: {{tp: 2}}\nx: '{HOSTILE}'\n"
    )
    runs = runs_of(tmp_path)
    rows = runs.config({"names": ["runs/a", "runs/b"]})["differences"]
    assert rows[0] == ["field", "runs/a", "runs/b"]
    assert rows[1:] == [["optim.lr", "0.01", "0.001"], ["layout.pp", "2", ""], ["x", "", HOSTILE]]
    assert runs.config({"names": ["runs/a"]})["differences"] == []
    assert newest(runs.watch({}))["runs"][0]["ranks"] == 4


def test_a_run_that_a_job_holds_trains(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", step(1))
    runs = runs_of(tmp_path)
    with lease(run):
        assert newest(runs.watch({}))["runs"][0]["state"] == "trains"
        with pytest.raises(StrettoError, match="trains already"):
            runs.resume({"name": "runs/a"})
    assert newest(runs.watch({}))["runs"][0]["state"] == "stopped"
    with pytest.raises(StrettoError, match="no process of this machine trains"):
        runs.stop({"name": "runs/a"})


def test_a_lease_left_behind_ends_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process number is in use again, by this test."""
    monkeypatch.setattr(os, "kill", lambda process, number: number == 0)
    run = write_run(tmp_path, "a", step(1))
    with lease(run):
        left = (run / "lease.json").read_bytes()
    (run / "lease.json").write_bytes(left)
    with pytest.raises(StrettoError, match="no process of this machine trains"):
        runs_of(tmp_path).stop({"name": "runs/a"})


@pytest.mark.parametrize(
    "name", ["..", "../outside", "/etc", "runs/link", "runs/a/../../..", "\0", None, 3, ["x"]]
)
def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, name: Any) -> None:
    outside = write_run(tmp_path / "elsewhere", "secret", step(1))
    inside = tmp_path / "inside"
    write_run(inside, "a", step(1))
    (inside / "runs" / "link").symlink_to(outside)
    runs = runs_of(inside)
    for ask in (runs.resume, runs.stop, runs.hang):
        with pytest.raises(StrettoError):
            ask({"name": name})
    for question in ({"names": [name]}, {"selected": [name]}):
        with pytest.raises(StrettoError):
            next(iter([runs.config(question)]) if "names" in question else runs.watch(question))
    with pytest.raises(StrettoError):
        runs.start({"config": name})
    assert [run["name"] for run in newest(runs.watch({}))["runs"]] == ["runs/a"]


def test_files_of_a_run_that_lead_outside_are_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "secret.yaml"
    outside.write_text("optim: {lr: 1}\n")
    run = write_run(tmp_path / "inside", "a", step(1))
    os.mkfifo(run / "eval.jsonl")  # reading it would not end
    (tmp_path / "inside" / "linked.yaml").symlink_to(outside)
    runs = runs_of(tmp_path / "inside")
    assert newest(runs.watch({"selected": ["runs/a"]}))["runs"][0]["steps"] == 4
    for name in ("config.yaml", "metrics.jsonl"):
        (run / name).unlink()
        (run / name).symlink_to(outside)
        with pytest.raises(StrettoError, match=r"not in the studio's folder|is no run"):
            runs.config({"names": ["runs/a"]})
    assert newest(runs.watch({}))["runs"] == []
    assert runs.questions["configs"]({}) == {"configs": []}


@pytest.mark.parametrize("overrides", ["--help", "optim.lr", "=3", "a=1 --resume auto", "'a=1"])
def test_overrides_are_fields_alone(tmp_path: Path, overrides: str) -> None:
    (tmp_path / "-a.yaml").write_text("train: {}\n")
    folder = StudioFolder(tmp_path)
    assert config_arguments(folder, "-a.yaml", "a.b=c d='e f'") == ["./-a.yaml", "a.b=c", "d=e f"]
    with pytest.raises(StrettoError):
        config_arguments(folder, "-a.yaml", overrides)


def test_a_measured_step_has_lanes_and_gaps_by_cause(tmp_path: Path) -> None:
    """All time of a rank is computation or a gap with a cause."""
    run = write_run(tmp_path, "a", step(1))
    (run / "trace").mkdir()
    measured = [
        TraceEvent(0, "the batch", 0.0, 1.0, COMMUNICATION),
        TraceEvent(0, "0F0", 1.5, 2.5),
        TraceEvent(0, "0SEND_F0", 2.5, 2.75, COMMUNICATION),
        TraceEvent(0, "wait 0B0", 2.75, 4.0, COMMUNICATION),
        TraceEvent(0, "0B0", 4.0, 6.0),
        TraceEvent(0, "the reductions", 6.0, 7.0, COMMUNICATION),
        TraceEvent(0, "the agreement", 7.0, 7.5, COMMUNICATION),
        TraceEvent(0, "the update", 7.5, 8.0, COMMUNICATION),
    ]
    predicted = [TraceEvent(0, "0F0", 0.0, 0.5), TraceEvent(0, "0B0", 0.5, 1.5)]
    for events, name, source in ((measured, "step-3", "measured"), (predicted, "step-3.predicted", "replay")):
        (run / "trace" / f"{name}.json").write_text(write_trace(Trace(tuple(events), "1f1b", source)))
    runs = runs_of(tmp_path)
    assert newest(runs.watch({}))["runs"][0]["traces"] == [3]
    answer: Any = runs.questions["run-trace"]({"name": "runs/a", "step": 3})
    assert [row[1:4] for row in answer["gaps"][1:]] == [
        ("wait for a message", "1", "1.25 s"),
        ("sending and posting messages", "1", "250 ms"),
        ("reductions and gathers", "1", "1 s"),
        ("optimiser", "1", "500 ms"),
        ("reading the batch", "1", "1 s"),
        ("agreeing on the loss", "1", "500 ms"),
        ("not timed: Python and the system", "1", "500 ms"),
    ]
    (panel,) = answer["timelines"]["panels"]
    lanes = ["predicted", "measured", "messages", "reductions", "optimiser", "other calls"]
    assert panel["rows"] == [f"rank 0 {lane}" for lane in lanes]
    drawn = {
        (panel["rows"][row], panel["name"][i] or panel["stage"][i], start, end)
        for i, (row, start, end) in enumerate(zip(panel["row"], panel["start"], panel["end"], strict=True))
    }
    assert ("rank 0 predicted", 0, 1500.0, 2000.0) in drawn
    assert ("rank 0 measured", 0, 1500.0, 2500.0) in drawn
    assert ("rank 0 measured", "not timed: Python and the system", 1000.0, 1500.0) in drawn
    assert ("rank 0 messages", "wait 0B0", 2750.0, 4000.0) in drawn
    assert ("rank 0 reductions", "the reductions", 6000.0, 7000.0) in drawn
    assert ("rank 0 optimiser", "the update", 7500.0, 8000.0) in drawn
    with pytest.raises(StrettoError):
        runs.questions["run-trace"]({"name": "runs/a", "step": 4})
