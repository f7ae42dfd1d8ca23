"""Checkpoints of a recommender's run: what is saved, and how a run resumes from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.engine.checkpoint.folder import is_checkpoint
from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.load import load
from stretto.engine.checkpoint.shards import Saved, Tensors
from stretto.recommender.checkpoint.load import load_tables
from stretto.recommender.checkpoint.names import TABLES
from stretto.recommender.checkpoint.save import tensors_to_save
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements, physical_tables
from stretto.recommender.train.clicks import ClickData
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.placement import to_json
from stretto.recommender.train.resume import changed_clicks, check_fits, model_facts
from stretto.run.config.section import plain_section
from stretto.run.launch.lease import check_lease
from stretto.run.train.loop import Position, Save
from stretto.run.train.position import counted_from, report_resumed, retention
from stretto.run.train.resume import place_of


def tensors_of(recommender: Recommender) -> Saved:
    """Everything that this rank contributes to a checkpoint."""
    stored = physical_tables(recommender.tables.features)
    return {**_dense(recommender), **tensors_to_save(recommender.local_shards, stored)}


@dataclass(kw_only=True)
class ClickPosition(Position):
    """How far a recommender's run is."""

    passed_over: int = 0  # steps without an update


def load_into(recommender: Recommender, path: Path, updates: int, check: bool, passed_over: int = 0) -> None:
    """Loads this rank from a checkpoint of `updates` steps. Collective.

    Args:
        passed_over: of the steps, those without an update.

    Raises:
        StrettoError: no checkpoint there, damaged, or of another model or optimiser.
    """
    recommender.dense.prepare(updates - passed_over)
    load(path, _dense(recommender), ignore=[TABLES], check=check)
    stored = physical_tables(recommender.tables.features)
    load_tables(path, recommender.local_shards, stored, check=False)
    recommender.updates = updates


def load_weights(recommender: Recommender, path: Path, updates: int) -> None:
    """Loads this rank's weights from a checkpoint of `updates` updates, and no optimiser states. Collective.

    Raises:
        StrettoError: no checkpoint there, damaged, or of another model.
    """
    dense = {name: each for name, each in _dense(recommender).items() if name.startswith(MODEL)}
    load(path, dense, ignore=[TABLES, OPTIM])
    stored = physical_tables(recommender.tables.features)
    encode = recommender.rule.encode
    load_tables(path, recommender.local_shards, stored, states=False, encode=encode, check=False)
    recommender.updates = updates


def _dense(recommender: Recommender) -> Tensors:
    """The dense tensors, equal on every rank; the checkpoint divides their writing among the ranks."""
    return {
        (f"{OPTIM}{key}.{name}" if key else f"{MODEL}{name}"): (tensor, place)
        for key, name, tensor, place in recommender.dense.tensors()
    }


def save_run(
    config: RecommenderConfig,
    recommender: Recommender,
    data: ClickData,
    placements: Placements,
    position: ClickPosition,
    save: Save,
) -> Path:
    """Write a checkpoint of the run with `save`, or begin to. Collective over all ranks."""
    meta: dict[str, Any] = {
        **asdict(position),
        "seed": config.train.seed,
        "model": model_facts(config, data.tables),
        "layout": f"ranks={config.layout.ranks}",
        "placement": to_json(placements),
        "clicks": data.same,
        "config": plain_section(config),
    }
    return save(
        folder=config.run.folder / "checkpoints",
        step=position.step,
        tensors=tensors_of(recommender),
        meta=meta,
        per_rank=None,
        keep=retention(config),
        permit=lambda: check_lease(config.run.folder),
    )


def resume_from(
    config: RecommenderConfig,
    recommender: Recommender,
    data: ClickData,
    path: Path,
    report: Callable[[str], object],
    check: bool | None = None,
) -> ClickPosition:
    """Loads the model from a checkpoint written by any number of ranks and any placement. Collective.

    Args:
        check: read every byte first; None: only where the config names this checkpoint, unread so far.

    Raises:
        StrettoError: damaged, or of another model.
    """
    meta = check_fits(path, config, data.tables)
    # `latest` has verified every byte; a checkpoint named in the config is verified here
    check = is_checkpoint(place_of(config)) if check is None else check
    passed_over = meta.get("passed_over", 0)
    load_into(recommender, path, meta["step"], check=check, passed_over=passed_over)
    report_resumed(config, path, meta, report, changed_clicks(meta.get("clicks", {}), data.same))
    return ClickPosition(
        step=meta["step"],
        samples=meta["samples"],
        counted_from=counted_from(meta, config.batch.global_size),
        loss=meta.get("loss"),
        skipped=[(first, last) for first, last in meta.get("skipped", [])],
        history=[(loss, norm) for loss, norm in meta.get("history", [])],
        passed_over=passed_over,
    )
