"""Output fits the terminal and the reader: colours, widths, lengths, suggested next commands."""

from __future__ import annotations

import io
import shlex

import pytest
from rich.console import Console
from rich.text import Text

from stretto import schedule, simulate
from stretto.cli import plan, predict, train
from stretto.cli.output import coloured, print_error
from stretto.cli.report import CommandReport
from stretto.cli.schedule import ReplayOptions, _add_timeline
from stretto.errors import LONGEST
from stretto.job.presets import preset
from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.search import search
from stretto.planner.search.task import SearchTask, job_to_plan
from stretto.run.config.load import load


def terminal(width: int = 120, colours: bool = True) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        width=width,
        no_color=not colours,
        highlight=False,
    )


def printed(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_an_error_of_megabytes_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("value is " + "x" * 3_000_000 + ", must be a number", "short")
    error, hint = capsys.readouterr().err.splitlines()
    assert len(error) < LONGEST + 100
    assert error.startswith("error: value is xxx")
    assert error.endswith("xxx, must be a number")
    assert " characters ...]" in error
    assert hint == "hint: short"


def test_blocks_are_lettered_where_colours_are_not_shown() -> None:
    timeline = simulate(schedule("1f1b", 2, 2))
    assert coloured(terminal())
    assert not coloured(terminal(colours=False))
    assert not coloured(Console(file=io.StringIO()))
    plain = terminal(colours=False)
    report = CommandReport({})
    _add_timeline(report, timeline, ReplayOptions())
    report.render(plain)
    assert "F0" in printed(plain)
    assert "B1" in printed(plain)


def test_a_plan_never_cuts_a_number() -> None:
    job = job_to_plan(shape=preset("gpt2"), global_batch=64, sequence=1024)
    task = SearchTask(job=job, cluster=find_cluster("a100:8"), seconds=3.0)
    result = search(task)
    assert result.ranking
    wide, narrow = terminal(width=160, colours=False), terminal(width=80, colours=False)
    for to in (wide, narrow):
        report = CommandReport({})
        plan.add_plan(report, result, task)
        report.render(to)
        text = printed(to)
        assert "…" not in text
        for row in result.ranking:
            assert f"{row.estimate.tokens_per_s:,.0f}" in text
            assert f"{row.estimate.seconds:.4g}" in text
    assert "interval" in printed(wide)
    head = next(line for line in Text.from_ansi(printed(narrow)).plain.splitlines() if "tokens/s" in line)
    assert len(head) <= 80


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_prediction_is_never_cut(width: int) -> None:
    to = terminal(width=width, colours=False)
    row = predict.run_from_arguments(["dp=8", "batch=64"], "gpt2-large", "dgx-a100-80gb:8")
    report = CommandReport({})
    predict.add_estimate(report, estimate(row.job, row.cluster, row.assumptions), row.defaults)
    report.render(to)
    text = printed(to)
    assert "where the time goes" in text
    assert "…" not in text


def test_suggested_commands_keep_the_overrides() -> None:
    fields = ["train.steps=3", "sample.prompt=a b", "run.name=taken"]
    arguments = train.job_arguments("configs/quickstart.yaml", fields)
    assert arguments == "configs/quickstart.yaml train.steps=3 'sample.prompt=a b'"
    commands = train.next_commands(load("configs/quickstart.yaml", fields), arguments, writes=True)
    assert f"stretto verify {arguments} --layouts all" in commands
    assert any(command.startswith(f"stretto train {arguments} layout.") for command in commands)


def test_another_layout_replaces_the_configured_one() -> None:
    """Also the cut of its stages, and it does not resume the run that has ended."""
    fields = ["layout.tp=2", "layout.dp=1", "layout.pp=2", "layout.stages=[3,3]", "checkpoint.resume=auto"]
    path = "configs/quickstart.yaml"
    commands = train.next_commands(load(path, fields), train.job_arguments(path, fields), writes=True)
    suggested = next(command for command, purpose in commands.items() if "on another layout" in purpose)
    overrides = shlex.split(suggested)[3:]
    assert [field.partition("=")[0] for field in overrides].count("layout.tp") == 1
    other = load(path, overrides)
    assert (other.layout.stages, other.checkpoint.resume) == (None, "never")
    assert other.layout.to_layout().world == 4


def test_layouts_that_experts_do_not_fit_are_not_suggested() -> None:
    path = "configs/moe-tiny.yaml"
    assert f"stretto verify {path} --layouts all" in train.next_commands(load(path), path, writes=True)
