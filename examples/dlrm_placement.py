"""A recommender with its tables placed in different ways on two ranks: every placement trains the same model.

python examples/dlrm_placement.py
"""

import torch
import torch.distributed as dist

from stretto import (
    ClickBatch,
    Jagged,
    Recommender,
    RecommenderConfig,
    configured_placements,
    parse_config,
    run_ranks,
)

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
    """Dense features, three ids for each categorical feature, and labels."""
    draw = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, rows, (SAMPLES, 3), generator=draw) for rows in ROWS]
    clicks = (torch.rand(SAMPLES, generator=draw) < 0.3).float()
    return ClickBatch(torch.randn(SAMPLES, 4, generator=draw), Jagged.fixed(ids), clicks)


def train(placement: str, rank: int, ranks: int) -> tuple[list[float], list[float]]:
    """Losses of this rank's samples, and its logits for the first batch after training."""
    config = parse_config(JOB, "job", [f"layout.ranks={ranks}", f"tables.placement={placement}"])
    assert isinstance(config, RecommenderConfig)
    tables = config.table_specs()
    placements = configured_placements(config.tables, config.layout, tables)
    assert placements is not None
    recommender = Recommender(config, tables, placements)
    parts = [
        batch(step).part(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks) for step in range(STEPS)
    ]
    losses = list[float]()
    for part in parts:
        losses.append(float(recommender.forward_backward(part)))
        recommender.update(1.0, recommender.gradient_norm())
    logits = recommender.predict(parts[0]).tolist()
    recommender.close()
    return losses, logits


def on_one_rank(placements: list[str]) -> list[tuple[list[float], list[float]]]:
    dist.init_process_group("gloo")
    trained = [train(placement, dist.get_rank(), dist.get_world_size()) for placement in placements]
    dist.destroy_process_group()
    return trained


if __name__ == "__main__":
    ((alone, scored),) = run_ranks(1, on_one_rank, ["table"])[0]
    placements = ["table", "column", "row", "data", MIXED]
    for placement, *ranks in zip(placements, *run_ranks(2, on_one_rank, placements), strict=True):
        losses = [sum(parts) for parts in zip(*(losses for losses, _ in ranks), strict=True)]
        logits = [logit for _, of_rank in ranks for logit in of_rank]
        off = max(abs(a - b) for a, b in zip(losses + logits, alone + scored, strict=True))
        print(f"{placement}: loss {losses[0]:.4f} to {losses[-1]:.4f}, off by {off:.1e}")
