"""Time of Muon's updates: products of whole matrices, and their exchange between the ranks that hold parts.

Every matrix is orthogonalised on one of its holders by five Newton-Schulz iterations of three products each
(Jordan et al. 2024). The costliest matrices go first, each to the least loaded holder; so a holder has an
equal share of all work, or the largest matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

from stretto.planner.counts.rank_parameters import Parameter
from stretto.planner.machines.cluster import Cluster, NodeGroup
from stretto.planner.machines.device import Device
from stretto.planner.time.collectives import collective_seconds
from stretto.planner.time.operators import matmul_seconds

_ITERATIONS = 5
_MASTER = 4  # bytes of an element of a momentum and a direction, which matrices are made of
_WAYS = 2  # directions to the rank that orthogonalises, and back


def muon_seconds(cluster: Cluster, parameters: Iterable[Parameter], states: NodeGroup, node: int) -> float:
    """Of a stage's matrices on one rank.

    Args:
        parameters: as a rank holds them, all dense or all of experts.
        states: data-parallel ranks that share the optimiser's states.
        node: ranks of a node.
    """
    work: dict[int, list[float]] = {}  # by tensor-parallel holders
    moved: dict[int, float] = {}
    for parameter in parameters:
        if not parameter.by_muon:
            continue
        *many, rows, columns = parameter.matrices
        shares = max(1, round(prod(many) * rows * columns / parameter.elements))
        # experts of a stack are spread whole over ranks first
        split = shares if not many else max(1, shares // many[0])
        local_matrices = max(1, prod(many) * split // shares)
        work.setdefault(split, []).extend([_orthogonal(cluster.device, rows, columns)] * local_matrices)
        moved[split] = moved.get(split, 0.0) + _MASTER * parameter.elements / states.ranks
    seconds = 0.0
    for split, matrices in work.items():
        holders = split * states.ranks
        seconds += max(max(matrices), sum(matrices) / holders)
        group = NodeGroup(holders, min(holders, node, split * states.local))
        seconds += _WAYS * collective_seconds(cluster, "all-to-all", moved[split], group)
    return seconds


def products(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """The products of one matrix's update, each [m, k] times [k, n]: (m, n, k)."""
    short, long = sorted((rows, columns))
    return _ITERATIONS * [(short, short, long), (short, short, short), (short, long, short)]


@lru_cache(maxsize=4096)
def _orthogonal(device: Device, rows: int, columns: int) -> float:
    """One matrix in float32."""
    return sum(matmul_seconds(device, m, n, k, "fp32") for m, n, k in products(rows, columns))
