"""What was measured in a row: seconds of a step, by whichever figure there is, and memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from stretto.planner.machines.device import Precision
from stretto.planner.table.cells import Cells
from stretto.spec.flops import hardware_flops_per_token, model_flops_per_token
from stretto.spec.job import Wanted
from stretto.spec.shape import ModelShape

MemoryKind = Literal["allocated", "reserved", "device"]
_HARDWARE = re.compile(r"hardware flops|hfu|incl\. recompute|8/6\*params|with recomput")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a row says of its run.

    Attributes:
        seconds: of a step; None: nothing that gives them.
        by: the column they come from, and its convention.
        memory: bytes of the fullest device; None: not recorded.
        kind: what the memory counts.
        out_of_memory: the run failed for lack of memory.
    """

    seconds: float | None
    by: str
    memory: float | None
    kind: MemoryKind
    out_of_memory: bool


def measured_of(
    cells: Cells, shape: ModelShape, sequence: int, batch: int, gpus: int, mode: Wanted, peak: float
) -> Measured:
    """Seconds of a step from iter_time_s, else from tokens a second, else from TFLOP/s, MFU or HFU.

    TFLOP/s are model FLOPs with attention counted in full, unless the notes tell that they hold what is
    recomputed too, or only so agree with a utilisation that stands beside them.

    Args:
        batch: samples of a step as the table has it.
        peak: FLOP/s of one device.
    """
    failed = bool(re.search(r"\boom\b(?! borderline)|out of memory", cells.words("notes"))) or cells.words(
        "iter_time_s"
    ) in ("oom", "out of memory")
    failed = failed and "borderline" not in cells.words("notes")
    memory = cells.number("peak_mem_gib")
    seconds, by = (
        (None, "")
        if failed
        else _seconds(
            cells=cells, shape=shape, sequence=sequence, batch=batch, gpus=gpus, mode=mode, peak=peak
        )
    )
    return Measured(
        seconds=seconds,
        by=by,
        memory=None if memory is None else memory * 2**30,
        kind=_kind(cells),
        out_of_memory=failed,
    )


def _seconds(
    cells: Cells, shape: ModelShape, sequence: int, batch: int, gpus: int, mode: Wanted, peak: float
) -> tuple[float | None, str]:
    seconds = cells.number("iter_time_s")
    if seconds is not None:
        return seconds, "iter_time_s"
    tokens = cells.number("tokens_per_s_per_gpu")
    if tokens is not None:
        return batch * sequence / (tokens * gpus), "tokens_per_s_per_gpu"
    model = batch * sequence * model_flops_per_token(shape, sequence)
    hardware = (
        batch * sequence * hardware_flops_per_token(shape, sequence, "none" if mode == "auto" else mode)
    )
    tflops, mfu, hfu = (cells.number(name) for name in ("tflops_per_gpu", "mfu_pct", "hfu_pct"))
    if tflops is not None:
        counts_all = bool(_HARDWARE.search(cells.words("notes"))) or (hfu is not None and mfu is None)
        flops, convention = (hardware, "hardware") if counts_all else (model, "model")
        return flops / (tflops * 1e12 * gpus), f"tflops_per_gpu ({convention} FLOPs)"
    if mfu is not None:
        return model / (mfu / 100 * peak * gpus), "mfu_pct"
    if hfu is not None:
        return hardware / (hfu / 100 * peak * gpus), "hfu_pct"
    return None, ""


def infer_recompute(cells: Cells, shape: ModelShape, sequence: int, batch: int, gpus: int) -> Wanted | None:
    """What must have been recomputed, where a row has both seconds and TFLOP/s that count it; else None."""
    tflops = cells.number("tflops_per_gpu")
    seconds = cells.number("iter_time_s")
    if tflops is None or seconds is None:
        return None
    done = tflops * 1e12 * seconds * gpus / (batch * sequence)
    full = hardware_flops_per_token(shape, sequence, "full")
    none = model_flops_per_token(shape, sequence)
    return "full" if abs(done / full - 1) < 0.05 < abs(done / none - 1) else None


def _kind(cells: Cells) -> MemoryKind:
    """What the table's memory counts: nvidia-smi shows the device's, torchtitan prints reserved memory."""
    notes, source = cells.words("notes"), cells.words("source")
    if "nvidia-smi" in notes or "bigscience" in source:
        return "device"
    if "reserved" in notes or "torchtitan" in source:
        return "reserved"
    return "allocated"


def device_precision(words: str) -> Precision:
    """In what matrix products are computed, by the words of a type."""
    known: dict[str, Precision] = {"float16": "fp16", "bfloat16": "bf16", "fp8": "fp8", "float32": "fp32"}
    return known[words]
