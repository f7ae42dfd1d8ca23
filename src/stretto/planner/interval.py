"""The interval around a predicted step: how uncertain kernels, network and host are, by their shares of it.

Kernels of a chip whose operations were measured are better known than those of a chip known by its data
sheet, and a link that a table of collectives measured better than one that none did. The uncertainties of
the three parts are independent, so their squares add; run-to-run noise is a fourth. `data/intervals.yaml`
has the constants, which `benchmarks/leave_one_out.py` calibrates on tables of runs, each scored with
constants from the others: nine of ten measured runs are inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import exp, sqrt
from typing import Any

from stretto.job.job import Job
from stretto.planner.machines.cluster import Cluster, group_of
from stretto.planner.machines.device import Precision
from stretto.planner.machines.reading import shipped
from stretto.planner.time.constants import is_fitted

# the parts of a step (`planner.estimate.PARTS`) that each source of uncertainty scales; idle time follows all
SOURCES: Mapping[str, tuple[str, ...]] = {
    "kernels": ("compute", "recompute", "optimiser"),
    "network": ("tensor", "context", "expert", "data", "offload"),
    "host": ("host", "other"),
}


@dataclass(frozen=True)
class Interval:
    """Factors on a predicted time between which nine measurements out of ten lie.

    Attributes:
        low, high: the factors.
        widths: by "kernels", "network", "host" and "noise", the half width that each alone would have, as a
            share of the step. Their squares add up to the square of the whole half width.
    """

    low: float
    high: float
    widths: Mapping[str, float]


@cache
def _constants() -> dict[str, Any]:
    return shipped("stretto.planner", "intervals")


def interval(
    job: Job, cluster: Cluster, precision: Precision, parts: Mapping[str, float], scale: float | None = None
) -> Interval:
    """The interval of a step with these seconds by part.

    Args:
        scale: factor on all widths; None: the calibrated one.
    """
    constants = _constants()
    factor: float = constants["scale"] if scale is None else scale
    busy = sum(parts.get(name, 0.0) for names in SOURCES.values() for name in names)
    widths = {"noise": factor * constants["noise"]}
    for source, names in SOURCES.items():
        share = sum(parts.get(name, 0.0) for name in names) / busy if busy else 0.0
        widths[source] = factor * share * _uncertainty(source, job, cluster, precision)
    half_width = sqrt(sum(width**2 for width in widths.values()))
    # a factor up is as likely as its inverse down
    return Interval(exp(-half_width), exp(half_width), {name: widths[name] for name in (*SOURCES, "noise")})


def _uncertainty(source: str, job: Job, cluster: Cluster, precision: Precision) -> float:
    """Relative uncertainty of a source's time."""
    constants = _constants()[source]
    if source == "kernels":
        measurement = "fitted" if is_fitted(cluster.device) else "other"
        if cluster.computing is not None:  # the catalogue has one CPU for all
            measurement = "cpu"
        if cluster.device.kernels:
            measurement = "calibrated"
        more = [constants["low_precision"]] if precision in ("fp8", "fp4") else []
        more += [constants["experts"]] if job.shape.moe is not None else []
        return sqrt(sum(x**2 for x in (constants[measurement], *more)))
    if source == "network":
        if cluster.tables:
            return constants["calibrated"]
        beyond = group_of(job.layout, "tp-cp-dp-pp", cluster.node).nodes > 1
        links = (cluster.inner, cluster.outer) if beyond else (cluster.inner,)
        measured = tuple(_constants()["measured_links"])
        fitted = all(link.kind.startswith(measured) for link in links)
        return constants["fitted" if fitted else "other"]
    return constants["calibrated" if cluster.device.kernels else "other"]
