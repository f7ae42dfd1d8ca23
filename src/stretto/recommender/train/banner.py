"""What a recommender's run prints before it starts: model, clicks, and the placement of each table."""

from __future__ import annotations

from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements, physical_tables
from stretto.recommender.shape import count_dlrm
from stretto.recommender.train.clicks import ClickData
from stretto.recommender.view import placement_text


def banner(config: RecommenderConfig, data: ClickData, placements: Placements) -> str:
    """Two lines and the placement table."""
    shape = config.shape(data.tables)
    layout = config.layout
    optim = config.optim
    dense = count_dlrm(shape).dense
    rows = sum(table.rows * table.dim for table in physical_tables(data.tables))
    interaction = "dot products" if shape.interaction == "dot" else f"{shape.cross_layers} cross layers"
    source = ", ".join(config.data.sources)
    return "\n".join(
        [
            f"dlrm of {_short(dense)} dense parameters and {len(data.tables)} tables of {_short(rows)} "
            f"({interaction}), {config.train.dtype}, on {layout.ranks} rank{'s' * (layout.ranks > 1)}; "
            f"{config.train.steps} steps of {config.batch.global_size} samples; {optim.dense.name} and "
            f"{optim.tables.name}",
            f"clicks: {source}, {_short(data.samples)} samples, {_short(data.held_out)} of them held out; "
            f"results in {config.run.folder} (metrics.jsonl, eval.jsonl, placement.yaml, checkpoints/)",
            placement_table(data, placements, layout.ranks),
        ]
    )


def placement_table(data: ClickData, placements: Placements, ranks: int) -> str:
    """A line a table, and what each rank reads and holds of them."""
    return placement_text(physical_tables(data.tables), placements, ranks)


def _short(number: int) -> str:
    """Such as 850, 12.3 k, 124 M, 6.7 B."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
