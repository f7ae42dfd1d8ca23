"""The time of a step: parts add up, the replay agrees with closed forms, sharding costs what it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job, Recompute
from stretto.job.parameters import count_parameters
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.layout.shards import ShardSizes
from stretto.planner.assumptions import Assumptions, SoftwareAssumptions, software_profile
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.rank_parameters import Shares
from stretto.planner.counts.traffic import block_traffic
from stretto.planner.estimate import PARTS, Estimate, estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster, NetworkLink, NodeGroup
from stretto.planner.machines.device import Device
from stretto.planner.memory.fits import FULL, PROCESS, RESERVE
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.data_parallel import across, data_time, part_of, stage_elements
from stretto.planner.time.kernels import kernel_times
from stretto.planner.time.layer import layer_time
from stretto.planner.time.step import message_costs, step_time

DEVICE = Device(name="test", tflops={"fp32": 20.0, "bf16": 300.0}, memory=80e9, bandwidth=2e12)
CLUSTER = Cluster(
    name="test",
    device=DEVICE,
    node=8,
    inner=NetworkLink(300e9, 5e-6, "NVLink 3"),
    outer=NetworkLink(25e9, 15e-6, "InfiniBand HDR"),
    nodes=64,
)
SHAPE = ModelShape(family="gpt", layers=16, hidden=2048, heads=16, vocab=50000, sequence=1024)
HALF = Precision(dtype="bfloat16")


def job(layout: Layout | None = None, **fields: object) -> Job:
    plain: dict[str, object] = {"global_batch": 64, "micro_batch": 1, "sequence": 1024, "precision": HALF}
    return Job(shape=SHAPE, layout=layout or Layout(), **(plain | fields))  # type: ignore[arg-type]


def seconds(
    layout: Layout | None = None, assumptions: Assumptions | None = None, **fields: object
) -> Estimate:
    return estimate(job(layout, **fields), CLUSTER, assumptions, memory=False)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(), {}),
        (Layout(tp=4, pp=2, dp=2), {"schedule": "1f1b", "sequence_parallel": True}),
        (Layout(pp=4), {"schedule": "zb-h1"}),
        (Layout(pp=4), {"schedule": "interleaved", "options": {"chunks": 2}, "recompute": Recompute("full")}),
        (Layout(dp=8), {"dp": DataParallelSettings(mode="zero3")}),
        (Layout(pp=2, dp=4), {"dp": DataParallelSettings(mode="zero3")}),
        (Layout(cp=2, dp=2), {"recompute": Recompute("selective")}),
        (Layout(pp=2, dp=2), {"dp": DataParallelSettings(mode="zero1", offload="cpu")}),
        (Layout(pp=4), {"schedule": "pipedream"}),
        (
            Layout(pp=4, dp=2),
            {
                "schedule": "pipedream-2bw",
                "dp": DataParallelSettings(mode="zero1"),
                "steps_between_drains": 7.5,
            },
        ),
    ],
)
def test_parts_add_up_to_the_step(layout: Layout, more: dict[str, object]) -> None:
    step = seconds(layout, **more)
    assert set(step.parts) <= set(PARTS)
    assert min(step.parts.values()) >= 0
    assert sum(step.parts.values()) == pytest.approx(step.seconds, rel=1e-9)
    assert step.low < step.seconds < step.high
    outside = sum(step.parts.get(name, 0.0) for name in ("bubble", "data", "optimiser", "offload"))
    assert step.forward + step.backward + outside == pytest.approx(step.seconds, rel=1e-9)
    assert 0 < step.forward < step.backward


@pytest.mark.parametrize(
    ("batch", "steps_between_drains"), [(64, 100.0), (64, 12.0), (4, 30.0), (2, 1.0), (16, 2.0)]
)
@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_an_asynchronous_step_is_the_mean_of_its_window(
    name: str, batch: int, steps_between_drains: float
) -> None:
    at = job(Layout(pp=4), schedule=name, global_batch=batch, steps_between_drains=steps_between_drains)
    step = step_time(at, CLUSTER, Assumptions(), "bf16")
    # the whole window replayed as one program
    assert at.window is not None
    window_step = replace(at, custom_program=at.window(int(steps_between_drains)))
    line = step_time(window_step, CLUSTER, Assumptions(), "bf16")
    assert step.seconds == pytest.approx(line.seconds / steps_between_drains, rel=2e-3)
    for part, taken in line.parts.items():
        assert step.parts[part] == pytest.approx(
            taken / steps_between_drains, rel=2e-3, abs=2e-3 * step.seconds
        )


def test_the_bubble_of_an_asynchronous_step_shrinks_with_its_window() -> None:
    def bubble(steps_between_drains: float) -> float:
        return seconds(
            Layout(pp=4), schedule="pipedream", global_batch=16, steps_between_drains=steps_between_drains
        ).parts["bubble"]

    drained = bubble(1.0)
    steady = bubble(1e9)  # messages and uneven stages
    assert steady < 0.2 * drained
    assert bubble(10.0) - steady == pytest.approx((drained - steady) / 10, rel=0.05)
    # groups of two microbatches are too short for four ranks
    small = [seconds(Layout(pp=4), schedule=f"pipedream{two}", global_batch=2).bubble for two in ("", "-2bw")]
    assert small[1] > 2 * small[0]


def test_waiting_for_offloaded_states_is_no_bubble() -> None:
    here, away = (
        seconds(Layout(pp=2), dp=DataParallelSettings(offload=place), global_batch=4)
        for place in ("none", "cpu")
    )
    assert away.seconds > here.seconds
    assert away.parts["offload"] == pytest.approx(away.seconds - here.seconds)
    assert away.parts["bubble"] == pytest.approx(here.parts["bubble"])


def test_waiting_for_a_shared_core_is_no_bubble() -> None:
    cpu = find_cluster("cpu").sized(4)
    plain = job(Layout(pp=2, dp=2), precision=Precision(), unified_memory=True)
    alone, shared = (estimate(plain, replace(cpu, computing=n), memory=False) for n in (None, 2))
    assert shared.seconds > 1.5 * alone.seconds
    assert sum(shared.parts.values()) == pytest.approx(shared.seconds)
    assert shared.parts["compute"] > 1.5 * alone.parts["compute"]
    assert shared.bubble < alone.bubble  # a rank that waits leaves its core to another
    assert shared.forward / shared.backward == pytest.approx(alone.forward / alone.backward, rel=0.05)


def test_one_rank_takes_the_sum_of_its_layers() -> None:
    compute = ComputeConfig(batch=1, sequence=1024)
    layers = ["embed", *["block"] * 16, "head"]
    software = Assumptions().software
    times = [
        layer_time(
            shape=SHAPE,
            kind=kind,
            compute=compute,
            layout=Layout(),
            cluster=CLUSTER,
            precision="bf16",
            software=software,
        )
        for kind in layers
    ]
    layers_seconds = sum(t.total("F") + t.total("I") + t.total("W") for t in times)
    step = seconds()
    assert step.seconds - step.parts["optimiser"] == pytest.approx(64 * layers_seconds, rel=1e-9)


def test_a_pipeline_of_equal_stages_has_the_bubble_of_the_closed_form() -> None:
    # no head to speak of: blocks alone cost
    shape = replace(SHAPE, vocab=64)
    few = Job(shape=shape, layout=Layout(pp=4), global_batch=16, micro_batch=1, sequence=1024, precision=HALF)
    free = replace(CLUSTER, inner=NetworkLink(1e18, 0.0))
    step = estimate(few, free, memory=False)
    work = step.seconds - step.parts["optimiser"] - step.parts["bubble"]
    # (p - 1) / m of the work (Narayanan et al. 2021, section 2.2.1), the embedding and the head aside
    assert step.parts["bubble"] / work == pytest.approx(3 / 16, rel=0.05)


def test_schedules_that_split_backwards_idle_less() -> None:
    plain, split = (seconds(Layout(pp=4), schedule=name, global_batch=8) for name in ("1f1b", "zb-v"))
    assert split.parts["bubble"] < 0.5 * plain.parts["bubble"]
    assert split.seconds < plain.seconds


def test_full_recomputation_costs_another_forward() -> None:
    times = {
        mode: layer_time(
            SHAPE,
            "block",
            ComputeConfig(batch=1, sequence=1024, recompute=mode, attention="explicit"),
            Layout(),
            CLUSTER,
        )
        for mode in ("none", "selective", "full")
    }
    assert times["none"].total("R") == 0
    assert times["full"].total("R") == pytest.approx(times["none"].total("F"))
    assert 0 < times["selective"].total("R") < times["full"].total("R")


def test_a_host_that_is_slow_to_start_kernels_sets_the_time_of_small_layers() -> None:
    tiny = replace(SHAPE, hidden=128, heads=2, kv_heads=2, ffn=512, head_dim=64)
    compute, software = ComputeConfig(batch=1, sequence=64), SoftwareAssumptions(host=1e-4)
    layer = layer_time(
        shape=tiny,
        kind="block",
        compute=compute,
        layout=Layout(),
        cluster=CLUSTER,
        precision="bf16",
        software=software,
    )
    assert layer.total("F") == pytest.approx(16e-4, rel=1e-2)
    assert layer.total("I") + layer.total("W") == pytest.approx(32e-4, rel=1e-2)
    large = layer_time(
        shape=SHAPE,
        kind="block",
        compute=ComputeConfig(batch=64, sequence=1024),
        layout=Layout(),
        cluster=CLUSTER,
        precision="bf16",
        software=software,
    )
    free = layer_time(
        shape=SHAPE,
        kind="block",
        compute=ComputeConfig(batch=64, sequence=1024),
        layout=Layout(),
        cluster=CLUSTER,
        precision="bf16",
    )
    assert large.total("F") == pytest.approx(free.total("F"), rel=1e-3)
    assert large.F["host"] > 0


def test_unsplit_backwards_hide_tensor_parallel_reductions() -> None:
    compute = ComputeConfig(batch=4, sequence=1024, tp=8, sequence_parallel=True)
    layer = layer_time(SHAPE, "block", compute, Layout(tp=8), CLUSTER)
    assert 0 < layer.saved["tensor"] < layer.I["tensor"] + layer.W["tensor"]


def test_elements_of_stages_are_those_of_the_model() -> None:
    stages = [range(6), range(6, 12), range(12, 18)]
    elements = sum(
        stage_elements(replace(SHAPE, tied=False), tuple(stage), Shares()).dense for stage in stages
    )
    assert elements == count_parameters(replace(SHAPE, tied=False)).total


def test_reductions_depend_on_the_mode() -> None:
    layers, size = range(1, 3), 4 * stage_elements(SHAPE, (1, 2), Shares()).dense
    all_ranks = NodeGroup(16, 8)

    def reduce(**dp: object) -> float:
        return data_time(
            job(Layout(dp=16), dp=DataParallelSettings(**dp)), Assumptions(), CLUSTER, layers
        ).reduce  # type: ignore[arg-type]

    assert reduce(mode="ddp") == collective_seconds(CLUSTER, "all-reduce", size, all_ranks)
    assert reduce(mode="zero1") == collective_seconds(CLUSTER, "reduce-scatter", size, all_ranks)
    inside = collective_seconds(CLUSTER, "reduce-scatter", size, NodeGroup(8, 8))
    between = collective_seconds(CLUSTER, "all-reduce", size / 8, NodeGroup(2, 1))
    assert reduce(mode="zero2", shard_states=8) == pytest.approx(inside + between)


def test_sharded_states_shorten_the_update() -> None:
    alone, shared = (
        data_time(
            job(Layout(dp=8), dp=DataParallelSettings(mode=mode)), Assumptions(), CLUSTER, range(1, 9)
        ).update  # type: ignore[arg-type]
        for mode in ("ddp", "zero1")
    )
    assert shared < 0.25 * alone


def test_groups_split_into_parts_and_across_them() -> None:
    assert part_of(NodeGroup(16, 4), 8) == NodeGroup(8, 4)
    assert across(NodeGroup(16, 4), 8) == NodeGroup(2, 1)
    assert across(NodeGroup(16, 8), 2) == NodeGroup(8, 4)
    assert ShardSizes(1, 1, 8).states == 8


def test_exposed_communication_and_slowdown_count() -> None:
    slow = replace(CLUSTER, outer=NetworkLink(1e9, 15e-6))
    few = job(Layout(dp=16), global_batch=16)
    hidden, seen = (
        estimate(few, slow, Assumptions(overlap=overlap), memory=False) for overlap in (True, False)
    )
    assert 0 < hidden.parts["data"] < seen.parts["data"]


def test_ranks_that_share_cores_take_turns() -> None:
    alone = seconds(Layout(dp=4))
    two = estimate(job(Layout(dp=4)), replace(CLUSTER, computing=2), memory=False)
    assert 1.9 * alone.seconds < two.seconds < 2.1 * alone.seconds


def test_a_correction_scales_the_prediction() -> None:
    plain, corrected = (
        estimate(job(), replace(CLUSTER, correction=factor), memory=False) for factor in (1.0, 1.25)
    )
    assert corrected.seconds == pytest.approx(1.25 * plain.seconds)
    assert sum(corrected.parts.values()) == pytest.approx(corrected.seconds)


def test_recomputation_chosen_by_a_budget_counts_in_time_and_memory() -> None:
    free = estimate(job(micro_batch=8), CLUSTER)
    assert free.memory is not None
    tight = 0.8 * free.memory.allocated.mid / 2**30
    chosen = estimate(job(micro_batch=8, recompute=Recompute("auto", memory_gib=tight)), CLUSTER)
    assert chosen.memory is not None
    assert chosen.memory.allocated.mid <= tight * 2**30
    assert chosen.parts["recompute"] > 0
    assert chosen.seconds > free.seconds


def test_verdicts_follow_the_interval_of_memory() -> None:
    memory = estimate(job(), CLUSTER).memory
    assert memory is not None
    assert memory.verdict == "fits"
    assert memory.allocated.mid <= memory.reserved.mid <= memory.device.mid
    small = replace(CLUSTER, device=replace(DEVICE, memory=memory.device.mid))
    again = estimate(job(), small).memory
    assert again is not None
    assert again.verdict == "tight"
    smaller = replace(CLUSTER, device=replace(DEVICE, memory=0.5 * memory.allocated.mid))
    least = estimate(job(), smaller).memory
    assert least is not None
    assert least.verdict == "does not fit"
    assert least.slack < 0


def test_a_cpu_keeps_no_context_of_an_accelerator() -> None:
    contexts = []
    for name in ("cpu-host", "gpu-host"):
        memory = estimate(job(), replace(CLUSTER, device=replace(DEVICE, name=name))).memory
        assert memory is not None
        contexts.append(memory.device.mid - memory.reserved.mid)
    assert contexts == pytest.approx([PROCESS[1], RESERVE[1]])


def test_hidden_communication_shortens_the_step() -> None:
    tensor_parallel = job(Layout(tp=8), sequence_parallel=True, micro_batch=4)
    software = Assumptions().software
    hidden, seen = (
        estimate(
            tensor_parallel, CLUSTER, Assumptions(software=replace(software, serial=serial)), memory=False
        )
        for serial in (False, True)
    )
    assert hidden.parts["tensor"] < 0.9 * seen.parts["tensor"]
    assert hidden.seconds < seen.seconds


def test_a_layout_is_likely_to_fit_by_the_middle_of_its_interval() -> None:
    memory = estimate(job(), CLUSTER).memory
    assert memory is not None
    # with less room than it usually reserves the allocator frees what it can, and then nothing more
    least = FULL * memory.allocated.mid + RESERVE[1]
    for part, likely in ((1.001, True), (0.999, False)):
        room = replace(CLUSTER, device=replace(DEVICE, memory=part * least))
        again = estimate(job(), room).memory
        assert again is not None
        assert (again.likely, again.verdict) == (likely, "tight")


def test_a_ring_costs_only_what_attention_does_not_hide() -> None:
    compute, layout = ComputeConfig(batch=1, sequence=8192, cp=4), Layout(cp=4)
    fast, slow = (
        layer_time(
            SHAPE, "block", compute, layout, replace(CLUSTER, inner=NetworkLink(rate, 0.0, "NVLink 3"))
        )
        for rate in (1e15, 1e9)
    )
    core = kernel_times(SHAPE, "block", compute, DEVICE, "bf16", SoftwareAssumptions()).core
    # attention beside messages is slower while they last, which at this rate is no time
    assert fast.F.get("context", 0.0) < 1e-2 * core
    assert slow.F["context"] > 0
    ring = [m for m in block_traffic(SHAPE, compute) if m.axis == "cp" and m.phase == "F"]
    assert all(m.overlaps for m in ring)
    link = replace(CLUSTER, inner=NetworkLink(1e9, 0.0, "NVLink 3"))
    ring_seconds = sum(m.times * collective_seconds(link, m.kind, m.size, NodeGroup(4, 4)) for m in ring)
    slower = SoftwareAssumptions().slowdown - 1
    assert slow.F["context"] == pytest.approx(ring_seconds - core + slower * core)


def test_old_attention_kernels_are_slower_on_later_devices() -> None:
    hopper = replace(DEVICE, name="h100-test")
    for name in ("fused", "today"):
        software = software_profile(name)
        assert software.fused(hopper) < software.fused(DEVICE) <= 1.0
    assert software_profile("tuned").fused(hopper) == 1.0


def test_messages_between_stages_on_one_node_do_not_cross_the_network() -> None:
    at = job(Layout(pp=16), schedule="interleaved", options={"chunks": 1})
    hop, rates = message_costs(at, CLUSTER, at.program(), size=2**20)
    assert isinstance(rates, dict)
    assert hop == CLUSTER.inner.latency
    assert rates[6, 7] == rates[9, 8] == 0.8 * CLUSTER.inner.bandwidth
    crossing = CLUSTER.outer.latency - hop + 2**20 / (0.8 * CLUSTER.outer.bandwidth)
    assert 2**20 / rates[7, 8] == 2**20 / rates[8, 7] == pytest.approx(crossing)
    # all on one node, and each on a node of its own
    for layout, link in ((Layout(pp=8), CLUSTER.inner), (Layout(tp=8, pp=4), CLUSTER.outer)):
        alike = job(layout, schedule="1f1b")
        assert message_costs(alike, CLUSTER, alike.program(), 1.0) == (link.latency, 0.8 * link.bandwidth)
