"""`stretto schedule`: options of schedules, comparison, and the files it writes and reads."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from stretto.cli.schedule import options_from
from stretto.errors import StrettoError
from stretto.program import names, options
from stretto.program.replay import Costs
from stretto.view.trace import read_trace
from tiny_job import job_file

SMALL = ("1f1b", "--ranks", "2", "--microbatches", "4")
SIZE = SMALL[1:]
TITAN = ("--for", "torchtitan", "--write", "mine.csv")


def test_options_by_name_and_by_pair(stretto: CommandLine) -> None:
    named = stretto.json("schedule", "hanayo", *SIZE, "--waves", "2")
    assert named["stages"] == 8
    assert stretto.json("schedule", "hanayo", *SIZE, "--option", "waves=2") == named
    plain = stretto.json("schedule", "pipedream", *SIZE)
    synced = stretto.json("schedule", "pipedream", *SIZE, "--vertical-sync")
    assert plain["weight_versions"] == [2, 1]
    assert synced["weight_versions"] != plain["weight_versions"]
    assert stretto.json("schedule", "pipedream", *SIZE, "--option", "vertical-sync=yes") == synced
    assert stretto.json("schedule", "pipedream", *SIZE, "--option", "vertical_sync=false") == plain


def test_values_of_options() -> None:
    pairs = ["a=2", "b=0.5", "c=true", "d=zigzag", "some-name=no"]
    assert options_from({"chunks": None, "waves": 3}, None, pairs) == {
        "waves": 3,
        "a": 2,
        "b": 0.5,
        "c": True,
        "d": "zigzag",
        "some_name": False,
    }
    assert options_from({}, "4", []) == {"memory": 4}
    assert options_from({}, "4,3.5", []) == {"memory": [4, 3.5]}
    assert options_from({}, None, ["memory=2"]) == {"memory": 2}


def test_the_costs_reach_a_schedule_that_takes_them(
    monkeypatch: pytest.MonkeyPatch, stretto: CommandLine
) -> None:
    from stretto.program import schedule
    from stretto.program.schedules import registry

    seen: list[Any] = []

    def build(ranks: int, microbatches: int, costs: Costs | None = None, memory: object = None) -> object:
        seen.append((costs, memory))
        return schedule("1f1b", ranks, microbatches)

    entry = registry.RegisteredSchedule(
        name="cheap", about="", build=build, options={"costs": None, "memory": None}, numbers=frozenset()
    )  # type: ignore[arg-type]
    monkeypatch.setitem(registry._ENTRIES, "cheap", entry)
    arguments = ["schedule", "cheap", *SIZE, "--times", "F=2", "--memory", "4,3", "--json"]
    stretto(*arguments)
    assert seen == [(Costs(F=2), [4, 3])]


def test_list_shows_options(stretto: CommandLine) -> None:
    lines = {line.split()[0]: line for line in stretto("schedule", "--list").splitlines()}
    assert list(lines) == list(names())
    for name in names():
        assert all(option in lines[name] for option in options(name))
    assert "(options: chunks=2, group)" in lines["interleaved"]
    assert "options" not in lines["gpipe"]


def test_compare(tmp_path: Path, stretto: CommandLine) -> None:
    arguments = ["--compare", "gpipe,interleaved:chunks=4,zb-v", *SIZE]
    report = stretto.json("schedule", *arguments)
    assert [each["name"] for each in report["compared"]] == ["gpipe", "interleaved:chunks=4", "zb-v"]
    assert [each["stages"] for each in report["schedules"]] == [2, 8, 4]
    for short, schedule in zip(report["compared"], report["schedules"], strict=True):
        assert short["makespan"] == schedule["makespan"]
        assert short["bubble_rate"] == schedule["bubble"]["rate"]
        assert short["peak_activations"] == max(schedule["peak_activations"])
        assert short["transfers"] == schedule["transfers"]
    paths = [tmp_path / f"picture.{kind}" for kind in ("svg", "html")]
    shown = stretto("schedule", *arguments, "--svg", str(paths[0]), "--html", str(paths[1]))
    assert "schedule              makespan  bubble  peak activations  transfers" in shown
    assert all(f"wrote {path}" in shown for path in paths)
    assert "interleaved:chunks=4" in paths[0].read_text()
    assert paths[1].read_text().count('"title":') == 1 + 3  # of the page and of each timeline


def test_options_beside_compare_go_to_the_schedules_that_take_them(
    stretto: CommandLine,
) -> None:
    report = stretto.json("schedule", "--compare", "gpipe,interleaved,bfs:chunks=2", *SIZE, "--chunks", "3")
    assert [each["stages"] for each in report["schedules"]] == [2, 6, 4]


def test_every_file_at_once(tmp_path: Path, stretto: CommandLine) -> None:
    pytest.importorskip("resvg_py", reason="the extra png is not installed")
    kinds = ("svg", "png", "html", "write", "trace")
    paths = {kind: tmp_path / f"{kind}.csv" for kind in kinds}
    options = [word for kind in kinds for word in (f"--{kind}", str(paths[kind]))]
    stretto("schedule", *SMALL, *options)
    assert ET.parse(paths["svg"]).getroot().tag.endswith("svg")
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert paths["html"].read_text().startswith("<!doctype html>")
    assert paths["write"].read_text().startswith("0F0,0F1,0B0")
    assert len(read_trace(paths["trace"].read_text()).events) == 2 * 2 * 4


def test_programs_as_json_come_back_whole(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "mine.json"
    for name in ("dualpipe", "pipedream", "zb-v"):
        out = stretto.json("schedule", name, *SIZE, "--write", str(path))
        assert stretto.json("schedule", "--file", str(path)) == out
    assert stretto.json("schedule", "--file", str(path), "other")["name"] == "other"


@pytest.mark.parametrize("name", [pytest.param("mine.csv", marks=pytest.mark.slow), "mine.json"])
def test_a_written_program_is_trained_equal_to_one_process(
    name: str, tmp_path: Path, stretto: CommandLine
) -> None:
    path, config = tmp_path / name, job_file(tmp_path)
    size = ("--ranks", "2", "--microbatches", "4")
    assert f"stretto train CONFIG schedule.file={path} layout.pp=2" in stretto(
        "schedule", "zb-v", *size, "--write", str(path)
    )
    sizes = ["layout.pp=2", "model.layers=4", "batch.global_size=4", f"schedule.file={path}"]
    (case,) = stretto.json("verify", str(config), *sizes)["layouts"]
    assert case["equal"], case


def test_an_edited_program_with_a_fault_names_rank_place_and_rule(
    tmp_path: Path, stretto: CommandLine
) -> None:
    path, config = tmp_path / "mine.csv", job_file(tmp_path)
    stretto("schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "--write", str(path))
    good = path.read_text()
    assert good == "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    faults = {
        good.replace("1F1,1B1", "1B1,1F1"): "rank 1 action 2 is 1B1, before 1F1 on the same rank",
        good.replace("1F1", "1F0"): "rank 1 action 2 is 1F0, which is in the program twice",
        good.replace(",0B3", ""): "rank 0 never does 0B3",
        good.replace("0F1", "0Q1"): "line 1 column 5: '0Q1'",
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n": "deadlock: rank 0 waits at 0B0 for 1B0, which rank 1 reaches "
        "only after 1F1; rank 1 waits at 1F1 for 0F1",
    }
    for text, message in faults.items():
        path.write_text(text)
        sizes = ["layout.pp=2", "batch.global_size=4", f"schedule.file={path}"]
        assert f"error: schedule.file is {path}: {message}" in stretto.error("train", str(config), *sizes)


@pytest.mark.parametrize(("unit", "factor"), [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)])
def test_the_unit_of_time_of_a_trace(unit: str, factor: float, tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "trace.json"
    stretto("schedule", *SMALL, "--trace", str(path), "--time-unit", unit)
    assert max(event.end for event in read_trace(path.read_text()).events) == pytest.approx(15 * factor)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ([*SMALL, "--waves", "2"], "waves is 2, but schedule '1f1b'", "hanayo"),
        ([*SMALL, "--option", "waves"], "'waves', must be NAME=VALUE", "waves=2"),
        (["hanayo", *SIZE, "--waves", "2", "--option", "waves=2"], "waves is given twice", "once"),
        ([*SMALL, "--memory", "much"], "memory is 'much'", "--memory 4"),
        ([*SMALL, "--time-unit", "m"], "--time-unit is 'm'", "did you mean 'ms'?"),
        (["--compare", "gpipe,1f1c", *SIZE], "'1f1c'", "1f1b"),
        (["--compare", " , ", *SIZE], "--compare names no schedule", "gpipe,1f1b"),
        (["zb-v", "--compare", "gpipe", *SIZE], "zb-v beside it", "--compare zb-v,gpipe"),
        (["--compare", "gpipe,1f1b", *SIZE, "--chunks", "3"], "none of the schedules", "leave --chunks out"),
        (["--compare", "gpipe,1f1b", *SIZE, "--write", "x.csv"], "--write writes one program", "--svg"),
        (["--compare", "gpipe,bfs:chunks", *SIZE], "'chunks', must be NAME=VALUE", "waves=2"),
        ([*SMALL, "--trace", "no/such/folder/t.json"], "cannot write", "folder that exists"),
        ([*SMALL, "--html", "no/such/folder/t.html"], "cannot write", "folder that exists"),
        ([*SMALL, "--write", "mine.txt"], "ends in neither .csv nor .json", "--write mine.csv"),
        (["dualpipe", *SIZE, "--write", "mine.csv"], "dualpipe has several copies", "--write mine.json"),
        (["--file", "a.csv", "--waves", "2"], "a.csv is a whole program", "leave --waves out"),
        ([*SMALL, "--for", "torchtitn"], "--for is 'torchtitn'", "did you mean 'torchtitan'"),
        ([*SMALL, "--for", "torch"], "--for torch needs one program and its file", "--write mine.csv"),
        ([*SMALL, *TITAN], "needs the layers of each stage", "--layers 32"),
        ([*SMALL, *TITAN, "--stages", "3,x"], "--stages is '3,x'", "7,7,7,5"),
        ([*SMALL, *TITAN, "--stages", "3,3,3"], "--stages has 3 stages, the program 2", "2 numbers"),
        ([*SMALL, *TITAN, "--stages", "1,1"], "stages of 1, 1 layers", "count the embedding"),
        (["zb-v", *SIZE, *TITAN, "--layers", "1"], "too few for 4 stages", "--layers 2"),
        ([*SMALL, "--layers", "4"], "cut a model of torchtitan", "--for torchtitan"),
        ([*SMALL, *TITAN, "--layers", "4", "--lowered"], "has communication", "leave --lowered out"),
        (["hanayo", *SIZE, "--waves", "2", *TITAN, "--layers", "9"], "places them round-robin", "zb-v"),
        (["dualpipe", *SIZE, *TITAN, "--layers", "9"], "has 2 copies", "synchronous schedule"),
        (["forward-only", *SIZE, *TITAN, "--layers", "9"], "has forwards only", "synchronous schedule"),
    ],
)
def test_bad_input(arguments: list[str], error: str, hint: str, stretto: CommandLine) -> None:
    first, second = stretto.error("schedule", *arguments).splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert hint in second


def test_a_bad_option_in_compare_is_refused() -> None:
    with pytest.raises(StrettoError, match="must be NAME=VALUE"):
        options_from({}, None, ["=3"])


@pytest.mark.parametrize(
    ("name", "scheduler", "cut"),
    [
        ("1f1b", "PipelineScheduleMulti", ("--stages", "5,3")),
        ("interleaved", "PipelineScheduleMulti", ("--layers", "6")),
        ("zb-v", "ZBVZeroBubble", ("--layers", "6")),
        ("hanayo", "ZBVZeroBubble", ("--stages", "1,2,3,2")),
    ],
)
def test_for_torchtitan(
    tmp_path: Path, stretto: CommandLine, name: str, scheduler: str, cut: tuple[str, ...]
) -> None:
    """Held to torchtitan 0.3.0's rules: pipeline_parallel.py, _get_pp_rank_to_stage_indices_mapping and
    _pipeline_module_split.
    """
    path = tmp_path / "mine.csv"
    arguments = (name, *SIZE, "--for", "torchtitan", *cut, "--write", str(path))
    report = stretto.json("schedule", *arguments)["for"]
    modules = json.loads((tmp_path / "mine.modules.json").read_text())
    assert report["module_fqns_per_model_part"] == modules
    assert [name for stage in modules for name in stage] == [
        "tok_embeddings",
        *(f"layers.{i}" for i in range(6)),
        "norm",
        "lm_head",
    ]
    if cut[0] == "--stages":
        layers = [len([n for n in stage if n != "norm"]) for stage in modules]
        assert ",".join(map(str, layers)) == cut[1]
    # the stages that torchtitan builds on each rank are those of the rank's row
    stages, ranks = len(modules), 2
    assert report["pipeline_parallel_schedule"] == scheduler
    for rank, row in enumerate(path.read_text().splitlines()):
        vee = (rank, stages - 1 - rank)
        built = vee if scheduler == "ZBVZeroBubble" else tuple(range(rank, stages, ranks))
        assert {int(re.match(r"\d+", cell)[0]) for cell in row.replace("(", "").split(",")} == set(built)
    printed = stretto("schedule", *arguments)
    assert f'config.parallelism.pipeline_parallel_schedule = "{scheduler}"' in printed
    assert f"# training.local_batch_size = {SMALL[-1]} x" in printed


def test_for_torch_and_back(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "mine.csv"
    printed = stretto("schedule", "zb-v", *SIZE, "--for", "torch", "--write", str(path))
    assert "# stages by rank: rank 0: 0, 3; rank 1: 1, 2" in printed
    assert f"schedule._load_csv({str(path)!r})" in printed
    assert stretto.json("schedule", str(path))["orders"] == stretto.json("schedule", "zb-v", *SIZE)["orders"]


OWN = """
from stretto import Action, ActionKind, Program, register


@register("lifo", "gpipe, the newest microbatch first")
def lifo(ranks: int, microbatches: int) -> Program:
    forward = range(microbatches)
    orders = tuple(
        (
            *(Action(rank, ActionKind.F, i) for i in forward),
            *(Action(rank, ActionKind.B, i) for i in reversed(forward)),
        )
        for rank in range(ranks)
    )
    return Program(name="lifo", placement=tuple(range(ranks)), microbatches=microbatches, orders=orders)


def stuck(ranks: int, microbatches: int) -> Program:
    program = lifo(ranks, microbatches)
    return Program(
        name="stuck",
        placement=program.placement,
        microbatches=microbatches,
        orders=tuple(tuple(reversed(order)) for order in program.orders),
    )


def number(ranks: int, microbatches: int) -> int:
    return 3


def other(ranks: int, microbatches: int, costs: float) -> int:
    return 3
"""


def test_a_schedule_in_a_file_of_the_users(
    tmp_path: Path, stretto: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stretto.program.schedules import registry

    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))  # nothing stays registered
    path = tmp_path / f"own_{tmp_path.name}.py"
    path.write_text(OWN)
    own = stretto.json("schedule", f"{path}:lifo", *SIZE)
    assert own["name"] == "lifo"
    assert own["makespan"] == stretto.json("schedule", "gpipe", *SIZE)["makespan"]
    stretto("schedule", f"{path}:lifo", *SIZE, "--write", str(tmp_path / "own.csv"))
    compared = stretto.json(
        "schedule", "--compare", f"1f1b,{path}:lifo,{tmp_path}/own.csv,interleaved:chunks=2", *SIZE
    )
    names_of = [each["name"] for each in compared["compared"]]
    assert names_of == ["1f1b", "lifo", "own", "interleaved:chunks=2"]
    for function, message in (
        ("number", "returned int, must return a Program"),
        ("other", "takes other arguments than (ranks, microbatches)"),
        ("lift", "did you mean 'lifo'"),
        ("stuck", "is 0B0, before 0F0 on the same rank"),
    ):
        assert message in stretto.error("schedule", f"{path}:{function}", *SIZE)
