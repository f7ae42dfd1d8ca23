"""Checkpoints that are written while training goes on: equal to those that it waits for, or an error."""

from __future__ import annotations

import errno
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.engine.checkpoint.files import FileEntry
from stretto.engine.checkpoint.folder import checkpoints
from stretto.engine.checkpoint.load import latest
from stretto.engine.parallel.control import this_rank
from stretto.errors import StrettoError
from stretto.run.config import TrainConfig
from stretto.run.launch.local import RankFailed
from tiny_job import LLAMA, job
from train_runs import at_step, keep_notes, send_self, train

ASYNC = ("checkpoint.async_save=true", "checkpoint.every=2", "checkpoint.keep=null")
PIPEDREAM = ("schedule.name=pipedream", "layout.pp=2", "optim.clip=null")


def shards(config: TrainConfig, step: int) -> list[bytes]:
    folder = config.run.folder / "checkpoints" / f"step-{step:08d}"
    return [path.read_bytes() for path in sorted(folder.glob("shard-*"))]


def steps(config: TrainConfig) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints(config.run.folder / "checkpoints")]


def lag(trainer: Any, rank: int, seconds: float) -> None:
    """The thread of the rank that writes takes so much longer."""
    from stretto.engine.checkpoint.files import CheckedWriter

    close = CheckedWriter.close

    def late(self: CheckedWriter) -> FileEntry:
        if "shard" in self._path.name and threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        return close(self)

    if this_rank() == rank:
        CheckedWriter.close = late


def break_writing(trainer: Any, rank: int) -> None:
    from stretto.engine.checkpoint.files import CheckedWriter

    def full(self: CheckedWriter, _: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self._path))

    if this_rank() == rank:
        CheckedWriter._write_once = full


@pytest.mark.parametrize("layout", [("layout.dp=2", "dp.mode=zero2"), PIPEDREAM], ids=["zero2", "pipedream"])
def test_they_are_bitwise_those_that_a_run_waits_for(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Although the saves of one rank take until a later step, which changes what is saved."""
    layout = (*layout, *ASYNC, "checkpoint.every=3")
    waits = job(tmp_path, *layout, "checkpoint.async_save=false", "run.name=waits", model=LLAMA)
    train(waits)
    goes_on = job(tmp_path, *layout, "run.name=goes-on", model=LLAMA)
    train(goes_on, at_step(1, None, lag, 1, 0.2))
    assert steps(goes_on) == steps(waits) == [6, 3]
    for step in (3, 6):
        assert shards(goes_on, step) == shards(waits, step)


def test_a_checkpoint_is_left_out_while_one_is_written_or_waits_for_it(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    hooks = at_step(1, None, lag, 1, 1.0), keep_notes(str(notes))
    layout = ("layout.dp=2", "checkpoint.every=1", "train.steps=4")
    config = job(tmp_path, *ASYNC, *layout, "checkpoint.if_busy=skip", "run.name=skip")
    train(config, *hooks)
    assert steps(config) == [4, 1]
    left_out = [line for line in notes.read_text().splitlines() if "no checkpoint" in line]
    assert left_out[0] == "step 2: no checkpoint, the last one is still being written"
    config = job(tmp_path, *ASYNC, *layout, "train.steps=3", "run.name=wait")
    train(config, at_step(1, None, lag, 1, 0.1))
    assert steps(config) == [3, 2, 1]


def test_what_is_saved_at_a_signal_is_waited_for(tmp_path: Path) -> None:
    config = job(tmp_path, *ASYNC, "layout.dp=2", "run.name=stopped")
    outcome = train(config, at_step(1, None, lag, 1, 0.1), at_step(3, 1, send_self, int(signal.SIGTERM)))
    assert (outcome["stopped"], outcome["step"]) == (True, 3)
    assert outcome["checkpoint"].endswith("step-00000003")
    assert steps(config) == [3, 2]
    assert latest(config.run.folder / "checkpoints", pytest.fail) is not None


def test_a_failed_write_ends_the_run_within_a_step(tmp_path: Path) -> None:
    config = job(tmp_path, *ASYNC, "layout.dp=2", "train.steps=60", "run.name=full")
    seen = tmp_path / "seen"
    hooks = [at_step(step, 0, _mark, str(seen), step) for step in range(5, 60)]
    with pytest.raises(RankFailed) as caught:
        train(config, at_step(4, None, break_writing, 1), *hooks)
    text = str(caught.value)
    assert "rank 1: the disk is full: [Errno 28]" in text
    assert "step-00000004.partial/shard-00001.safetensors" in text
    folder = config.run.folder / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert max(map(int, seen.read_text().split())) <= 7  # it fails while step 5 runs or a step later


def _mark(_: Any, path: str, step: int) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{step}\n")


def test_the_best_and_every_nth_stay(tmp_path: Path) -> None:
    config = job(
        tmp_path,
        *("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=3", "checkpoint.keep_best=1"),
        *("eval.every=1", "eval.batches=1", "train.steps=8", "optim.lr=0.3", "run.name=best"),
    )
    train(config)
    from stretto.run.train.metrics import read_lines

    rows = read_lines(config.run.folder / "eval.jsonl")
    best = min(rows, key=lambda row: row["loss"])["step"]
    assert best not in (3, 6, 8), "another seed shows more"
    assert steps(config) == sorted({3, 6, 8, best}, reverse=True)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("checkpoint.keep_best=1",), "checkpoint.keep_best is 1: eval.every is null"),
        (("checkpoint.keep=null", "checkpoint.keep_every=5"), "checkpoint.keep_every is 5: checkpoint.keep"),
        (("checkpoint.if_busy=drop",), "checkpoint.if_busy is 'drop'"),
    ],
)
def test_what_keeps_nothing_more_is_refused(tmp_path: Path, overrides: tuple[str, ...], says: str) -> None:
    from stretto.run.config.check import check

    with pytest.raises(StrettoError) as caught:
        check(job(tmp_path, *overrides))
    assert says in str(caught.value)
