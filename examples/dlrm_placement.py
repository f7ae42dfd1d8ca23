"""A recommender with its tables placed in different ways on two ranks trains the same model, to rounding.

python examples/dlrm_placement.py
"""

import torch
import torch.distributed as dist

from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.config.load import parse_any
from stretto.recommender.config.placed import given_placements
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.tables.jagged import Jagged
from stretto.recommender.train.engine import Recommender
from stretto.run.launch.local import run_ranks

STEPS, SAMPLES, ROWS = 10, 64, (1000, 50, 300)
JOB = """
model: {family: dlrm, dense: 4, bottom: [16, 8], top: [16, 1], rows: [1000, 50, 300]}
batch: {global_size: 64}
optim: {dense: {name: sgd, lr: 0.1}, tables: {name: rowwise_adagrad, lr: 0.1}}
train: {dtype: float64}
"""
MIXED = (
    "{C1: {split: row, ranks: all}, C2: {split: data}, C3: {split: table, ranks: 1, place: cpu, cache: 0.9}}"
)


def batch(step: int) -> ClickBatch:
    """Numbers, three ids of each feature, and clicks."""
    draw = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, rows, (SAMPLES, 3), generator=draw) for rows in ROWS]
    clicks = (torch.rand(SAMPLES, generator=draw) < 0.3).float()
    return ClickBatch(torch.randn(SAMPLES, 4, generator=draw), Jagged.fixed(ids), clicks)


def train(placement: str, rank: int, ranks: int) -> tuple[list[float], list[float]]:
    """Losses of this rank's samples, and the logits of the first batch afterwards."""
    config = parse_any(JOB, "job", [f"layout.ranks={ranks}", f"tables.placement={placement}"])
    assert isinstance(config, RecommenderConfig)
    tables = config.table_specs()
    placements = given_placements(config, tables)
    assert placements is not None
    recommender = Recommender.build(config, tables, placements)
    parts = [
        batch(step).part(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks) for step in range(STEPS)
    ]
    losses = [float(recommender.step(part).loss_sum) for part in parts]
    logits = recommender.predict(parts[0]).tolist()
    recommender.close()
    return losses, logits


def on_one_rank(placements: list[str]) -> list[tuple[list[float], list[float]]]:
    dist.init_process_group("gloo")
    found = [train(placement, dist.get_rank(), dist.get_world_size()) for placement in placements]
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    ((alone, scored),) = run_ranks(1, on_one_rank, ["table"])[0]
    placements = ["table", "column", "row", "data", MIXED]
    for placement, *found in zip(placements, *run_ranks(2, on_one_rank, placements), strict=True):
        losses = [sum(parts) for parts in zip(*(losses for losses, _ in found), strict=True)]
        logits = [one for _, of_rank in found for one in of_rank]
        off = max(abs(a - b) for a, b in zip(losses + logits, alone + scored, strict=True))
        print(f"{placement}: loss {losses[0]:.4f} to {losses[-1]:.4f}, off by {off:.1e}")
