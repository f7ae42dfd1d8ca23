"""The memory of ranks from their programs: laws that hold for all sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.engine.pipeline.pipeline import LOOKAHEAD as POSTED
from stretto.engine.pipeline.rank_buffers import assign_slots
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.state_bytes import StateConfig
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.layer import layer_memory, layer_saved, total
from stretto.planner.memory.ranks import (
    LOOKAHEAD,
    MemoryJob,
    one_rank,
    rank_memory,
    stage_memory_of,
)
from stretto.planner.memory.stage import Resident, _layer_backward
from stretto.program import schedule
from stretto.program.action import ActionKind
from stretto.program.lower import lower
from stretto.program.memory import peak_held
from stretto.program.rank_orders import program_orders

GPT = ModelShape(family="gpt", layers=8, hidden=64, heads=4, vocab=128, sequence=64)
LLAMA = ModelShape(family="llama", layers=8, hidden=64, heads=4, kv_heads=2, vocab=128, sequence=64)
COMPUTE = ComputeConfig(batch=2, sequence=64, element=4)
NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "hanayo", "dualpipe-v"]


def job(name: str = "1f1b", ranks: int = 2, microbatches: int = 8, **fields: Any) -> MemoryJob:
    shape = fields.pop("shape", GPT)
    compute = fields.pop("compute", COMPUTE)
    return MemoryJob(shape=shape, program=schedule(name, ranks, microbatches), compute=compute, **fields)


def test_the_lookahead_equals_the_executor_s() -> None:
    assert LOOKAHEAD == POSTED


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_receive_buffers_are_as_many_as_the_executor_makes(name: str, ranks: int) -> None:
    program = schedule(name, ranks, 8)
    for rank, order in enumerate(lower(program, lookahead=LOOKAHEAD).orders):
        slots = dict[tuple[int, ActionKind], int]()
        for action, slot in assign_slots(order).items():
            pool = (action.stage, action.kind)
            slots[pool] = max(slots.get(pool, 0), slot + 1)
        counted = program_orders(program).of(rank)
        pools = product(counted.stages, (ActionKind.RECV_F, ActionKind.RECV_B))
        assert [*chain(*counted.receives)] == [slots.get(pool, 0) for pool in pools]


@pytest.mark.parametrize("name", NAMES)
def test_the_walk_ends_empty_and_its_flights_are_the_program_s(name: str) -> None:
    memory_job = job(name, ranks=4, microbatches=8)
    for rank, memory in enumerate(rank_memory(memory_job)):
        splits = any(a.kind is ActionKind.W for a in memory_job.program.orders[rank])
        # I gives activations back and keeps the products' factors, so that fewer are in flight than held
        assert sum(memory.flights.values()) >= 1
        if not splits and len(memory.flights) == 1:
            assert list(memory.flights.values()) == [peak_held(memory_job.program)[rank]]
        assert memory.between_actions <= memory.total
        assert memory.total == memory.states + sum(
            getattr(memory, kind)
            for kind in ("activations", "ends", "messages", "transient", "versions", "batch")
        )


def test_outputs_are_not_held_where_they_are_freed_once_sent() -> None:
    plain = job(ranks=4, microbatches=8)
    framework = replace(plain.compute.framework, frees_sent=True)
    freeing = replace(plain, compute=replace(plain.compute, framework=framework))
    for rank in range(4):
        holding, freed = (one_rank(each, rank) for each in (plain, freeing))
        # the last rank sends no outputs
        assert (freed.between_actions < holding.between_actions) == (rank < 3)
        assert freed.total <= holding.total


@pytest.mark.parametrize("name", ["hanayo", "zb-v"])
def test_what_the_next_stage_of_the_same_rank_takes_is_kept_with_its_input(name: str) -> None:
    memory = rank_memory(job(name, ranks=2, microbatches=2))[1]
    assert [*memory.flights] == [1, 2]
    handed_on = memory.flights[1] * COMPUTE.batch * GPT.sequence * GPT.hidden * COMPUTE.element
    held_bytes = sum(count * memory.stages[stage] for stage, count in memory.flights.items())
    assert memory.activations == held_bytes + handed_on


@pytest.mark.parametrize("shape", [GPT, LLAMA])
@pytest.mark.parametrize("layer", [0, 2, 9])
@pytest.mark.parametrize("last", [False, True])
def test_the_first_half_of_a_backward_leaves_what_its_products_need(
    shape: ModelShape, layer: int, last: bool
) -> None:
    """The incoming gradient of a stage's last layer is a message: it is not counted twice."""
    memory = layer_memory(shape, COMPUTE, layer)
    boundary = COMPUTE.batch * shape.sequence * shape.hidden * COMPUTE.element
    message = boundary * (last and memory.last_product is not None and memory.last_product.is_residual)
    _, change = _layer_backward(memory, Resident(), boundary, True, last)
    assert change == memory.queued - memory.saved - message


def test_1f1b_holds_fewer_microbatches_on_later_ranks_and_gpipe_all() -> None:
    assert [list(r.flights.values()) for r in rank_memory(job("1f1b", 4))] == [[4], [3], [2], [1]]
    assert [list(r.flights.values()) for r in rank_memory(job("gpipe", 4))] == [[8]] * 4


@pytest.mark.parametrize("shape", [GPT, replace(GPT, dropout=0.1), LLAMA])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_keeps_its_saved_tensors(shape: ModelShape, recompute: Any) -> None:
    compute = replace(COMPUTE, recompute=recompute)
    assert layer_memory(shape, compute, 1).saved == total(layer_saved("block", shape, compute))


def test_weights_gradients_and_states_of_one_rank() -> None:
    alone = one_rank(job("gpipe", 1, 1), 0)
    assert alone.weights == alone.gradients
    assert abs(alone.optimizer - 2 * alone.weights) < 1000  # counts of steps
    halves = rank_memory(job("gpipe", 2, 1))
    tied = 4 * GPT.vocab * GPT.hidden
    assert sum(r.weights for r in halves) == alone.weights + tied
    for momentum, states in ((0.0, 0), (0.9, alone.weights)):
        state_config = StateConfig(optimiser="sgd", momentum=momentum)
        assert one_rank(job("gpipe", 1, 1, state_config=state_config), 0).optimizer == states


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_a_bidirectional_schedule_holds_two_copies(name: str) -> None:
    single = sum(r.weights for r in rank_memory(job("1f1b", 4, shape=replace(GPT, tied=False))))
    two = sum(r.weights for r in rank_memory(job(name, 4, shape=replace(GPT, tied=False))))
    assert two == 2 * single


def test_pipedream_holds_older_weights_on_earlier_ranks() -> None:
    ranks = rank_memory(job("pipedream", 4, shape=replace(GPT, tied=False)))
    copies = [round(r.versions / r.weights) for r in ranks]
    assert copies == [3, 2, 1, 0]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    shape=st.sampled_from([GPT, replace(GPT, dropout=0.1), LLAMA]),
    tp=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    batch=st.sampled_from([1, 2, 4]),
)
def test_more_ranks_and_recomputation_never_cost_memory(
    name: str, shape: ModelShape, tp: int, sequence_parallel: bool, batch: int
) -> None:
    compute = replace(COMPUTE, tp=tp, sequence_parallel=sequence_parallel and tp > 1, batch=batch)
    memory_job = job(name, 2, 8, shape=shape, compute=compute)
    base = rank_memory(memory_job)
    full = rank_memory(replace(memory_job, modes=("full",) * shape.layers))
    for before, after in zip(base, full, strict=True):
        assert after.between_actions <= before.between_actions
        assert (after.weights, after.batch) == (before.weights, before.batch)
    for before, after in zip(
        base, rank_memory(replace(memory_job, compute=replace(compute, batch=2 * batch))), strict=True
    ):
        assert before.total < after.total <= 2 * before.total
        assert after.states == before.states


def test_the_memory_of_a_stage_adds_up() -> None:
    memory_job = job("1f1b", 2)
    blocks = [layer for layer in memory_job.stages[1] if 1 <= layer <= GPT.layers]
    work = stage_memory_of(memory_job, 1)
    each = total(layer_saved("block", GPT, COMPUTE))
    assert work.saved == len(blocks) * each - work.boundary  # the first input lies in a message's buffer
    assert work.boundary == 4 * 2 * 64 * 64
    assert work.forward > work.saved
    assert work.backward > 0


@pytest.mark.parametrize("tied", [True, False])
def test_the_lookup_s_gradient_is_reduced_after_a_split_backward_s_first_half(tied: bool) -> None:
    program_memory = memory_of(
        Job(
            shape=replace(GPT, tied=tied),
            layout=Layout(pp=2, dp=2),
            dp=DataParallelSettings(mode="zero2"),
            schedule="zb-h1",
            global_batch=16,
            micro_batch=2,
            sequence=64,
        )
    )
    first, last = program_memory.units(0), program_memory.units(1)
    lookup = [unit.flying for unit in first.units if unit.parameters[0].name.startswith("embed.")]
    assert sum(first.flying(inputs=True)) == sum(lookup)
    head = next(p for p in ("embed.tok.weight", "head.out.weight") if (p == "head.out.weight") != tied)
    product = next(unit for unit in last.units if head in {p.name for p in unit.parameters})
    assert product.flying in last.flying(inputs=False)
    assert len(last.flying(inputs=False)) == len(last.units) - tied  # the tied weight is apart from the norm


def test_norms_complete_the_gradients_of_a_block() -> None:
    """The first norm's gradient is a block's last, although a norm is its last layer too; in front of it the
    embedding's.
    """
    job_memory = memory_of(
        Job(
            shape=ModelShape(
                family="gemma3", layers=2, hidden=64, heads=4, vocab=300, sequence=64, tied=True
            ),
            layout=Layout(dp=2),
            dp=DataParallelSettings(mode="zero3"),
            precision=Precision(dtype="bfloat16"),
            global_batch=8,
            micro_batch=2,
            sequence=64,
        )
    )
    stage = job_memory.units(0)
    units, flying = {unit.parameters[-1].name: unit.flying for unit in stage.units}, stage.flying()
    assert flying[-3:] == tuple(
        units[name] for name in ("blocks.0.attn.qkv.weight", "blocks.0.norm1.weight", "embed.tok.weight")
    )
    # reductions of the microbatch before that are under way when the backward begins: the last to start
    under_way = [stage.resident(before)[-1].gradients for before in range(3)]
    assert under_way == [0, flying[-1], flying[-2] + flying[-1]]
    assert flying[-2] != flying[-1]
