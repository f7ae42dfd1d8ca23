"""torch's CSV in and out: torch reads ours and we read torch's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch_orders import dump, multi, single, stages

from stretto.program import ActionKind, Program, ScheduleError, check, lower, schedule
from stretto.program.checks.transport import TRANSPORTS
from stretto.program.text import from_csv, to_csv
from stretto.program.transforms.one_order import one_order

HAS_WAITS = hasattr(_ComputationType, "WAIT_SEND_F")  # torch 2.15
PROGRAMS = [
    schedule("naive", 2, 2),
    schedule("gpipe", 1, 1),
    schedule("1f1b", 3, 5),
    schedule("interleaved", 2, 5, chunks=3),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_torch_parses_what_we_write(program: Program):
    for text in (to_csv(program), to_csv(lower(program))):
        for line, order in zip(
            text.splitlines(), (program, lower(program))[text != to_csv(program)].orders, strict=True
        ):
            torch_actions = [_Action.from_str(cell) for cell in line.split(",")]
            assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in torch_actions] == [
                (a.stage, str(a.kind), a.microbatch) for a in order
            ]


@pytest.mark.parametrize("lowered", [False, True])
def test_torchs_runtime_loads_what_we_write(tmp_path: Path, lowered: bool):
    program = schedule("interleaved", 2, 5, chunks=2)
    written = lower(program) if lowered else program
    path = tmp_path / "program.csv"
    path.write_text(to_csv(written, waits=lowered and HAS_WAITS))
    runtime = _PipelineScheduleRuntime(stages(2, 2), 5)
    runtime._load_csv(str(path), format="compute_comms" if lowered else "compute_only")
    torch_orders = runtime.pipeline_order_with_comms
    compute = [[str(a) for a in torch_orders[rank] if a.is_compute_op] for rank in range(2)]
    assert compute == [[str(a) for a in order] for order in program.orders]
    assert runtime.stage_index_to_group_rank == dict(enumerate(program.placement))


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        (ScheduleInterleaved1F1B, 2),
        (ScheduleLoopedBFS, 2),
        (ScheduleInterleavedZeroBubble, 2),
        (ScheduleZBVZeroBubble, 2),
        (ScheduleDualPipeV, 2),
    ],
)
def test_torchs_own_programs_are_read_and_pass(kind: type, chunks: int):
    torch_schedule = multi(kind, 4, chunks, 8)
    plain = from_csv(dump(torch_schedule.pipeline_order))
    assert (plain.ranks, plain.stages, plain.microbatches) == (4, 8, 8)
    assert plain.placement == tuple(torch_schedule.stage_index_to_group_rank[s] for s in range(8))
    check(lower(plain))
    comms = from_csv(dump(torch_schedule.pipeline_order_with_comms))
    assert comms.lowered
    assert check(comms).transfers == check(plain).transfers


@pytest.mark.parametrize(
    "kind",
    [
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
        ScheduleDualPipeV,
    ],
)
def test_torchs_lowered_programs_complete_under_every_transport(kind: type):
    comms = from_csv(dump(multi(kind, 2, 2, 4).pipeline_order_with_comms))
    assert any(action.kind is ActionKind.UNSHARD for order in comms.orders for action in order)
    for transport in TRANSPORTS:
        check(comms, transport)


def test_torchs_overlapped_pairs():
    torch_schedule = multi(ScheduleDualPipeV, 4, 2, 10)
    text = dump(torch_schedule.pipeline_order)
    plain = from_csv(text)
    cells = [
        action for order in torch_schedule.pipeline_order.values() for action in order if action.sub_actions
    ]
    assert {tuple(map(str, cell.sub_actions)) for cell in cells} == {
        (str(first), str(second)) for first, second in plain.pairs
    }
    assert len(plain.pairs) == len(cells) > 20
    assert to_csv(plain).split() == text.split()
    comms = dump(torch_schedule.pipeline_order_with_comms)
    assert from_csv(comms).pairs == plain.pairs
    assert to_csv(from_csv(comms)).split() == re.sub(r",\d+WAIT_[A-Z_]+\d*", "", comms).split()


def test_an_overlapped_pair_is_one_cell_and_back():
    plain = from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,(1F2;1B1)OVERLAP_F_B,1B2\n")
    assert {(str(a), str(b)) for a, b in plain.pairs} == {("0F2", "0B0"), ("1F2", "1B1")}
    written = lower(plain, lookahead=0)
    assert "0F2 0SEND_F2 0RECV_B0 0B0" in " ".join(map(str, written.orders[0]))
    text = to_csv(written)
    assert "0SEND_F1,0RECV_B0,(0F2;0B0)OVERLAP_F_B,0SEND_F2,0RECV_B1,0B1" in text
    back = from_csv(text)
    assert (back.pairs, to_csv(back)) == (plain.pairs, text)
    for line in text.splitlines():
        assert [str(_Action.from_str(cell)) for cell in line.split(",")] == line.split(",")


def test_the_order_that_torchs_1f1b_exports_for_its_last_rank():
    """Its export counts the last rank's forwards from 1; what it runs is right, and is our 1f1b."""
    torch_schedule = single(Schedule1F1B, 3, 5)._get_pipeline_order()
    with pytest.raises(
        ScheduleError, match="line 3 has forwards of microbatches 1 to 5, but backwards of 0 to 4"
    ):
        from_csv(dump(torch_schedule))
    with pytest.raises(ScheduleError, match="line 1 has forwards of microbatches 1 to 5"):
        from_csv(dump(single(Schedule1F1B, 1, 5)._get_pipeline_order()))
    rows = dump(torch_schedule).splitlines()
    for i in range(5):
        rows[2] = rows[2].replace(f"2F{i + 1}", f"2F{i}")
    mended = from_csv("\n".join(rows))
    assert lower(mended).orders == lower(schedule("1f1b", 3, 5)).orders


@pytest.mark.parametrize(
    ("name", "microbatches"), [("dualpipe-v", 6), ("zb-v", 5), ("v-half", 5), ("hanayo", 5)]
)
@pytest.mark.parametrize("lowered", [False, True])
def test_torch_validates_pairs_and_vees(tmp_path: Path, name: str, microbatches: int, lowered: bool):
    program = schedule(name, 2, microbatches)
    written = one_order(lower(program)) if lowered else program
    path = tmp_path / "program.csv"
    path.write_text(to_csv(written, waits=lowered and HAS_WAITS))
    runtime = _PipelineScheduleRuntime(stages(2, program.stages // 2), microbatches)
    runtime._load_csv(str(path), format="compute_comms" if lowered else "compute_only")
    torch_orders = runtime.pipeline_order_with_comms
    cells = [[str(a) for a in torch_orders[rank] if a.is_compute_op] for rank in range(2)]
    assert cells == [row.split(",") for row in to_csv(program).split()]
    assert runtime.stage_index_to_group_rank == dict(enumerate(program.placement))


def test_waits_are_written_for_torch_2_15_and_left_out_again() -> None:
    program = one_order(lower(schedule("zb-h1", 2, 2)))
    text = to_csv(program, waits=True)
    assert text.splitlines()[1].endswith("1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0,1WAIT_SEND_B1")
    assert "0I0,0WAIT_SEND_F0" in text
    assert (text.count("SEND_"), text.count("WAIT_SEND_")) == (8, 4)
    assert from_csv(text, name="zb-h1").orders == program.orders


def test_torchs_gpipe_with_its_reductions_is_read():
    program = from_csv(dump(single(ScheduleGPipe, 3, 4).pipeline_order))
    assert not program.lowered
    assert lower(program).orders == lower(schedule("gpipe", 3, 4)).orders
