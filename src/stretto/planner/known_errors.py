"""Predictions known to be wrong, without a mechanism in any source (docs/evidence/planning-evidence.md)."""

from __future__ import annotations

from stretto.job.job import Job
from stretto.planner.assumptions import SoftwareAssumptions
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Precision
from stretto.planner.time.constants import chip

_HOPPER = ("h100", "h800")
_BLACKWELL = ("b200", "b300", "gb200", "gb300")
_SMALL_EXPERT = 1536  # inner width of Qwen3-235B's experts


def known_errors(
    *, job: Job, cluster: Cluster, precision: Precision, software: SoftwareAssumptions
) -> tuple[str, ...]:
    """What is known to be wrong with a prediction; nothing on a device whose kernels were measured."""
    if cluster.device.kernels:
        return ()
    device, moe = chip(cluster.device), job.shape.moe
    half = precision == "bf16"
    small = moe is not None and moe.experts > 1 and job.shape.expert_ffn <= _SMALL_EXPERT
    far = moe is not None and moe.groups > 1 and job.layout.ep > cluster.node and not software.exchanged
    cases = {
        "dense models in bf16 on Blackwell were predicted 16 to 25% too fast, most with tp8": (
            moe is None and half and device in _BLACKWELL
        ),
        "small experts on H100: Qwen3-235B was predicted 19 to 25% too fast, Qwen3-30B 44 to 55% with the "
        "exchange of tokens before HybridEP": small and device in _HOPPER,
        "GPT-OSS in bf16 was predicted 26% too fast": moe is not None and job.shape.bias and half,
        "DeepSeek-V3 with PyTorch's kernels on 1,024 H100 was predicted a third too slow": (
            far and device in _HOPPER
        ),
        "DeepSpeed's pipelines were predicted 12 to 16% too fast: they take about 8 ms more a layer and "
        "microbatch with tp8": software.serial and not software.ahead and job.layout.tp > 1,
        "BigScience's runs on V100 were predicted 16% too fast": device == "v100",
    }
    return tuple(text for text, concerns in cases.items() if concerns)
