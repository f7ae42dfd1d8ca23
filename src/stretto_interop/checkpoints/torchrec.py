"""A recommender as a state dict of TorchRec's DLRM or DLRM_DCN (TorchRec 1.8, torchrec/models/dlrm.py).

The names are those of a `DLRM`; a `DLRMTrain`, which wraps one, has them after `model.`. The interactions are
equal but for the order of the pairs of the dot products: TorchRec has those above the diagonal of the matrix,
Stretto those below it. So the columns of the top network's first layer are put in the other order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.engine.checkpoint.index import MODEL
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.checkpoint.storage import TensorSource, dtype_name, write_tensors
from stretto.errors import Problem, StrettoError
from stretto.recommender.checkpoint.export import PUBLIC, StoredRows, open_rows
from stretto.recommender.checkpoint.load import read_tables
from stretto.recommender.placement import TableSpec
from stretto.recommender.serve.export import load_dense, removed_on_failure
from stretto.recommender.shape import DlrmShape
from stretto.recommender.train.resume import recorded_model
from stretto.run.evaluate.trained import find_trained

WEIGHTS, ARGUMENTS = "model.safetensors", "torchrec.json"
_TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"


def export_torchrec(checkpoint: Path, out: Path) -> tuple[list[Path], list[str]]:
    """Write model.safetensors, the state dict, and torchrec.json, the arguments of the model that loads it.

    A table NAME is `t_NAME`, its feature NAME. Tables are written a few rows at a time, in float32 as all
    weights; those of split-SGD in full.

    Returns:
        The files, and notes.

    Raises:
        Problem: TorchRec's models cannot express a field.
        StrettoError: not a recommender's checkpoint, or a damaged one; a folder with an export; no room.
    """
    if taken := [name for name in (WEIGHTS, ARGUMENTS) if (out / name).exists()]:
        raise StrettoError(f"{out} already holds {taken[0]}", hint="export to a new folder")
    shape, tables = recorded_model(find_trained(checkpoint).sizes, checkpoint)
    _check(shape, tables)
    weights, _ = read_whole(checkpoint, MODEL)
    load_dense(shape, weights, checkpoint)  # checks names and shapes
    saved = read_tables(checkpoint)
    dense = {name: weight.float() for name, weight in dense_names(shape, weights).items()}
    entries = [
        TensorSource(name, dtype_name(weight.dtype), tuple(weight.shape), lambda weight=weight: weight)
        for name, weight in dense.items()
    ]
    for table in tables:
        rows = open_rows(checkpoint, saved[table.name])
        name = _TABLE.format(table.name)
        entries.append(TensorSource(name, "float32", rows.shape, partial(_floats, rows)))
    with removed_on_failure(checkpoint, out, (WEIGHTS, ARGUMENTS)):
        out.mkdir(parents=True, exist_ok=True)
        write_tensors(out / WEIGHTS, entries, {"format": "pt"}, PUBLIC)
        (out / ARGUMENTS).write_text(json.dumps(_arguments(shape, tables), indent=1) + "\n", encoding="utf-8")
    notes = [
        "ids are taken modulo a table's rows here, and must be below them in TorchRec",
        "no optimiser states: `--table NAME --state sum` exports that of Adagrad, momentum1 in FBGEMM",
    ]
    return [out / WEIGHTS, out / ARGUMENTS], notes


def dense_names(shape: DlrmShape, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the dense network's weights by TorchRec's names, with the columns in its order."""
    named = dict[str, Tensor]()
    for kind in ("weight", "bias"):
        for layer in range(len(shape.bottom)):
            named[f"dense_arch.model._mlp.{layer}._linear.{kind}"] = weights[f"bottom.{layer}.{kind}"]
        last = len(shape.top) - 1
        for layer in range(last):
            named[f"over_arch.model.0._mlp.{layer}._linear.{kind}"] = weights[f"top.{layer}.{kind}"]
        named[f"over_arch.model.1.{kind}"] = weights[f"top.{last}.{kind}"]
    for layer in range(shape.cross_layers):
        cross = "inter_arch.crossnet"
        named[f"{cross}.W_kernels.{layer}"] = weights[f"cross.{layer}.u.weight"]
        named[f"{cross}.V_kernels.{layer}"] = weights[f"cross.{layer}.v.weight"]
        named[f"{cross}.bias.{layer}"] = weights[f"cross.{layer}.u.bias"]
    if shape.interaction == "dot":
        row, column = torch.triu_indices(shape.vectors, shape.vectors, 1)
        pairs = column * (column - 1) // 2 + row  # the place of (column, row) below the diagonal
        order = torch.cat([torch.arange(shape.dim), shape.dim + pairs])
        first = "over_arch.model.0._mlp.0._linear.weight"
        named[first] = named[first][:, order]
    return named


def _check(shape: DlrmShape, tables: Sequence[TableSpec]) -> None:
    if len(shape.top) < 2:
        rule = "TorchRec's OverArch has two layers or more"
        raise Problem("model.top", list(shape.top), rule, f"model.top=[{shape.interacted}, 1]")
    for table in tables:
        if table.ids != "modulo":
            rule = "TorchRec's DLRM has a plain table for each feature"
            raise Problem(f"table {table.name}", f"ids: {table.ids}", rule, "ids: modulo")


def _arguments(shape: DlrmShape, tables: Sequence[TableSpec]) -> dict[str, Any]:
    """Return what the model is made with, and the tables of its EmbeddingBagCollection."""
    crossed = {"dcn_num_layers": shape.cross_layers, "dcn_low_rank_dim": shape.cross_rank}
    return {
        "model": "DLRM" if shape.interaction == "dot" else "DLRM_DCN",
        "arguments": {
            "dense_in_features": shape.dense,
            "dense_arch_layer_sizes": list(shape.bottom),
            "over_arch_layer_sizes": list(shape.top),
            **(crossed if shape.interaction == "dcn" else {}),
        },
        "tables": [
            {
                "name": f"t_{table.name}",
                "embedding_dim": table.dim,
                "num_embeddings": table.rows,
                "feature_names": [table.name],
                "pooling": table.pooling.upper(),
            }
            for table in tables
        ],
    }


def _floats(rows: StoredRows) -> Iterator[Tensor]:
    return (block.float() for block in rows.blocks())
