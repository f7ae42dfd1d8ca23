"""What a row says about its run: seconds of a step, from whichever column gives them, and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from stretto.planner.estimate import precision_of
from stretto.planner.machines.cluster import Cluster
from stretto.planner.table.cells import Cells
from stretto.planner.table.software import SEQUENCE_PARALLEL, Software
from stretto.spec.flops import hardware_flops_per_token, model_flops_per_token
from stretto.spec.job import Job

MemoryKind = Literal["allocated", "reserved", "device"]
FlopsKind = Literal["model", "hardware"]
_CLOSE = 0.03  # relative difference of a rate and the same rate from a share of the peak


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a row says about its run.

    Attributes:
        seconds: of a step; None: no column gives them.
        by: the column they come from, and which FLOPs it counts.
        memory: bytes of the fullest device; None: not recorded.
        kind: what the memory counts.
        out_of_memory: the run failed for lack of memory.
    """

    seconds: float | None
    by: str
    memory: float | None
    kind: MemoryKind
    out_of_memory: bool


def measured_of(cells: Cells, job: Job, cluster: Cluster, software: Software) -> Measured:
    """Seconds of a step from its time, else from tokens or samples a second, else from TFLOP/s, MFU or HFU;
    and memory.
    """
    failed, memory = cells.flag("oom"), cells.number("peak_mem_gib")
    kind = cells.word("memory_count") or "allocated"
    if memory is not None:
        cells.value_or("memory_count", kind)
    seconds, by = (None, "") if failed else _seconds(cells, job, cluster, software)
    return Measured(
        seconds=seconds,
        by=by,
        memory=memory and memory * 2**30,
        kind=cast(MemoryKind, kind),
        out_of_memory=failed,
    )


def _seconds(cells: Cells, job: Job, cluster: Cluster, software: Software) -> tuple[float | None, str]:
    devices, tokens = job.layout.world, job.global_batch * job.sequence
    for column, amount in (
        ("iter_time_s", None),
        ("iter_time_ms", None),
        ("tokens_per_s_per_gpu", tokens / devices),
        ("tokens_per_s", tokens),
        ("samples_per_s", job.global_batch),
    ):
        value = cells.number(column)
        if value is not None:
            scale = 1e-3 if column.endswith("_ms") else 1.0
            return value * scale if amount is None else amount / value, column
    flops = {name: tokens * per_token for name, per_token in _flops_per_token(job).items()}
    tflops = cells.number("tflops_per_gpu")
    peak = cluster.device.peak("fp4" if cells.word("precision") == "fp4" else precision_of(job))
    if tflops is not None:
        count = _flops_counted(cells, job, tflops * 1e12 / peak, software)
        return flops[count] / (tflops * 1e12 * devices), f"tflops_per_gpu ({count} FLOPs)"
    for column, count in (("mfu_pct", "model"), ("hfu_pct", "hardware")):
        share = cells.number(column)
        if share is not None:
            return flops[count] / (share / 100 * peak * devices), column
    return None, ""


def _flops_per_token(job: Job) -> dict[FlopsKind, float]:
    """FLOPs per token, of the model and as the devices do them."""
    mode, blocks = job.recompute.mode, job.recompute.blocks
    model = model_flops_per_token(job.shape, job.sequence)
    hardware = hardware_flops_per_token(
        job.shape, job.sequence, "none" if mode == "auto" else mode, operators=job.framework.operators
    )
    if blocks is not None:
        stages = job.layout.pp * int(job.options.get("chunks") or 1)
        hardware = model + (hardware - model) * min(1.0, blocks * stages / job.shape.layers)
    return {"model": model, "hardware": hardware}


def _flops_counted(cells: Cells, job: Job, share: float, software: Software) -> FlopsKind:
    """Which FLOPs the row's rate counts: as stated, as its own MFU or HFU confirm, or as was usual.

    Args:
        share: of the peak that the rate is.
    """
    stated = cells.word("flops_counted")
    if stated is not None:
        return cast(FlopsKind, stated)
    for column, count in (("hfu_pct", "hardware"), ("mfu_pct", "model")):
        percent = cells.number(column)
        if percent is not None and abs(percent / 100 / share - 1) <= _CLOSE:
            cells.report("flops_counted", count, f"as {column} confirms")
            return cast(FlopsKind, count)
    again = job.recompute.mode == "full"
    if again and software.date and software.is_before(SEQUENCE_PARALLEL):
        # model FLOPs utilization came in 2022 (Chowdhery et al., appendix B); figures before counted all
        cells.report("flops_counted", "hardware", "as was usual before mid 2022")
        return "hardware"
    cells.report("flops_counted", "model", "hardware, where recomputation is counted")
    return "model"
