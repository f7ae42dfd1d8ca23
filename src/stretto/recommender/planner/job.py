"""The placement problem: tables, ranks and their memory, and the dense layers beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.device import Precision
from stretto.planner.time.constants import chip
from stretto.recommender.placement import Place, TableSpec
from stretto.recommender.planner.load_balance import Limits, LoadBalance
from stretto.recommender.planner.network_times import WIDTHS, Network, NetworkTime, network_time
from stretto.recommender.planner.table_times import OPTIMIZERS, Program, TableOptimizer, Work, program_of
from stretto.recommender.popularity import Popularity, popularity_of

_DEVICE = 0.92
_HOST = 0.80
_DISK = 0.90  # of what is there: for tables, activations and buffers; for tables
_NO_NETWORK = Network(bottom=(), top=(), wide=0, vectors=0, interaction="concat")


@dataclass(frozen=True, kw_only=True)
class TableJob:
    """A recommender on a cluster.

    Attributes:
        popularity: of each table, in their order.
        network: its dense layers; precision: that they compute in.
        limits: of every rank's memories, for tables and their states.
        places: memories that tables may be in.
    """

    tables: tuple[TableSpec, ...]
    popularity: tuple[Popularity, ...]
    work: Work
    network: Network
    precision: Precision
    limits: Limits
    places: tuple[Place, ...]

    @property
    def samples(self) -> int:
        """Of one rank, those of the rank with most."""
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
        """With no table on it."""
        dense = float(self.network.parameters * WIDTHS[self.precision])
        return LoadBalance(self.work, self.network_time(), dense, self.limits)


def table_job(
    tables: Sequence[TableSpec],
    cluster: Cluster,
    ranks: int,
    batch: int,
    *,
    network: Network | None = None,
    optimizer: str = "rowwise_adagrad",
    weight_bytes: int = 4,
    wire_bytes: int | None = None,
    precision: Precision | None = None,
    program: str | Program = "stretto",
    popularity: Mapping[str, Popularity] | None = None,
    ranks_per_node: int | None = None,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    disk_bytes: float | None = None,
    places: Sequence[Place] | None = None,
) -> TableJob:
    """A job; what is left out takes what is usual.

    Args:
        tables: as they are stored (`recommender.placement.physical_tables`).
        batch: samples of a step, on all ranks together.
        network: None: the tables alone are placed.
        weight_bytes: of a number of tables and states; wire_bytes: on its way, None: the same.
        precision: of the dense layers; None: TF32 where the device has it, else float32.
        popularity: measured ones, by table; of others their skew counts, else all ids are alike.
        ranks_per_node: None: as many as the cluster's nodes have.
        device_bytes, host_bytes, disk_bytes: that tables and states may take of a rank's device, and of a
            rank's part of its host; None: of the device 0.92 less activations, of host and files 0.8 and 0.9.
        places: None: device, host and files; on a CPU device and files.

    Raises:
        StrettoError: no tables, an optimiser that is not known, or sizes below 1.
    """
    if not tables or ranks < 1 or batch < 1:
        raise StrettoError(
            f"{len(tables)} tables on {ranks} ranks with {batch} samples", hint="one or more of each"
        )
    if optimizer not in OPTIMIZERS:
        raise StrettoError(f"optimiser {optimizer!r} is not one of tables", hint=", ".join(OPTIMIZERS))
    known: TableOptimizer = optimizer
    local = min(ranks, ranks_per_node or cluster.node)
    how = program if isinstance(program, Program) else program_of(program)
    work = Work(
        cluster=cluster,
        ranks=ranks,
        local=local,
        batch=batch,
        optimizer=known,
        weight=weight_bytes,
        wire=wire_bytes or weight_bytes,
        program=how,
    )
    device, network = cluster.device, network or _NO_NETWORK
    usual: Precision = "tf32" if "tf32" in device.tflops else "fp32"
    precision = precision or usual
    kept = _activations(network, -(-batch // ranks)) * WIDTHS[precision]
    limits = Limits(
        max(0.0, _DEVICE * device.memory - kept) if device_bytes is None else device_bytes,
        _HOST * cluster.host.memory / local if host_bytes is None else host_bytes,
        _DISK * cluster.host.disk / local if disk_bytes is None else disk_bytes,
    )
    everywhere: tuple[Place, ...] = ("device", "disk") if chip(device) == "cpu" else ("device", "cpu", "disk")
    popularities = tuple(popularity_of(table, (popularity or {}).get(table.name)) for table in tables)
    allowed = everywhere if places is None else tuple(places)
    return TableJob(
        tables=tuple(tables),
        popularity=popularities,
        work=work,
        network=network,
        precision=precision,
        limits=limits,
        places=allowed,
    )


def _activations(network: Network, samples: int) -> int:
    """Numbers that a rank keeps for the backward, and the gradients of the widest."""
    layers = sum(network.bottom) + sum(network.top) + network.cross_layers * 2 * network.wide
    return samples * (2 * layers + 4 * network.wide)
