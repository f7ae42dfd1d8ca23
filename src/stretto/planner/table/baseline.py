"""What a model of two lines predicts: FLOPs at one efficiency, lengthened by the pipeline's fill and drain.

seconds = hardware FLOPs / (efficiency * devices * peak) * (1 + (p - 1) / (m v))

Its one constant is fitted to the very rows that it is scored on, so that it has an advantage over any model
with constants from elsewhere. What does not beat it has not understood the runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.planner.estimate import precision_of
from stretto.planner.machines.cluster import Cluster
from stretto.spec.flops import hardware_flops_per_token
from stretto.spec.job import Job


def at_peak(job: Job, cluster: Cluster) -> float:
    """Seconds of a step at an efficiency of 1."""
    mode = job.recompute.mode
    tokens = job.global_batch * job.sequence
    flops = tokens * hardware_flops_per_token(job.shape, job.sequence, "none" if mode == "auto" else mode)
    microbatches = job.microbatches or 1
    bubble = (job.layout.pp - 1) / (microbatches * int(job.options.get("chunks") or 1))
    return flops / (job.layout.world * cluster.device.peak(precision_of(job))) * (1 + bubble)


def fit_efficiency(ideal: Sequence[float], measured: Sequence[float]) -> float:
    """The efficiency with the least mean of |predicted / measured - 1|: a weighted median.

    With ratios r = ideal / measured, the mean of |r / e - 1| is least in 1 / e at the median of the 1 / r,
    each with weight r.
    """
    ratios = sorted(a / b for a, b in zip(ideal, measured, strict=True))
    half, passed = sum(ratios) / 2, 0.0
    for ratio in reversed(ratios):  # 1 / r from the smallest on
        passed += ratio
        if passed >= half:
            return ratio
    return 1.0
