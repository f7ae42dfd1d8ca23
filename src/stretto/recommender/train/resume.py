"""Checks from manifests alone whether a recommender's run can resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import TableSpec
from stretto.run.train.resume import another_model, another_optimiser, read_meta, wanted_checkpoint

_OF_TABLE = ("rows", "dim", "ids", "divisor", "pooling")


def model_facts(config: RecommenderConfig, tables: Sequence[TableSpec]) -> dict[str, Any]:
    """What must be equal for weights to fit."""
    shape = config.shape(tables)
    return {
        "family": "dlrm",
        "interaction": shape.interaction,
        "dense": shape.dense,
        "bottom": list(shape.bottom),
        "top": list(shape.top),
        "cross_layers": shape.cross_layers,
        "cross_rank": shape.cross_rank,
        "tables": {table.name: {name: getattr(table, name) for name in _OF_TABLE} for table in tables},
    }


def check_resume(
    config: RecommenderConfig, tables: Sequence[TableSpec], clicks: Mapping[str, Any] | None = None
) -> None:
    """Checks from manifests, before ranks are started, that the run can resume from its checkpoint.

    Raises:
        StrettoError: no checkpoint where one is named, or one of another model or optimiser.
    """
    whole = wanted_checkpoint(config)
    if whole is not None:
        check_fits(whole, config, tables, clicks)


def check_fits(
    path: Path,
    config: RecommenderConfig,
    tables: Sequence[TableSpec],
    clicks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The checkpoint's metadata, if it is of this model and these optimisers.

    Args:
        clicks: what identifies the samples (`ClickData.same`); None: they have been compared.

    Raises:
        StrettoError: it is not.
    """
    meta = read_meta(path, ("step", "samples"))
    theirs, ours = _mapping(meta.get("model")), model_facts(config, tables)
    if theirs.get("family") != "dlrm":
        raise another_model(path, "family", theirs.get("family"), "dlrm")
    for name, value in ours.items():
        if name != "tables" and theirs.get(name) != value:
            raise another_model(path, name, theirs.get(name), value)
    _check_tables(path, _mapping(theirs.get("tables")), ours["tables"])
    _check_optimizers(path, meta, config)
    there = _mapping(meta.get("clicks"))
    if clicks is not None and "transform" in there and there["transform"] != clicks.get("transform"):
        raise StrettoError(
            f"checkpoint {path} is of clicks whose ids were mapped to rows by another vocabulary or hash: "
            "its tables' rows belong to other ids than those of data.source",
            hint="name the clicks that it was trained on, or train anew under another run.name",
        )
    return meta


def changed_clicks(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """What of the samples differs from a checkpoint's, as the subject of a sentence; None: nothing that it
    has recorded.
    """
    changed = [name for name in theirs if theirs[name] != ours.get(name)]
    if not changed:
        return None
    if changed == ["trained"]:
        return "data.split, data.valid or the names of files, and with them the held-out samples,"
    return "data.shuffle or data.block, the order of the samples," if changed == ["order"] else "the clicks"


def _check_tables(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    if list(theirs) != list(ours):
        there, here = (f"{len(names)} ({', '.join(list(names)[:3])}...)" for names in (theirs, ours))
        raise another_model(path, "tables", there, here)
    for table, facts in ours.items():
        for name, value in facts.items():
            if (there := _mapping(theirs[table]).get(name)) != value:
                raise another_model(path, f"{name} of table {table}", there, value)


def _check_optimizers(path: Path, meta: Mapping[str, Any], config: RecommenderConfig) -> None:
    """Checks that the states are of these optimisers; learning rates and other settings may change."""
    theirs = _mapping(_mapping(meta.get("config")).get("optim"))
    for part, ours in (("dense", config.optim.dense.name), ("tables", config.optim.tables.name)):
        there = _mapping(theirs.get(part)).get("name", ours)
        if there != ours:
            raise another_optimiser(path, f"optim.{part}.name", there, ours)
    dense = _mapping(theirs.get("dense"))
    if bool(dense.get("momentum")) != bool(config.optim.dense.momentum):
        ours = config.optim.dense.momentum
        raise another_optimiser(path, "optim.dense.momentum", dense.get("momentum"), ours)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
