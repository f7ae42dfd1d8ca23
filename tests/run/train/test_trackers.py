"""Trackers of a run: what each is told, what a resumed run logs again, and what happens if one fails.

W&B, MLflow and Trackio are tested with their own clients, offline, wherever these are installed.
"""

from __future__ import annotations

import io
import json
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.run.train import trackers as room
from stretto.run.train.metrics import EvalRecord, Metrics, StepRecord, recorded_steps
from stretto.run.train.trackers import TrackedRun, Trackers, code_version, memory_numbers, run_identity


def record(step: int, loss: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=8.0 - step / 100 if loss is None else loss,
        grad_norm=1.0,
        lr=3e-4,
        tokens=64 * step,
        tokens_per_s=1000.0,
        step_time_s=0.3,
    )


def opened(folder: Path, *names: str, start: int = 0, resumed: bool = False, **options: Any) -> Trackers:
    run = TrackedRun(
        identity=run_identity(folder, resumed),
        name="tiny",
        folder=folder,
        project=None,
        config={"optim": {"lr": 3e-4}, "data": {"source": ["a", "b"]}},
        versions={**code_version(), "ranks": 2},
        start=start,
        resumed=resumed,
        board=folder / "tensorboard",
    )
    recorded = {"train": recorded_steps(folder), "eval": recorded_steps(folder, "eval.jsonl")}
    return Trackers([*names], run, recorded, **options)


def session(folder: Path, name: str, steps: range, stop: int = 30, loss: float | None = None) -> str:
    """Log the steps in a run that ends as by a crash after `stop` steps; what it printed."""
    start, out = steps.start - 1, io.StringIO()
    trackers = opened(folder, name, start=start, resumed=start > 0)
    metrics = Metrics(folder, steps=stop, start=start, every=10, trackers=trackers, out=out)
    with metrics:
        for step in steps:
            metrics.step(record(step, loss), memory_numbers((0.5, 0.75), (1.0, 2.0)))
            if step % 20 == 0:
                metrics.evaluation(EvalRecord(step=step, loss=2.0, tokens=10, seconds=0.1))
    return out.getvalue()


class Memory:
    """A tracker that remembers what it is told, by name of the folder."""

    told: Mapping[str, list[tuple[int, Mapping[str, float]]]] = {}

    def __init__(self, run: TrackedRun) -> None:
        self._told = self.told.setdefault(run.identity, [])  # pyright: ignore[reportAttributeAccessIssue]

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._told.append((step, numbers))

    def text(self, name: str, text: str, step: int) -> None:
        self._told.append((step, {}))

    def close(self, failed: bool) -> None:
        self._told.append((-1, {"failed": failed}))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[Memory]:
    monkeypatch.setattr(Memory, "told", {})
    monkeypatch.setattr(room, "TRACKERS", {"wandb": Memory})
    return Memory


def test_steps_that_are_trained_again_are_logged_once(tmp_path: Path, memory: type[Memory]) -> None:
    session(tmp_path, "wandb", range(1, 26))
    assert "wandb keeps its steps up to 25" in session(tmp_path, "wandb", range(11, 18))
    session(tmp_path, "wandb", range(11, 31))  # its records were cut to step 10, then 17
    ((identity, told),) = memory.told.items()
    assert [step for step, numbers in told if "train/loss" in numbers] == [1, 10, 20, 30]
    assert [step for step, numbers in told if "eval/loss" in numbers] == [20]
    assert json.loads((tmp_path / "trackers.json").read_text())["id"] == identity
    assert run_identity(tmp_path, resumed=False) != identity


def test_going_back_to_a_checkpoint_logs_no_step_twice(tmp_path: Path, memory: type[Memory]) -> None:
    trackers = opened(tmp_path, "wandb")
    with Metrics(tmp_path, steps=9, trackers=trackers, out=io.StringIO()) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step))
        metrics.rewind(1)
        for step in (2, 3, 4):
            metrics.step(record(step))
    ((_, told),) = memory.told.items()
    assert [step for step, _ in told] == [1, 2, 3, 4, -1]


def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(
    tmp_path: Path, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(memory, "log", refuse)
    printed = session(tmp_path, "wandb", range(1, 31))
    assert printed.count("wandb does not take records; training continues (ConnectionError: no route") == 1
    assert recorded_steps(tmp_path) == 30


def test_a_tracker_that_hangs_delays_no_step(
    tmp_path: Path, memory: type[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(memory, "log", lambda *_: answer.wait())
    monkeypatch.setattr(room, "_CLOSE_S", 0.05)
    monkeypatch.setattr(room, "_BACKLOG", 2)
    printed = session(tmp_path, "wandb", range(1, 31))
    answer.set()
    assert "2 records wait; later ones are dropped" in printed


@pytest.mark.parametrize("hangs", [False, True])
def test_a_tracker_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    answer = threading.Event()

    def refuse(_: TrackedRun) -> Memory:
        if hangs:
            answer.wait()
        raise PermissionError("not logged in")

    monkeypatch.setattr(room, "TRACKERS", {"wandb": refuse})
    monkeypatch.setattr(room, "_OPEN_S", 0.05 if hangs else 60.0)
    reason = "no answer within" if hangs else "PermissionError: not logged in"
    with pytest.raises(StrettoError, match=rf"wandb, of metrics\.to, cannot be opened: {reason}") as caught:
        opened(tmp_path, "wandb")
    assert "WANDB_MODE=offline" in str(caught.value.hint)
    (note,) = opened(tmp_path, "wandb", required=False).notes()
    answer.set()
    assert "training continues without" in note


def test_names_of_numbers() -> None:
    numbers = room.numbers_of("train", {**record(3).as_dict(), "slow": {"1": 2.5}, "bad": "why"})
    assert numbers["train/tokens_per_second"] == 1000.0
    assert numbers["train/slow/1"] == 2.5
    assert not {"train/step", "train/mfu", "train/bad"} & numbers.keys()
    memory = memory_numbers((0.0, 0.0, 0.0), (2.0, 3.0, 1.0))
    assert (memory["memory/host_max_gib"], memory["memory/host_max_rank"]) == (3.0, 1)
    assert (memory["memory/host_min_gib"], memory["memory/host_min_rank"]) == (1.0, 2)
    assert memory["memory/host_gib/rank_0"] == 2.0
    assert len(memory) == 7, "nothing of devices, whose memory is not measured"
    assert len(memory_numbers((1.0,) * 65, (0.0,) * 65)) == 4


def test_the_version_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_version().keys() == {"stretto", "python", "torch"}
    (tmp_path / "a").write_text("1")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], ["add", "a"], [*author, "commit", "-qm", "a"]):
        subprocess.run(["git", *command], check=True)
    clean = code_version()
    (tmp_path / "a").write_text("2")
    assert (clean["git_dirty"], code_version()["git_dirty"]) == (False, True)
    assert len(str(clean["git_commit"])) == 40


def tensorboard_losses(folder: Path) -> dict[int, float]:
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    board = accumulator(str(folder / "tensorboard")).Reload()
    assert board.Scalars("eval/perplexity")[0].value == pytest.approx(7.389056)
    assert "train/mfu" not in board.Tags()["scalars"]
    assert {"config/text_summary", "versions/text_summary"} <= set(board.Tags()["tensors"])
    assert board.Scalars("memory/host_max_rank")[0].value == 1
    return {event.step: event.value for event in board.Scalars("train/loss")}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    session(tmp_path, "tensorboard", range(1, 31))
    assert tensorboard_losses(tmp_path) == {s: pytest.approx(8 - s / 100) for s in (1, 10, 20, 30)}
    # resumed after step 20: the later steps of the first session are hidden, not beside the new ones
    session(tmp_path, "tensorboard", range(21, 23), loss=1.0)
    assert tensorboard_losses(tmp_path) == {s: pytest.approx(8 - s / 100) for s in (1, 10, 20)} | {21: 1.0}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a `.wandb` file, in the log format of LevelDB: blocks of 32 KiB, pieces of records."""
    at, pieces = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at) if left >= 7 else (0, 0, 0)
        if not kind:
            at += left
            continue
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


def wandb_losses(folder: Path) -> dict[int, float]:
    messages = import_module("wandb.proto.wandb_internal_pb2")
    losses, runs = dict[int, float](), set[str]()
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            parsed = messages.Record.FromString(data)
            runs |= {parsed.run.run_id} - {""}
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in parsed.history.item}
            if "train/loss" in row:
                assert row["train/global_step"] not in losses
                losses[row["train/global_step"]] = row["train/loss"]
    assert runs == {run_identity(folder, resumed=True)}
    return losses


def mlflow_losses(folder: Path) -> dict[int, float]:
    client = import_module("mlflow").MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("stretto").experiment_id])
    assert (run.info.status, run.data.params["optim.lr"]) == ("FINISHED", "0.0003")
    assert run.data.tags["stretto.ranks"] == "2"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert len({each.step for each in history}) == len(history)
    return {each.step: each.value for each in history}


def trackio_losses(folder: Path) -> dict[int, float]:
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    rows = storage.get_logs("stretto", f"tiny-{run_identity(folder, resumed=True)}")
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert len(dict(losses)) == len(losses)
    return dict(losses)


@pytest.mark.parametrize("read", [wandb_losses, mlflow_losses, trackio_losses])
def test_a_client_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], dict[int, float]]
) -> None:
    name = read.__name__.partition("_")[0]
    pytest.importorskip(name, reason=f"pip install 'stretto[{name}]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    session(tmp_path, name, range(1, 21), stop=40)
    session(tmp_path, name, range(11, 41), stop=40)
    assert read(tmp_path) == {s: pytest.approx(8 - s / 100) for s in (1, 10, 20, 30, 40)}
