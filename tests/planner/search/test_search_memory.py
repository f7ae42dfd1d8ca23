"""The memory of candidates: exact from short steps, and bounds below it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.experts import ExpertShape
from stretto.job.job import Job, Recompute
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.device import Device
from stretto.planner.memory.fits import fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory
from stretto.planner.memory.short_step import short_program, short_step_memory
from stretto.planner.search.memory_bounds import MemoryBounds, filling_microbatches, peak_states
from stretto.planner.search.space import Space
from stretto.planner.search.task import (
    Parallelism,
    Saving,
    ScheduleChoice,
    SearchTask,
    job_to_plan,
)

SHAPE = ModelShape(family="llama", layers=14, hidden=64, heads=4, vocab=300, sequence=128)
DEVICE = Device(name="toy", tflops={"bf16": 312.0}, memory=inf, bandwidth=2.0e12)

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {}),
    ("1f1b-eager", {}),
    ("interleaved", {"chunks": 2}),
    ("interleaved", {"chunks": 2, "group": 8}),
    ("interleaved-zb", {"chunks": 2}),
    ("zb-h1", {}),
    ("zb-h2", {}),
    ("zb-v", {}),
    ("v-half", {}),
    ("v-min", {}),
    ("hanayo", {"waves": 1}),
    ("dualpipe-v", {}),
    ("dualpipe", {}),
    ("chimera", {}),
    ("gpipe", {}),
]


def job(name: str, options: dict[str, Any], microbatches: int, again: Recompute) -> Job:
    return Job(
        shape=SHAPE,
        layout=Layout(dp=2, pp=4),
        global_batch=2 * microbatches,
        micro_batch=1,
        sequence=128,
        schedule=name,
        options=options,
        dp=DataParallelSettings(mode="zero1"),
        precision=Precision(dtype="bfloat16"),
        recompute=again,
    )


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_short_step_has_the_memory_of_the_whole_step(name: str, options: dict[str, Any]) -> None:
    for again in (Recompute(), Recompute("full")):
        full_job = job(name, options, 64, again)
        exact = fit(rank_memory(memory_of(full_job)), DEVICE).allocated.mid
        assert fit(short_step_memory(full_job), DEVICE).allocated.mid == exact
        if name != "gpipe":
            assert short_program(full_job).microbatches < 64


@pytest.mark.parametrize("name", ["gpipe", "bfs"])
def test_gpipe_and_bfs_hold_the_whole_batch(name: str) -> None:
    options = (("chunks", 2),) if name == "bfs" else ()
    for states in peak_states(ScheduleChoice(name, options), 4, 9).values():
        assert set(states[0].in_flight) == {9}


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_few_microbatches_fill_the_ranks_as_many_do(pp: int, groups: int) -> None:
    choice = ScheduleChoice("interleaved", (("chunks", 2), ("group", groups * pp)))
    few = filling_microbatches(choice, pp, 80)
    assert few < 80
    flights = [
        [sum(states[0].in_flight) for states in peak_states(choice, pp, microbatches).values()]
        for microbatches in (few, 80)
    ]
    assert flights[0] == flights[1] != []


def test_peak_states_of_1f1b() -> None:
    ranks = peak_states(ScheduleChoice("1f1b"), 4, 12)
    assert {rank: states[0].in_flight for rank, states in ranks.items()} == {
        0: (4,),
        1: (3,),
        2: (2,),
        3: (1,),
    }


def planned(shape: ModelShape) -> SearchTask:
    job = job_to_plan(shape=shape, global_batch=16, sequence=128)
    return SearchTask(job=job, cluster=find_cluster("dgx-h100", 8))


def test_the_first_blocks_that_are_recomputed_count_by_their_kind() -> None:
    moe = ExpertShape(experts=4, top_k=2, ffn=64, dense_layers=2)
    saved = list[list[int]]()
    for shape in (SHAPE, replace(SHAPE, moe=moe)):
        parallelism = Parallelism(
            layout=Layout(dp=8), expert_tp=None, micro_batch=1, sequence_parallel=False, context="ring"
        )
        bounds, rows = MemoryBounds(planned(shape)), [Saving(Recompute("full", n)) for n in range(4)]
        sizes = bounds.of_rows([parallelism], ScheduleChoice("1f1b"), [DataParallelSettings()], rows)[0]
        saved.append([a - b for a, b in pairwise(sizes)])
    dense, mixed = saved
    assert dense[0] == dense[1] == dense[2] == mixed[0] == mixed[1] != mixed[2]


def test_a_split_against_the_rules_counts_for_each_number_of_replicas() -> None:
    space = Space(planned(SHAPE))
    for layout in (Layout(cp=8), Layout(cp=8, dp=2), Layout(cp=8, dp=2, pp=2), Layout(cp=4)):
        contexts = [split.context for split in space.splits(layout, None)]
        assert contexts == (["ring"] if layout.cp == 8 else ["ring", "ulysses"])
    assert space.rejected["layout.context"][0] == 2
