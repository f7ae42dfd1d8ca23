"""A recommender's checkpoints are the same where they are written while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_recommender_run import train

from recommender_job import config_of
from stretto.engine.checkpoint.folder import HELD_OUT_LOSS, checkpoints
from stretto.engine.checkpoint.manifest import load_manifest
from stretto.engine.parallel.control import this_rank
from stretto.recommender.config.schema import RecommenderConfig

pytestmark = pytest.mark.apart


def shards(config: RecommenderConfig) -> dict[str, list[bytes]]:
    folders = checkpoints(config.run.folder / "checkpoints")
    return {path.name: [file.read_bytes() for file in sorted(path.glob("shard-*"))] for path in folders}


def lag(trainer: Any) -> None:
    """The thread of rank 1 that writes takes until a later step."""
    import threading
    import time

    from stretto.engine.checkpoint.files import CheckedWriter, FileEntry

    close = CheckedWriter.close

    def late(self: CheckedWriter) -> FileEntry:
        if threading.current_thread() is not threading.main_thread() and this_rank() == 1:
            time.sleep(0.2)
        return close(self)

    CheckedWriter.close = late


@pytest.mark.parametrize("place", [pytest.param("device", marks=pytest.mark.slow), "disk"])
def test_they_are_bitwise_those_that_a_run_waits_for(tmp_path: Path, place: str) -> None:
    where = (f"tables.place={place}", "checkpoint.keep=null", "optim.tables.name=adagrad")
    waits = config_of(tmp_path / "waits", *where)
    train(waits)
    goes_on = config_of(tmp_path / "on", *where, "checkpoint.async_save=true", "eval.every=2")
    train(goes_on, (1, None, lag, ()))
    assert list(shards(waits)) == ["step-00000006", "step-00000004", "step-00000002"]
    assert shards(goes_on) == shards(waits)
    count = 4 if place == "disk" else 2  # what lies in files is written at once, to files of its own
    assert all(len(files) == count for files in shards(waits).values())
    losses = [
        load_manifest(path).meta[HELD_OUT_LOSS] for path in checkpoints(goes_on.run.folder / "checkpoints")
    ]
    assert len(set(losses)) == 3
    assert all(0.1 < loss < 2 for loss in losses)
