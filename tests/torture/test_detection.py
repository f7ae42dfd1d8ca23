"""Ranks that hang in every way, in every kind of layout, under default settings; calls that differ."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counts import record

from recommender_job import config_of as recommender_config
from stretto.engine.parallel.control import this_rank
from stretto.recommender.train.job import RECOMMENDER
from stretto.run.launch import local
from stretto.run.launch.failure import Failure
from stretto.run.launch.local import RankFailed, prepare, run_ranks
from stretto.run.train.launch import PRELOAD, run_job
from stretto.run.watch.local import watching
from texts import open_tokens
from tiny_job import job
from train_runs import around_step, hooked

STEP = 5
LAYOUTS = {
    "dp": ("layout.dp=2",),
    "tp": ("layout.tp=2",),
    "pp": ("layout.pp=2",),
    "zero3": ("layout.dp=2", "dp.mode=zero3"),
    "pp x dp": ("layout.pp=2", "layout.dp=2"),
    "tp x dp": ("layout.tp=2", "layout.dp=2"),
    "dp of 4": ("layout.dp=4",),
    "zero3 of 4": ("layout.dp=4", "dp.mode=zero3"),
}
PAIRS, FOURS = ("dp", "tp", "pp", "zero3"), ("pp x dp", "tp x dp", "dp of 4", "zero3 of 4")


def stop(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_lock(_: Any) -> None:
    ctypes.PyDLL(None).sleep(1000)


def loop(_: Any) -> None:
    while True:
        pass


def read_slowly(trainer: Any) -> None:
    trainer.task.batches.take = lambda *_, **__: time.sleep(1000)


HANGS = (stop, hold_the_lock, loop, read_slowly)


def leave_out_a_call(_: Any) -> None:
    """The rank's next all-reduce of the step's report does not happen."""
    from stretto.run.train import agreement as module

    class Done:
        def wait(self) -> None:
            pass

    inner = module.dist.all_reduce

    def once(*_: Any, **__: Any) -> Done:
        module.dist.all_reduce = inner
        return Done()

    module.dist.all_reduce = once


def call_another(_: Any) -> None:
    """The rank gathers where the others sum."""
    import torch
    import torch.distributed as dist

    from stretto.run.train import agreement as module

    inner = module.dist.all_reduce

    def once(tensor: torch.Tensor, *_: Any, **named: Any) -> Any:
        module.dist.all_reduce = inner
        rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        return dist.all_gather(rows, tensor, **named)

    module.dist.all_reduce = once


def plant(rank: int, act: Callable[[Any], None], at: str) -> None:
    """Do it on a rank in step STEP; the time goes into a file."""

    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        if self.progress.step + 1 == STEP and rank == this_rank():
            Path(at).write_text(str(time.time()), encoding="utf-8")
            act(self)
        return inner(self, stop)

    around_step(wrapped)


def failure_of(folder: Path, layout: str, act: Callable[[Any], None], rank: int) -> tuple[Failure, float]:
    """The failure of a job in which a rank does something bad; the seconds from there to the job's end."""
    at = folder / "at"
    name = f"{layout.replace(' ', '')}-{act.__name__}-{rank}"
    config = job(folder, *LAYOUTS[layout], "train.timeout_s=600", "train.steps=100", f"run.name={name}")
    source = open_tokens(config)
    ranks = config.layout.to_layout().world
    prepare(PRELOAD)
    hooks = [(plant, (rank, act, str(at)))]
    with watching(ranks, config.run.folder, config.train.hang_s) as (first, look, _):  # noqa: SIM117
        with pytest.raises(RankFailed) as caught:
            run_ranks(ranks, *first, hooked, hooks, config, source, stoppable=True, look=look)
    return caught.value.failure, time.time() - float(at.read_text())


def ranks_of(layout: str) -> int:
    return 4 if layout in FOURS else 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_hang_in_every_layout_under_default_settings(tmp_path: Path) -> None:
    cases = [(layout, stop, rank) for layout in (*PAIRS, "pp x dp") for rank in range(ranks_of(layout))]
    cases += [(layout, act, at % 2) for at, (layout, act) in enumerate(itertools.product(PAIRS, HANGS[1:]))]
    wrong, longest = list[str](), 0.0
    for layout, act, rank in cases:
        failure, seconds = failure_of(tmp_path, layout, act, rank)
        longest = max(longest, seconds)
        print(f"{layout} {act.__name__} {rank}: {seconds:.1f} s, {failure.message}", flush=True)
        right = failure.rank == rank and act.__name__ in failure.traceback.replace("<lambda>", "read_slowly")
        if not right:
            wrong.append(f"{layout} {act.__name__} {rank}: rank {failure.rank}, {failure.message}")
    record(
        "a rank hangs: stopped, holding Python's lock in C, in an endless loop, reading data (10 s)",
        tried=len(cases),
        passed=len(cases) - len(wrong),
        command="pytest -m slow tests/torture/test_detection.py -k every_hang",
        note=f"right rank, with its stack; at most {longest:.1f} s to the job's end",
    )
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_calls_that_differ_name_the_rank(tmp_path: Path) -> None:
    """Of four ranks: of two that differ, neither is the odd one."""
    kinds = (leave_out_a_call, call_another)
    cases = list(itertools.product(FOURS, kinds, (0, 1, 3)))[:20]
    wrong = list[str]()
    for layout, act, rank in cases:
        failure, seconds = failure_of(tmp_path, layout, act, rank)
        print(
            f"{layout} {act.__name__} {rank}: {seconds:.1f} s, {failure.rank} {failure.message}", flush=True
        )
        if failure.rank != rank:
            wrong.append(f"{layout} {act.__name__} {rank}: rank {failure.rank}, {failure.message}")
    record(
        "a rank leaves out a collective, or calls another",
        tried=len(cases),
        passed=len(cases) - len(wrong),
        command="pytest -m slow tests/torture/test_detection.py -k differ",
        note="the rank is named",
    )
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_of_two_ranks_whose_calls_differ_both_are_named(tmp_path: Path) -> None:
    """With what each has called, or where it was in its code if gloo has ended it."""
    wrong = list[str]()
    cases = list(itertools.product(PAIRS, (leave_out_a_call, call_another), (0, 1)))
    for layout, act, rank in cases:
        failure, seconds = failure_of(tmp_path, layout, act, rank)
        print(f"{layout} {act.__name__} {rank}: {seconds:.1f} s, {failure.message}", flush=True)
        # a message of the pipeline has its other end in place of a line
        where = r"(at \S+:\d+ in |(send to|receive from) rank \d in pipeline)"
        sides = [re.search(rf"rank {rank} .*{where}", failure.message) for rank in (0, 1)]
        if "call" not in failure.message or not all(sides):
            wrong.append(f"{layout} {act.__name__} {rank}: {failure.message}")
    record(
        "of two ranks one leaves out a collective, or calls another: both are named",
        tried=len(cases),
        passed=len(cases) - len(wrong),
        command="pytest -m slow tests/torture/test_detection.py -k two_ranks",
        note="with number, operation, size and line; where gloo ends a process, of that one the line only",
    )
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stopped_rank_of_a_recommender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, named, longest = list[Any](), 0, 0.0
    start = local._RankGroup.start

    def started(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        processes[:] = self.processes

    monkeypatch.setattr(local._RankGroup, "start", started)
    for rank in range(2):
        changes = ("train.steps=100000", "eval.every=null", "checkpoint.every=null", f"run.name=stop{rank}")
        config, stopped = recommender_config(tmp_path, *changes), list[float]()

        def stop_one(path: Path, rank: int, stopped: list[float]) -> None:
            while not path.exists() or path.read_text().count("\n") < 20:
                time.sleep(0.05)
            stopped.append(time.time())
            os.kill(processes[rank].pid, signal.SIGSTOP)

        path = config.run.folder / "metrics.jsonl"
        threading.Thread(target=stop_one, args=(path, rank, stopped), daemon=True).start()
        with pytest.raises(RankFailed) as caught:
            run_job(RECOMMENDER, config, quiet=True)
        named += (caught.value.failure.rank, caught.value.failure.kind) == (rank, "hung")
        longest = max(longest, time.time() - stopped[0])
    record(
        "a rank of a recommender is stopped (10 s)",
        tried=2,
        passed=named,
        command="pytest -m slow tests/torture/test_detection.py -k recommender",
        note=f"right rank; at most {longest:.1f} s to the job's end",
    )
    assert named == 2
