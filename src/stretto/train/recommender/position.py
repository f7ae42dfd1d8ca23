"""Where a recommender's run is, what it writes down of that, and where it goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.checkpoint.folder import is_checkpoint
from stretto.checkpoint.save import save
from stretto.config.recommender.schema import RecommenderConfig
from stretto.layout.tables import Placements
from stretto.train.recommender.clicks import ClickData
from stretto.train.recommender.engine import Recommender
from stretto.train.recommender.placing import to_json
from stretto.train.recommender.resume import check_fits, model_facts
from stretto.train.recommender.state import load_into, tensors_of
from stretto.train.resume import place_of


@dataclass
class Position:
    """How far the run is; with the seed it says which samples come next."""

    step: int = 0  # updates made
    samples: int = 0
    loss: float | None = None  # of the last step


def save_run(
    config: RecommenderConfig,
    recommender: Recommender,
    data: ClickData,
    placements: Placements,
    position: Position,
) -> Path:
    """Write a checkpoint of the run. Collective over all ranks."""
    meta: dict[str, Any] = {
        **asdict(position),
        "seed": config.train.seed,
        "model": model_facts(config, data.tables),
        "layout": f"ranks={config.layout.ranks}",
        "placement": to_json(placements),
        "clicks": data.same,
        "config": config.model_dump(mode="json"),
    }
    return save(
        config.run.folder / "checkpoints",
        position.step,
        tensors_of(recommender),
        meta,
        None,
        config.checkpoint.keep,
    )


def go_on(
    config: RecommenderConfig,
    recommender: Recommender,
    data: ClickData,
    path: Path,
    report: Callable[[str], object],
) -> Position:
    """Fill the model from a checkpoint, whatever ranks and placement wrote it. Collective.

    Raises:
        StrettoError: damaged, or of another model.
    """
    meta = check_fits(path, config, data.tables)
    # `latest` has read every byte of what it found; a checkpoint that is named is read here first
    load_into(recommender, path, meta["step"], check=is_checkpoint(place_of(config)))
    report(f"resumed from {path} at step {meta['step']}")
    if meta["clicks"] != data.same:
        report("warning: the clicks are not the checkpoint's; samples go on by number in the new ones")
    if meta["seed"] != config.train.seed:
        report(
            f"warning: train.seed is {config.train.seed}, the run began with {meta['seed']}: another order"
        )
    return Position(meta["step"], meta["samples"], meta.get("loss"))
