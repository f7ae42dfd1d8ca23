"""Checks from manifests alone whether a recommender's run can resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.recommender.config.schema import RecommenderOptim
from stretto.recommender.placement import TableSpec
from stretto.recommender.shape import DlrmShape, TableShape
from stretto.run.train.resume import another_model, another_optimiser, read_meta

_OF_TABLE = ("rows", "dim", "ids", "divisor", "pooling")


def model_record(shape: DlrmShape, tables: Sequence[TableSpec]) -> dict[str, Any]:
    """Return what must be equal for weights to fit."""
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


def recorded_model(record: Any, source: Path) -> tuple[DlrmShape, tuple[TableSpec, ...]]:
    """Return the sizes of a model and its tables from what `model_record` returned.

    Args:
        source: where the record is from.

    Raises:
        StrettoError: it is of a language model, or damaged.
    """
    record = _mapping(record)
    if record.get("family") != "dlrm":
        raise StrettoError(
            f"{source} is of family {record.get('family')!r}, not a recommender",
            hint="name a run of a recommender, or a checkpoint of one",
        )
    try:
        tables = tuple(
            TableSpec(name=name, **{field: each[field] for field in _OF_TABLE})
            for name, each in record["tables"].items()
        )
        shape = DlrmShape(
            tables=tuple(TableShape(table.rows, table.dim) for table in tables),
            dense=record["dense"],
            bottom=tuple(record["bottom"]),
            top=tuple(record["top"]),
            interaction=record["interaction"],
            cross_layers=record["cross_layers"],
            cross_rank=record["cross_rank"],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise StrettoError(f"{source}: a size of the model is missing or wrong: {error}") from None
    return shape, tables


def check_fits(
    path: Path,
    shape: DlrmShape,
    tables: Sequence[TableSpec],
    optim: RecommenderOptim,
    clicks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the checkpoint's metadata, if it is of this model and these optimisers.

    Args:
        clicks: what identifies the samples (`ClickData.identity`), or None if they have been compared.

    Raises:
        StrettoError: it is not.
    """
    meta = read_meta(path, ("step", "samples"))
    saved, configured = _mapping(meta.get("model")), model_record(shape, tables)
    if saved.get("family") != "dlrm":
        raise another_model(path, "family", saved.get("family"), "dlrm")
    for name, value in configured.items():
        if name != "tables" and saved.get(name) != value:
            raise another_model(path, name, saved.get(name), value)
    saved_tables = _mapping(saved.get("tables"))
    if list(saved_tables) != list(configured["tables"]):
        described = (
            f"{len(names)} ({', '.join(list(names)[:3])}...)"
            for names in (saved_tables, configured["tables"])
        )
        raise another_model(path, "tables", *described)
    for table, fields in configured["tables"].items():
        for name, value in fields.items():
            if (before := _mapping(saved_tables[table]).get(name)) != value:
                raise another_model(path, f"{name} of table {table}", before, value)
    _check_optimizers(path, meta, optim)
    saved_clicks = _mapping(meta.get("clicks"))
    transform = saved_clicks.get("transform")
    if clicks is not None and "transform" in saved_clicks and transform != clicks.get("transform"):
        raise StrettoError(
            f"checkpoint {path} is of clicks whose ids were mapped to rows by another vocabulary or hash: "
            "its tables' rows belong to other ids than those of data.source",
            hint="name the clicks that it was trained on, or train anew under another run.name",
        )
    return meta


def changed_clicks(saved: Mapping[str, Any], configured: Mapping[str, Any]) -> str | None:
    """Return what of the samples differs from a checkpoint's, as the subject of a sentence, or None if
    nothing that it has recorded does.
    """
    changed = [name for name in saved if saved[name] != configured.get(name)]
    if not changed:
        return None
    if changed == ["trained"]:
        return "data.split, data.valid or the names of files, and with them the held-out samples,"
    return "data.shuffle or data.block, the order of the samples," if changed == ["order"] else "the clicks"


def _check_optimizers(path: Path, meta: Mapping[str, Any], optim: RecommenderOptim) -> None:
    """Check that the states are of these optimisers; learning rates and other settings may change."""
    saved = _mapping(_mapping(meta.get("config")).get("optim"))
    for part, name in (("dense", optim.dense.name), ("tables", optim.tables.name)):
        before = _mapping(saved.get(part)).get("name", name)
        if before != name:
            raise another_optimiser(path, f"optim.{part}.name", before, name)
    momentum = _mapping(saved.get("dense")).get("momentum")
    if bool(momentum) != bool(optim.dense.momentum):
        raise another_optimiser(path, "optim.dense.momentum", momentum, optim.dense.momentum)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
