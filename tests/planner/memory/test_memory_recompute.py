"""Recomputation chosen for a budget of memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.job.flops import attention_flops, block_flops
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.memory.alternatives import memory_suggestions
from stretto.planner.memory.job import GIB, block_modes, choose_modes
from stretto.planner.memory.ranks import MemoryJob, one_rank, rank_memory
from stretto.program import schedule

SHAPE = ModelShape(family="gpt", layers=6, hidden=64, heads=4, vocab=128, sequence=128, dropout=0.1)
COMPUTE = ComputeConfig(batch=2, sequence=128, element=4)


def job(name: str = "1f1b", ranks: int = 2, **fields: Any) -> MemoryJob:
    return MemoryJob(
        shape=SHAPE, program=schedule(name, ranks, 8), compute=COMPUTE, separate_gradients=True, **fields
    )


def extra_flops(memory_job: MemoryJob) -> list[float]:
    """Forward operations per token that each pipeline rank repeats."""
    costs = {"none": 0.0, "selective": attention_flops(SHAPE, 128), "full": block_flops(SHAPE, 128)}
    return [
        sum(costs[memory_job.mode(layer)] for layer in memory_job.layers_of(rank))
        for rank in range(memory_job.program.ranks)
    ]


def totals(memory_job: MemoryJob) -> list[int]:
    return [rank.total for rank in rank_memory(memory_job)]


def test_modes_apply_to_all_blocks_or_the_first_of_each_stage() -> None:
    assert block_modes(job(), "none").modes == ("none",) * 6
    assert block_modes(job(), "selective").modes == ("selective",) * 6
    assert block_modes(job(), "full").modes == ("full",) * 6
    memory_job = block_modes(job(), "full", blocks=1)
    firsts = {stage.start or 1 for stage in memory_job.stages}
    assert [layer for layer, mode in enumerate(memory_job.modes, 1) if mode == "full"] == sorted(firsts)


def test_enough_memory_recomputes_nothing() -> None:
    assert choose_modes(job(), max(totals(job()))).modes == ("none",) * 6


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "hanayo", "chimera", "zb-v"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_chosen_recomputation_fits(name: str, share: float) -> None:
    memory_job = job(name)
    most, least = max(totals(memory_job)), max(totals(block_modes(memory_job, "full")))
    budget = least + share * (most - least)
    chosen = choose_modes(memory_job, budget)
    assert max(totals(chosen)) <= budget
    assert "none" in chosen.modes or "selective" in chosen.modes


def test_each_rank_gets_its_cheapest_choice() -> None:
    memory_job = job()
    cost = {"none": 0.0, "selective": attention_flops(SHAPE, 128), "full": block_flops(SHAPE, 128)}
    blocks = [layer for layer in memory_job.stages[0] if 1 <= layer <= 6]
    for budget in [int(max(totals(memory_job)) * share) for share in (0.9, 0.75, 0.6, 0.5)]:
        chosen = choose_modes(memory_job, budget)
        fitting = [
            sum(cost[mode] for mode in modes)
            for modes in product(cost, repeat=len(blocks))
            # as blocks are alike, the order of modes that is looked at
            if list(modes) == sorted(modes, key=["full", "selective", "none"].index)
            and one_rank(replace(memory_job, modes=(*modes, *("none",) * (6 - len(blocks)))), 0).total
            <= budget
        ]
        assert extra_flops(chosen)[0] == min(fitting)


def test_ranks_choose_separately() -> None:
    memory_job = job(ranks=4)
    most = totals(memory_job)
    chosen = choose_modes(memory_job, (most[0] + most[-1]) / 2)
    extra = extra_flops(chosen)
    assert extra[0] > 0
    assert extra[-1] == 0


def test_ranks_that_share_stages_choose_alike() -> None:
    memory_job = job("chimera", ranks=4)
    chosen = choose_modes(memory_job, max(totals(memory_job)) * 0.8)
    assert max(totals(chosen)) <= max(totals(memory_job)) * 0.8


def test_the_choice_does_not_depend_on_the_machine() -> None:
    budget = max(totals(job())) * 0.8
    assert (
        choose_modes(replace(job(), separate_gradients=False), budget).modes
        == choose_modes(job(), budget).modes
    )


def test_an_impossible_budget_names_the_smallest_possible_one() -> None:
    with pytest.raises(StrettoError, match=r"memory_gib is 0\.0001: pipeline rank \d needs") as caught:
        block_modes(job(), "auto", memory_gib=0.0001)
    assert caught.value.hint is not None
    least = float(caught.value.hint.split("=")[1].split(",")[0])
    assert max(totals(block_modes(job(), "auto", memory_gib=least))) <= least * GIB
    with pytest.raises(StrettoError, match=r"recompute\.memory_gib"):
        block_modes(job(), "auto", memory_gib=least * 0.98)


def test_auto_needs_a_budget() -> None:
    with pytest.raises(StrettoError, match=r"recompute\.memory_gib is null"):
        block_modes(job(), "auto")


def test_advice_states_the_bytes_saved() -> None:
    memory_job = block_modes(replace(job(), compute=replace(COMPUTE, tp=2)), "none")
    saved = {suggestion.setting: suggestion.saved for suggestion in memory_suggestions(memory_job)}
    now = max(totals(memory_job))
    assert saved["recompute.mode=full"] == now - max(totals(block_modes(memory_job, "full")))
    assert set(saved) == {
        "layout.sequence_parallel=true",
        "recompute.mode=selective",
        "recompute.mode=full",
    }
    assert list(saved.values()) == sorted(saved.values(), reverse=True)
