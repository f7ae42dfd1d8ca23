"""Small recommenders compared number by number: one process and ranks with any placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements, TablePlacement, TableSpec, physical_tables
from stretto.recommender.tables.jagged import Jagged
from stretto.recommender.train.clicks import rank_slice
from stretto.recommender.train.engine import Recommender
from stretto.run.config.validation import read_section

ROWS = (7, 40, 13, 100, 5)
SAMPLES = 25  # on two or three ranks not equally many


@dataclass(frozen=True)
class Job:
    """A small job.

    splits: of the stored tables in turn; on one rank all are whole.
    hot: ids of each feature; None: 0 to 4, drawn for each sample.
    """

    rule: str = "rowwise_adagrad"
    splits: tuple[str, ...] = ("table",)
    hot: tuple[int, ...] | None = (1, 1, 1, 1, 1)
    pooling: str = "sum"
    weighted: bool = False
    ids: str = "modulo"
    dense: str = "adamw"
    clip: float | None = None
    overlap: bool = True
    place: str = "device"
    steps: int = 3
    model: Mapping[str, Any] = field(default_factory=lambda: {"interaction": "dot"})
    table: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wire: str = "float32"
    dtype: str = "float64"
    folder: str | None = None
    record: bool = False


@dataclass
class Outcome:
    """The outcome of a job on one rank. `rows`: the values it holds, by (table, state, row, column)."""

    losses: list[float]
    norms: list[float | None]
    dense: dict[str, Tensor]
    rows: dict[tuple[str, str, int, int], float]
    logits: Tensor
    recorded: dict[tuple[str, int, int], float]


def config_of(job: Job, world: int) -> RecommenderConfig:
    tables = [
        {
            "name": f"C{i + 1}",
            "rows": rows,
            "pooling": job.pooling,
            "ids": job.ids if i % 2 else "modulo",
            **job.table,
        }
        for i, rows in enumerate(ROWS)
    ]
    model = {"family": "dlrm", "dense": 3, "bottom": [8, 8], "top": [8, 1], "tables": tables, **job.model}
    return read_section(
        RecommenderConfig,
        {
            "model": model,
            "layout": {"ranks": world},
            "batch": {"global_size": SAMPLES},
            "tables": {"overlap": job.overlap, "wire": job.wire},
            "optim": {
                "dense": {"name": job.dense, "lr": 0.01},
                "tables": {"name": job.rule, "lr": 0.1},
                "clip": job.clip,
            },
            "train": {"dtype": job.dtype, "seed": 3},
        },
    )


def placements_of(job: Job, tables: Sequence[TableSpec], world: int) -> Placements:
    return {table.name: _placement(job, number, table, world) for number, table in enumerate(tables)}


def _placement(job: Job, number: int, table: TableSpec, world: int) -> TablePlacement:
    place: Any = job.place if table.ids != "hash" else "device"
    split: Any = job.splits[number % len(job.splits)] if world > 1 else "table"
    if split == "data" and table.ids == "hash":
        split = "row"
    ranks = tuple(range(world)) if number % 2 else tuple(reversed(range(world)))
    on = {"table": (number % world,), "data": ()}.get(split, ranks)
    return TablePlacement(split, on, place, 0.3)


def batch_of(job: Job, step: int) -> ClickBatch:
    """A global batch."""
    draw = torch.Generator().manual_seed(step)
    if job.hot is not None:
        ids = Jagged.fixed([torch.randint(0, 60, (SAMPLES, hot), generator=draw) for hot in job.hot])
    else:
        lengths = torch.randint(0, 5, (len(ROWS), SAMPLES), generator=draw)
        count = int(lengths.sum())
        weights = torch.rand(count, generator=draw) if job.weighted else None
        ids = Jagged(torch.randint(0, 60, (count,), generator=draw), lengths, weights)
    labels = (torch.rand(SAMPLES, generator=draw) < 0.3).float()
    return ClickBatch(torch.rand(SAMPLES, 3, generator=draw), ids, labels)


def run_all(jobs: Sequence[Job]) -> list[Outcome]:
    """Each job after the other, on this rank."""
    return [run(job) for job in jobs]


def train_step(
    recommender: Recommender, batch: ClickBatch, following: ClickBatch | None = None
) -> tuple[torch.Tensor, float | None]:
    """A step at the peak learning rates; returns this rank's share of the loss, and the norm."""
    loss = recommender.forward_backward(batch, following)
    norm = recommender.gradient_norm()
    recommender.update(1.0, norm)
    return loss.clone(), norm


def run(job: Job) -> Outcome:
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    config = config_of(job, world)
    tables = config.table_specs()
    placements = placements_of(job, physical_tables(tables), world)
    folder = Path(job.folder) if job.folder else None
    recommender = Recommender(config, tables, placements, record=job.record, folder=folder)
    batches = [batch_of(job, step).part(*rank_slice(SAMPLES, rank, world)) for step in range(job.steps)]
    losses, norms = list[float](), list[float | None]()
    for at, batch in enumerate(batches):
        loss, norm = train_step(recommender, batch, batches[at + 1] if at + 1 < job.steps else None)
        if world > 1:
            dist.all_reduce(loss)
        losses.append(float(loss))
        norms.append(norm)
    outcome = Outcome(
        losses,
        norms,
        {name: p.detach().clone() for name, p in recommender.net.named_parameters()},
        rows_of(recommender),
        recommender.predict(batches[0]),
        _recorded(recommender),
    )
    recommender.close()
    return outcome


def rows_of(recommender: Recommender) -> dict[tuple[str, str, int, int], float]:
    """All table values of this rank, by row of the plain table (of hash tables by id)."""
    by_cell = dict[tuple[str, str, int, int], float]()
    for pool in (*recommender.tables.pools, *recommender.tables.replicated_pools):
        for local in pool.shards:
            shard = local.shard
            names = list(range(shard.residue, shard.residue + shard.rows * shard.modulus, shard.modulus))
            slots = list(range(shard.rows))
            if pool.ids is not None:
                state = pool.ids.state()
                with_row = state["rows"] >= 0
                names, slots = state["ids"][with_row].tolist(), state["rows"][with_row].tolist()
            values = local.read(0, max(slots, default=-1) + 1)
            if "low" in values:  # halves of one number
                values = {"weight": recommender.rule.decode(values)}
            for kind, tensor in values.items():
                for name, row in zip(names, slots, strict=True):
                    cells = tensor[row : row + 1] if tensor.dim() == 1 else tensor[row]
                    first = 0 if tensor.dim() == 1 else shard.start
                    for column, value in enumerate(cells.tolist()):
                        by_cell[shard.name, kind, name, first + column] = float(value)
    return by_cell


def _recorded(recommender: Recommender) -> dict[tuple[str, int, int], float]:
    gradients = dict[tuple[str, int, int], float]()
    for local, rows, gradient in recommender.recorded:
        shard = local.shard
        for row, values in zip(rows.tolist(), gradient.tolist(), strict=True):
            for column, value in enumerate(values):
                gradients[shard.name, shard.residue + row * shard.modulus, shard.start + column] = value
    return gradients


def difference(outcomes: Sequence[Outcome], other: Sequence[Outcome]) -> float:
    """The largest difference between two runs of a job on any ranks; infinite if they hold different rows."""
    first, second = _together(outcomes), _together(other)
    if first.rows.keys() != second.rows.keys() or first.recorded.keys() != second.recorded.keys():
        return float("inf")
    pairs = [(first.rows[key], second.rows[key]) for key in first.rows]
    pairs += [(first.recorded[key], second.recorded[key]) for key in first.recorded]
    pairs += zip(first.losses, second.losses, strict=True)
    pairs += [(a or 0.0, b or 0.0) for a, b in zip(first.norms, second.norms, strict=True)]
    tensors = [(first.logits, second.logits)]
    tensors += [(first.dense[name], second.dense[name]) for name in first.dense]
    return max(max(abs(a - b) for a, b in pairs), max(float((a - b).abs().max()) for a, b in tensors))


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    rows = {key: value for outcome in outcomes for key, value in outcome.rows.items()}
    recorded = {key: value for outcome in outcomes for key, value in outcome.recorded.items()}
    logits = torch.cat([outcome.logits for outcome in outcomes])
    return replace(outcomes[0], rows=rows, recorded=recorded, logits=logits)
