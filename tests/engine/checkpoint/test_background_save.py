"""A checkpoint that is written while tensors change has the values that they had, or fails on all ranks."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_checkpoint_away import optimizer_of, table, train

from hand_layouts import Hand, blank_state, differing, true_state
from ranks import on_ranks
from save_faults import attempt, failing, paused_writes
from stretto.engine.checkpoint.background import BackgroundSave
from stretto.engine.checkpoint.files import CheckedWriter
from stretto.engine.checkpoint.folder import Retention
from stretto.engine.checkpoint.load import latest, load
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.shards import Streamed, Tensors
from stretto.engine.offload.tensor_files import at_hand, is_away
from stretto.engine.parallel.control import gather_json
from stretto.errors import StrettoError

HANDS = Hand(tp=2)
CPU = torch.device("cpu")


def spoil(tensors: Tensors) -> None:
    """Change all tensors in place, like a step."""
    for local, _ in tensors.values():
        local.fill_(55)


def settle(background: BackgroundSave, steps: int = 10_000) -> Path | None:
    """Agree like the steps of a run, and advance if all have written or one has failed."""
    for _ in range(steps):
        written, failed = zip(*gather_json([background.written, background.failed]), strict=True)
        if all(written) or any(failed):
            path = background.advance()
            if path is not None:
                return path
        time.sleep(0.001)
    return None


def test_the_values_are_those_of_the_moment_it_began(tmp_path: Path) -> None:
    background = BackgroundSave(CPU)
    rows = torch.arange(12.0).reshape(4, 3)
    boxes = {(0, 0): ((2, 3), lambda: rows[:2]), (2, 0): ((2, 3), lambda: (rows[i : i + 1] for i in (2, 3)))}
    for step in (1, 2):
        state = true_state(Hand(), 0)
        rows.copy_(torch.arange(12.0).reshape(4, 3))
        with paused_writes() as go:
            streamed = Streamed((4, 3), torch.float32, boxes)
            path = background.start(tmp_path, step, {**state, "model.rows": streamed}, {"step": step})
            assert not background.written
            spoil(state)
            rows.fill_(55)
            go.set()
            assert background.finish() == path == tmp_path / f"step-{step:08d}"
        assert not background.busy
        blank = blank_state(Hand(), 0)
        read = torch.zeros(4, 3)
        placed = state["model.embed"][1].unsharded("model.rows", (4, 3))
        assert load(path, {**blank, "model.rows": (read, placed)}).meta == {"step": step}
        assert differing(blank, Hand(), 0) == []
        assert torch.equal(read, torch.arange(12.0).reshape(4, 3))


def test_it_writes_the_files_that_a_save_that_is_waited_for_writes(tmp_path: Path) -> None:
    state = true_state(Hand(), 0)
    background = BackgroundSave(CPU)
    waited = save(tmp_path / "one", 3, state, {"a": 1}, {"cpu": torch.arange(5)})
    background.start(tmp_path / "two", 3, state, {"a": 1}, {"cpu": torch.arange(5)})
    two = background.finish()
    for file in ("shard-00000.safetensors", "metadata.json"):
        assert (waited / file).read_bytes() == (two / file).read_bytes()


def test_the_memory_and_the_division_serve_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.engine.checkpoint import save as module

    divided, inner = list[int](), module.Planner
    monkeypatch.setattr(module, "Planner", lambda *all_: divided.append(1) or inner(*all_))
    state, background = true_state(Hand(), 0), BackgroundSave(CPU)
    places = set[int]()
    for step in (1, 2, 3):
        background.start(tmp_path, step, state, {})
        places.add(background._memory._memory.data_ptr())
        background.finish()
    assert (len(divided), len(places)) == (1, 1)
    assert background._memory._memory.numel() < 1.6 * sum(t.nbytes for t, _ in state.values())
    del state["model.scale"]
    background.start(tmp_path, 4, state, {})
    path = background.finish()
    assert len(divided) == 2
    blank = {n: s for n, s in blank_state(Hand(), 0).items() if n in state}
    load(path, blank)
    assert all(torch.equal(blank[n][0], t) for n, (t, _) in state.items())


def test_what_lies_in_files_is_not_copied(tmp_path: Path) -> None:
    """States that an optimiser keeps in files are those of the moment too, and take no memory."""
    sharded, every = optimizer_of("nvme", tmp_path / "states", seed=1)
    train(sharded, every, 2)
    state = table(sharded)
    expected = {name: at_hand(local).clone() for name, (local, _) in state.items()}
    background = BackgroundSave(CPU)
    with paused_writes() as go:
        background.start(tmp_path, 2, state, {})
        in_memory = sum(t.nbytes for t, _ in state.values() if not is_away(t))
        assert background._memory._memory.numel() < in_memory + 64 * len(state)
        train(sharded, every, 1)
        go.set()
        path = background.finish()
    other, others = optimizer_of("none", tmp_path / "other", seed=2)
    train(other, others, 1)  # makes its states
    read = table(other)
    load(path, read)
    assert [name for name, (local, _) in read.items() if not torch.equal(local, expected[name])] == []
    sharded.close()


def test_a_commit_that_is_not_permitted_leaves_nothing(tmp_path: Path) -> None:
    def refuse() -> None:
        raise StrettoError("taken over")

    for begin in (save, BackgroundSave(CPU).start):
        message = attempt(
            lambda begin=begin: (
                begin(tmp_path, 1, true_state(Hand(), 0), {}, before_commit=refuse),
                begin is not save and begin.__self__.finish(),
            )
        )
        assert message == "StrettoError: taken over"
        assert list(tmp_path.iterdir()) == []


def test_closing_ends_the_writing_and_commits_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, true_state(Hand(), 0), {})
    background = BackgroundSave(CPU)
    with paused_writes(after=1) as go:
        background.start(tmp_path, 2, true_state(Hand(), 0), {})
        threading.Timer(0.05, go.set).start()
        background.close()
    assert not background.busy
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert not [thread for thread in threading.enumerate() if thread.name == "stretto-save"]


def test_no_memory_for_the_copy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    background, empty = BackgroundSave(CPU), torch.empty

    def none_but_nothing(size: Any, **how: Any) -> torch.Tensor:
        if size and "pin_memory" in how:
            raise RuntimeError("not enough memory: you tried to allocate")
        return empty(size, **how)

    monkeypatch.setattr("stretto.engine.checkpoint.host_copy.torch.empty", none_but_nothing)
    with pytest.raises(StrettoError, match=r"no host memory for this rank's copy of the checkpoint, "):
        background.start(tmp_path, 1, true_state(Hand(), 0), {})
    assert list(tmp_path.iterdir()) == []
    assert not background.busy


def fail_in_the_background(root: str) -> list[str]:
    """On two ranks: what each way of failing raised here, by steps that go on; then a whole checkpoint."""
    rank, reported = dist.get_rank(), list[str]()
    folder = Path(root)
    save(folder, 1, true_state(HANDS, rank), {})
    background = BackgroundSave(CPU)

    def write(act: Callable[[], object] = lambda: None) -> None:
        state = true_state(HANDS, rank)
        background.start(folder, 2, state, {})
        spoil(state)
        act()
        settle(background)

    original = CheckedWriter._write_once
    for broken in (1, 0):
        for error in (OSError(errno.EIO, "Input/output error"), OSError(errno.ENOSPC, "No space left")):
            if rank == broken:
                CheckedWriter._write_once = failing(2, error)
            reported.append(attempt(write))
            CheckedWriter._write_once = original
            dist.barrier()
            assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    if rank == 0:  # is still writing when the other fails, and is interrupted
        with paused_writes(after=1) as go:
            threading.Timer(0.2, go.set).start()
            reported.append(attempt(write))
    else:
        CheckedWriter._write_once = failing(1, OSError(errno.EIO, "Input/output error"))
        reported.append(attempt(write))
        CheckedWriter._write_once = original
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert not background.busy
    reported.append(attempt(write))
    assert latest(folder) == folder / "step-00000002"
    blank = blank_state(HANDS, rank)
    load(folder / "step-00000002", blank)
    assert differing(blank, HANDS, rank) == []
    return reported


def test_a_failure_in_the_background_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    zero, first = on_ranks(2, fail_in_the_background, str(tmp_path))
    assert zero == first
    starts = [
        "CollectiveError: rank 1: [Errno 5] Input/output error: ",
        "CollectiveError: rank 1: the disk is full: [Errno 28] ",
        "CollectiveError: rank 0: [Errno 5] Input/output error: ",
        "CollectiveError: rank 0: the disk is full: [Errno 28] ",
        "CollectiveError: rank 1: [Errno 5] Input/output error: ",
    ]
    for message, start, rank in zip(zero, starts, (1, 1, 0, 0, 1), strict=False):
        assert message.startswith(start)
        assert f"step-00000002.partial/shard-0000{rank}.safetensors" in message
    assert zero[5] == "done"


def test_retention_must_keep_something() -> None:
    with pytest.raises(StrettoError, match=r"keep\.best is 0"):
        Retention(last=1, best=0)
