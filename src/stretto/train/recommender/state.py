"""A recommender as a checkpoint sees it: dense weights and states by name, tables by rows and columns."""

from __future__ import annotations

from pathlib import Path

from stretto.checkpoint.load import load
from stretto.checkpoint.shards import Saved, Tensors
from stretto.checkpoint.tables.load import load_tables
from stretto.checkpoint.tables.names import TABLES
from stretto.checkpoint.tables.save import tensors_to_save
from stretto.layout.tables import physical_tables
from stretto.train.recommender.engine import Recommender
from stretto.train.state import MODEL, OPTIM


def tensors_of(recommender: Recommender) -> Saved:
    """All that a checkpoint has of this rank."""
    stored = physical_tables(recommender.tables.features)
    return {**_dense(recommender), **tensors_to_save(recommender.held, stored)}


def load_into(recommender: Recommender, path: Path, updates: int, check: bool) -> None:
    """Fill this rank from a checkpoint after so many updates. Collective.

    Raises:
        StrettoError: no checkpoint there, damaged, or of another model or optimiser.
    """
    recommender.dense.prepare(updates)
    load(path, _dense(recommender), ignore=[TABLES], check=check)
    stored = physical_tables(recommender.tables.features)
    load_tables(path, recommender.held, stored, check=False)
    recommender.updates = updates


def _dense(recommender: Recommender) -> Tensors:
    """Equal on every rank; a checkpoint spreads the writing of copies."""
    return {
        (f"{OPTIM}{key}.{name}" if key else f"{MODEL}{name}"): (tensor, place)
        for key, name, tensor, place in recommender.dense.tensors()
    }
