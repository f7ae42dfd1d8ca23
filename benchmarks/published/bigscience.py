"""BigScience's trials on Jean Zay's V100 in 2021: Megatron-DeepSpeed, and DeepSpeed's ZeRO 3."""

from __future__ import annotations

import re

from published.megatron import HALF, megatron, split
from published.rows import read_row
from stretto.job.data_parallel import MODES
from stretto.planner.runs import least_sharing

# Layers and hidden size by billions of parameters: the scripts under experiments/gpt2-meg, and for 7.5, 22,
# 50 and 78 experiments/gpt2-16gb-nodes.md. 24 is taken to be 25.
_SIZES = {
    "7.5": (36, 4096),
    "18": (40, 6144),
    "22": (32, 8192),
    "24": (40, 7168),
    "25": (40, 7168),
    "30": (48, 7168),
    "39": (48, 8192),
    "50": (64, 8192),
    "52": (64, 8192),
    "65": (64, 9216),
    "78": (64, 10240),
    "97": (64, 11264),
    "116": (64, 12288),
    "206": (64, 16384),
}
_HEADS, _VOCABULARY = 32, 50257


def adapt(row: dict[str, str]) -> dict[str, str]:
    """Convert a row: sizes from its number of parameters, sharding of states from its notes."""
    cells = megatron(row, **HALF, **_degrees(row), gpu=f"jean-zay-{row['gpu']}", memory_count="device")
    notes = row["notes"]
    if re.search(r"\bOOM\b", notes) and "borderline" not in notes:
        cells["oom"] = "1"
    if not row["layers"]:
        layers, hidden = _SIZES[row["params_b"]]
        cells |= {
            "layers": str(layers),
            "hidden": str(hidden),
            "heads": str(_HEADS),
            "vocab": str(_VOCABULARY),
        }
    if not row["zero"]:
        cells["zero"] = "3" if "Zero 3" in notes else str(_least(cells))
    full = "Full Offload" in notes and "Offl=" not in notes
    full |= "gpt2.md:398" in row["source"]  # under the heading "With full cpu offload"
    if "Opt Offl=Y" in notes or full:
        cells["offload"] = "cpu"
    if "Par Offl=Y" in notes or full:
        cells["offload_parameters"] = "cpu"
    if "HF + Deepspeed" in notes:
        cells["software"] = "eager"
    if cells["zero"] == "3" and "HF + Deepspeed" not in notes:
        # inputs of recomputed blocks in parts (Rajbhandari et al. 2020, section 6.1), and in host memory
        cells["shard_inputs"] = str(int(int(cells["tp"]) > 1))
        cells["offload_inputs"] = "none" if _on_device(row) else "cpu"
    cells["framework"] = "deepspeed" if "eepspeed" in notes or cells["zero"] != "0" else "megatron"
    return cells


def _on_device(row: dict[str, str]) -> bool:
    """Return whether Megatron under ZeRO 3 kept the inputs of recomputed blocks on the device: its script has
    `--checkpoint-in-cpu`, which the runs from number 12 on remove or toggle (experiments/gpt2.md).
    """
    toggled = re.search(r"PA_CPU=(\w)", row["notes"])
    return toggled[1] == "N" if toggled else "gpt2.md:430" in row["source"]


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


def _least(cells: dict[str, str]) -> int:
    """Return the least sharding with which the states fit, since the runs evidently fitted."""
    job = read_row({**cells, "zero": "0"})
    least = least_sharing(job.job.shape, job.job.layout, job.cluster, job.job.precision)
    return MODES.index(least) - MODES.index("ddp")
