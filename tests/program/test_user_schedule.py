"""Schedules in users' files: accepted wherever a schedule's name is, checked, and never silently another."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.presets import find_shape
from stretto.layout.layout import Layout
from stretto.planner.search.fixed import fixed
from stretto.planner.search.space import depth_of
from stretto.planner.search.task import ScheduleChoice
from stretto.program import lower, options, schedule
from stretto.program.schedules.traits import trains, updates_within
from stretto.program.text import to_csv

SOURCE = """
from dataclasses import replace
from stretto import Program, schedule

def lifo(ranks, microbatches, first=0, flip=True):
    ms = range(microbatches)
    back = [*reversed(ms)] if flip else [*ms]
    back = back[first:] + back[:first]
    return [[f"{r}F{i}" for i in ms] + [f"{r}B{i}" for i in back] for r in range(ranks)]

def forwards(ranks, microbatches):
    return [[f"{r}F{i}" for i in range(microbatches)] for r in range(ranks)]

def fours(ranks, microbatches):
    if microbatches % 4:
        raise ValueError("fours only")
    return lifo(ranks, microbatches)

def searched(ranks, microbatches, costs=None):
    return lifo(ranks, microbatches)

def stuck(ranks, microbatches):
    return [[*reversed(order)] for order in lifo(ranks, microbatches)]

def waits(ranks, microbatches):
    program = schedule("1f1b", ranks, microbatches)
    turned = [sorted(order, key=lambda a: (-a.microbatch, a.kind.value != "F")) for order in program.orders]
    return replace(program, orders=(program.orders[0], *map(tuple, turned[1:])))

def lacks(ranks, microbatches):
    return [order[:-1] for order in lifo(ranks, microbatches)]

def small(ranks, microbatches):
    return lifo(2, 2)

def fails(ranks, microbatches):
    return 1 / 0

def number(ranks, microbatches):
    return 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ownschedules.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_function_is_a_schedule_whose_parameters_are_options():
    name = "ownschedules.py:lifo"
    assert options(name) == {"first": 0, "flip": True}
    program = schedule(name, 3, 4)
    assert (program.name, program.ranks, program.microbatches, program.lowered) == ("lifo", 3, 4, False)
    assert [str(action) for action in program.orders[1][4:]] == ["1B3", "1B2", "1B1", "1B0"]
    turned = schedule(f"{name}:first=1:flip=false", 3, 4)
    assert turned == schedule(name, 3, 4, first=1, flip=False)
    assert [str(action) for action in turned.orders[0][4:]] == ["0B1", "0B2", "0B3", "0B0"]
    assert schedule(f"{name}:first=1", 3, 4, first=2) == schedule(name, 3, 4, first=2)


@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("fails", ["ownschedules.py, line 37: ZeroDivisionError", "hint: the line is: return 1 / 0"]),
        ("number", ["returned int, must return a Program or each rank's actions"]),
        ("stuck", ["ownschedules.py:stuck of 3 ranks and 4 microbatches: ", "0B0, before 0F0"]),
        ("waits", ["ownschedules.py:waits of 3 ranks and 4 microbatches: ", "deadlock"]),
        ("lacks", ["ownschedules.py:lacks of 3 ranks and 4 microbatches: ", "0B0"]),
        ("small", ["returned a program of 2 ranks and 2 microbatches"]),
        ("life", ["defines no life", "did you mean 'lifo'?"]),
        ("lifo:fist=1", ["no option 'fist'", "did you mean 'first'?"]),
        ("lifo:first", ["'first', must be OPTION=VALUE"]),
    ],
)
def test_a_function_that_makes_no_program_is_one_error(name: str, phrases: list[str]) -> None:
    with pytest.raises(StrettoError) as raised:
        schedule(f"ownschedules.py:{name}", 3, 4)
    assert all(text in str(raised.value) for text in phrases), raised.value


def test_a_file_without_its_function_and_sizes_of_one_are_named() -> None:
    with pytest.raises(StrettoError) as raised:
        schedule("mine.py", 1, 1)
    assert raised.value.hint == "your own: mine.py:FUNCTION, FILE.csv or FILE.json"
    with pytest.raises(StrettoError, match="stuck of 1 rank and 1 microbatch: "):
        schedule("ownschedules.py:stuck", 1, 1)


def test_a_file_with_a_program_is_a_schedule_of_its_sizes(folder: Path) -> None:
    program = schedule("zb-h1", 2, 4)
    file = folder / "zb.csv"
    file.write_text(to_csv(lower(program)))
    assert schedule("zb.csv", 2, 4).orders == program.orders
    assert trains("zb.csv")
    assert not updates_within("zb.csv")
    with pytest.raises(StrettoError, match="of 2 ranks and 4 microbatches, not of 2 and 8"):
        schedule("zb.csv", 2, 8)
    with pytest.raises(StrettoError, match=r"did you mean .*zb.csv"):
        schedule("zbb.csv", 2, 4)


def test_a_job_sees_that_a_file_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job() -> Job:
        layout = Layout(pp=2)
        return Job(shape=find_shape("gpt2"), layout=layout, global_batch=4, schedule="own.csv")

    file, programs = folder / "own.csv", [schedule(name, 2, 4) for name in ("1f1b", "gpipe", "zb-h1")]
    for number, program in enumerate(programs[:2]):
        file.write_text(to_csv(program))
        os.utime(file, ns=(time.time_ns(), number))
        assert job().program().orders == program.orders
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    Path("own.csv").write_text(to_csv(programs[2]))
    assert job().program().orders == programs[2].orders


def test_a_plan_takes_what_trains_and_exists() -> None:
    for name, depth in (("lifo", 4), ("fours", 4), ("fails", 0)):
        assert depth_of(ScheduleChoice(f"ownschedules.py:{name}", ()), 4) == depth
    assert fixed(["schedule=ownschedules.py:lifo:first=1"]) == {"schedule": ("ownschedules.py:lifo:first=1",)}
    for name in ("forwards", "searched", "lift"):
        with pytest.raises(StrettoError):
            fixed([f"schedule=ownschedules.py:{name}"])
