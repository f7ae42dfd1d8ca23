"""BigScience's trials on Jean Zay's V100 in 2021: Megatron-DeepSpeed, and DeepSpeed's ZeRO 3."""

from __future__ import annotations

import re
from dataclasses import replace

from published.megatron import HALF, megatron, split
from stretto.planner.table.row import least_sharing, read_row
from stretto.spec.data_parallel import MODES
from stretto.spec.parameters import count_parameters
from stretto.spec.presets import PRESETS, preset
from stretto.spec.shape import ModelShape

_CLOSE = 0.06  # relative distance of a row's parameters from those of a published model


def adapt(row: dict[str, str]) -> dict[str, str]:
    """Convert a row: sizes from its number of parameters, sharding of states from its notes."""
    cells = megatron(row, **HALF, **_degrees(row), gpu=f"jean-zay-{row['gpu']}", memory_count="device")
    notes = row["notes"]
    if re.search(r"\bOOM\b", notes) and "borderline" not in notes:
        cells["oom"] = "1"
    if not row["layers"]:
        shape = _sized(row["model"], float(row["params_b"]), int(cells["pp"]))
        sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        cells |= {name: str(getattr(shape, name)) for name in sizes}
    if not row["zero"]:
        cells["zero"] = "3" if "Zero 3" in notes else str(_least(cells))
    full = "Full Offload" in notes and "Offl=" not in notes
    if "Opt Offl=Y" in notes or full:
        cells["offload"] = "cpu"
    if "Par Offl=Y" in notes or full:
        cells["offload_parameters"] = "cpu"
    if cells["zero"] == "3":
        cells["overlap"] = "1"
        # inputs of recomputed blocks in parts (Rajbhandari et al. 2020, section 6.1)
        cells["shard_inputs"] = str(int(int(cells["tp"]) > 1))
    return cells


def _degrees(row: dict[str, str]) -> dict[str, str]:
    """tp and pp as printed, else one model-parallel group per node of four; dp is the quotient."""
    gpus, dp = int(row["gpus"]), int(row["dp"] or 0)
    if row["tp"] and row["pp"]:
        cells = {"tp": row["tp"], "pp": row["pp"]}
    elif row["tp"]:
        cells = {"tp": row["tp"], "pp": str(gpus // (int(row["tp"]) * dp))}
    else:
        cells = split(gpus // dp if dp else 1, heads=64, node=4)
    rest = gpus // (int(cells["tp"]) * int(cells["pp"]))
    return {**cells, "dp": str(rest or 1)}


def _sized(name: str, billions: float, pp: int) -> ModelShape:
    """The published model of that name; else the GPT nearest in parameters, with as many layers, in
    whole stages, as make them up.
    """
    if name == "GPT-22B":
        return preset(name)
    wanted = billions * 1e9
    known = [preset(name) for name in PRESETS if name.startswith(("gpt2", "gpt3", "megatron"))]
    totals = [count_parameters(shape).total for shape in known]
    at = min(range(len(known)), key=lambda i: abs(totals[i] - wanted) / max(totals[i], wanted))
    near, total = known[at], totals[at]
    if abs(total / wanted - 1) <= _CLOSE:
        return near
    block = (total - count_parameters(replace(near, layers=1)).total) / (near.layers - 1)
    return replace(near, layers=max(pp, near.layers + round((wanted - total) / block / pp) * pp))


def _least(cells: dict[str, str]) -> int:
    """The least sharding with which the states fit, since the runs evidently fitted."""
    job = read_row({**cells, "zero": "0"})
    least = least_sharing(job.job.shape, job.job.layout, job.cluster, job.job.precision)
    return MODES.index(least) - MODES.index("ddp")
