"""The placement problem: embedding tables, dense layers, and the cluster with its memory limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Precision
from stretto.planner.time.constants import chip
from stretto.recommender.placement import Place, TableSpec
from stretto.recommender.planner.load_balance import Limits, LoadBalance
from stretto.recommender.planner.network_times import WIDTHS, DenseNetwork, NetworkTime, network_time
from stretto.recommender.planner.table_times import (
    OPTIMIZERS,
    TableOptimizer,
    TableSoftware,
    Work,
    program_of,
)
from stretto.recommender.popularity import Popularity, popularity_of

# usable shares of capacity; tables share device memory with activations and buffers
_DEVICE = 0.92
_HOST = 0.80
_DISK = 0.90
_NO_NETWORK = DenseNetwork(bottom=(), top=(), wide=0, vectors=0, interaction="concat")


@dataclass(frozen=True, kw_only=True)
class TableJob:
    """A recommender on a cluster.

    Attributes:
        popularity: id popularity per table, in the order of `tables`.
        network: dense layers.
        precision: compute precision of the dense layers.
        limits: bytes per rank and kind of memory for tables and their optimiser states.
        places: kinds of memory that tables may be stored in.
    """

    tables: tuple[TableSpec, ...]
    popularity: tuple[Popularity, ...]
    work: Work
    network: DenseNetwork
    precision: Precision
    limits: Limits
    places: tuple[Place, ...]

    @property
    def samples(self) -> int:
        """Samples per rank and step, rounded up."""
        return -(-self.work.batch // self.work.ranks)

    def network_time(self) -> NetworkTime:
        program = self.work.program
        device = self.work.cluster.device
        return network_time(
            network=self.network,
            device=device,
            precision=self.precision,
            samples=self.samples,
            passes=program.passes,
            slower=program.slower,
        )

    def balance(self) -> LoadBalance:
        """Rank loads before any table is placed."""
        dense = float(self.network.parameters * WIDTHS[self.precision])
        return LoadBalance(self.work, self.network_time(), dense, self.limits)


def table_job(
    tables: Sequence[TableSpec],
    cluster: Cluster,
    ranks: int,
    batch: int,
    *,
    network: DenseNetwork | None = None,
    optimizer: str = "rowwise_adagrad",
    weight_bytes: int = 4,
    wire_bytes: int | None = None,
    precision: Precision | None = None,
    program: str | TableSoftware = "stretto",
    popularity: Mapping[str, Popularity] | None = None,
    ranks_per_node: int | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    disk_bytes: float | None = None,
    places: Sequence[Place] | None = None,
) -> TableJob:
    """Build a job, with defaults for omitted arguments.

    Args:
        tables: physical tables (`recommender.placement.physical_tables`).
        batch: global batch size.
        network: dense layers; by default none.
        weight_bytes: bytes per element of tables and optimiser states.
        wire_bytes: bytes per element sent between ranks; by default `weight_bytes`.
        precision: compute precision of the dense layers; by default TF32 if supported, else FP32.
        popularity: measured popularity by table; other tables use their skew, or uniform ids without one.
        ranks_per_node: by default the devices per node of the cluster.
        device_bytes, host_bytes, disk_bytes: limits per rank for tables and optimiser states; by default 92%
            of device memory minus activations, 80% of the rank's share of host memory, 90% of its share of
            disk.
        places: by default device, host memory and files; for a CPU cluster only device and files.

    Raises:
        StrettoError: no tables, an unknown optimiser, or a size below 1.
    """
    if not tables or ranks < 1 or batch < 1:
        raise StrettoError(
            f"{len(tables)} tables on {ranks} ranks with {batch} samples", hint="one or more of each"
        )
    if optimizer not in OPTIMIZERS:
        raise StrettoError(f"no table optimiser {optimizer!r}", hint=f"allowed are {', '.join(OPTIMIZERS)}")
    local = min(ranks, ranks_per_node or cluster.node)
    table_optimizer: TableOptimizer = optimizer
    work = Work(
        cluster=cluster,
        ranks=ranks,
        local=local,
        batch=batch,
        optimizer=table_optimizer,
        weight=weight_bytes,
        wire=wire_bytes or weight_bytes,
        program=program if isinstance(program, TableSoftware) else program_of(program),
    )
    device, network = cluster.device, network or _NO_NETWORK
    if precision is None:
        precision = "tf32" if "tf32" in device.tflops else "fp32"
    # elements that a rank stores for the backward pass, and the widest gradients
    layers = sum(network.bottom) + sum(network.top) + network.cross_layers * 2 * network.wide
    activations = -(-batch // ranks) * (2 * layers + 4 * network.wide) * WIDTHS[precision]
    limits = Limits(
        max(0.0, _DEVICE * device.memory - activations) if device_bytes is None else device_bytes,
        _HOST * cluster.host.memory / local if host_bytes is None else host_bytes,
        _DISK * cluster.host.disk / local if disk_bytes is None else disk_bytes,
    )
    if places is None:
        places = ("device", "disk") if chip(device) == "cpu" else ("device", "cpu", "disk")
    return TableJob(
        tables=tuple(tables),
        popularity=tuple(popularity_of(table, (popularity or {}).get(table.name)) for table in tables),
        work=work,
        network=network,
        precision=precision,
        limits=limits,
        places=tuple(places),
    )
