"""Memory by mode against the ZeRO paper."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.job.data_parallel import MODES, DataParallelSettings
from stretto.job.program import ProgramKey, build_program
from stretto.job.shape import ModelShape
from stretto.layout.shards import Mode, shard_sizes
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.state_bytes import StateConfig
from stretto.planner.memory.alternatives import compare_modes, parameters_of, published
from stretto.planner.memory.ranks import MemoryJob

SHAPE = ModelShape(family="gpt", layers=8, hidden=64, heads=4, vocab=128, sequence=64)
COMPUTE = ComputeConfig(batch=2, sequence=64, element=2)


def job(mode: Mode, pp: int = 1, **fields: Any) -> MemoryJob:
    gather = DataParallelSettings(mode=mode).gathers(pp)
    program = build_program(ProgramKey(name="1f1b", ranks=pp, microbatches=4, gathered=gather == "stage"))
    state_config = StateConfig(
        mode=mode, sizes=shard_sizes(mode, 4), copies=4, element=2, gradient=2, **fields
    )
    return MemoryJob(shape=SHAPE, program=program, compute=COMPUTE, state_config=state_config, gather=gather)


def test_published_bytes_are_those_of_zero_figure_1() -> None:
    """7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB."""
    figure = {mode: published(mode, 7_500_000_000, 64) for mode in MODES}
    assert figure.pop("server") is None
    rounded = {mode: round((size or 0) / 1e9, 1) for mode, size in figure.items()}
    assert rounded == {"ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}


@pytest.mark.parametrize("pp", [1, 2])
def test_states_equal_the_paper_s_but_for_step_counters_and_padding(pp: int) -> None:
    for row in compare_modes(MODES, lambda mode: job(mode, pp)):
        if row.published is not None:
            assert row.states == pytest.approx(row.published, rel=2e-3)
            assert row.states >= row.published
        assert row.peak > row.states


def test_parameters_of_a_rank() -> None:
    parameters = 12 * 64 * 64 * 8 + 13 * 64 * 8 + (128 + 64 + 2) * 64
    assert parameters_of(job("ddp"), 0) == parameters
    assert sum(parameters_of(job("zero3", 2), rank) for rank in (0, 1)) == parameters + 128 * 64  # tied


def test_the_peak_includes_gathered_weights_and_gradients_in_flight() -> None:
    by_mode = {row.mode: row for row in compare_modes(MODES, lambda mode: job(mode, 1, each=True))}
    assert by_mode["zero3"].states < by_mode["zero2"].states < by_mode["zero1"].states < by_mode["ddp"].states
    assert by_mode["ddp"].peak - by_mode["ddp"].states < by_mode["zero2"].peak - by_mode["zero2"].states
