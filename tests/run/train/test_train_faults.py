"""A failure on a rank ends the job at once, names its origin, and leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stretto.run.train.launch as launch_module
from planted_numbers import plant
from stretto.engine.checkpoint.folder import checkpoints
from stretto.engine.checkpoint.load import verify
from stretto.run.config import TrainConfig
from stretto.run.diagnose.dump import read_dumps
from stretto.run.diagnose.hang import diagnose
from stretto.run.launch.local import RankFailed, RanksStopped
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import exit_code, run_job
from tiny_job import MOE, job
from train_runs import at_step, fail, linger, losses, send_self, spoil_a_weight, train

PP2_DP2 = ("layout.pp=2", "layout.dp=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Generator[None]:
    yield
    assert multiprocessing.active_children() == []


def failure_of(config: TrainConfig, *hooks: Any) -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        train(config, *hooks)
    return caught.value


# ---------------------------------------------------------------------- a rank fails


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_and_ends_the_job_in_seconds(folder: Path, rank: int) -> None:
    started = time.monotonic()
    error = failure_of(job(folder, *PP2_DP2), at_step(3, rank, send_self, signal.SIGKILL))
    assert time.monotonic() - started < 15  # start-up, two steps, and at most 10 s from then on
    assert (error.failure.rank, error.failure.kind) == (rank, "died")
    assert error.failure.message == "was killed by SIGKILL"
    assert "memory" in (error.failure.hint or "")


def test_a_rank_that_raises_is_named_with_its_traceback(folder: Path) -> None:
    error = failure_of(job(folder, *PP2_DP2), at_step(2, 1, fail))
    assert (error.rank, error.failure.kind, error.failure.name) == (1, "error", "KeyError")
    assert "in fail" in error.traceback
    assert error.traceback.endswith("KeyError: 'planted'")


def test_a_rank_that_exits_silently_is_named(folder: Path) -> None:
    error = failure_of(job(folder, *PP2_DP2), at_step(2, 3, leave))
    assert (error.rank, error.failure.kind) == (3, "died")
    assert error.failure.message == "ended with exit code 0 without a report"


def leave(_: Any) -> None:
    os._exit(0)


@pytest.mark.parametrize(("layout", "rank"), [(("layout.tp=2", "layout.dp=2"), 2), (("layout.pp=2",), 1)])
def test_a_rank_that_hangs_is_named_by_the_ranks_that_wait(
    folder: Path, layout: tuple[str, ...], rank: int
) -> None:
    started = time.monotonic()
    config = job(folder, *layout, "train.timeout_s=2")
    error = failure_of(config, at_step(3, rank, send_self, signal.SIGSTOP))
    assert time.monotonic() - started < 20
    assert (error.rank, error.failure.kind) == (rank, "silent")
    assert error.failure.message.startswith(f"rank {rank} does not answer (")
    assert "Timed out waiting 2000ms" in error.failure.message
    assert "in step 3" in error.failure.message
    assert "gloo" not in error.failure.message
    assert "train.timeout_s" in (error.failure.hint or "")
    diagnosis = diagnose(read_dumps(config.run.folder / "hang"), world=len(layout) * 2)
    assert diagnosis.verdict == "missing"
    assert rank in diagnosis.culprits
    assert rank in diagnosis.absent
    if layout == ("layout.pp=2",):  # it waits for a message, and is through with its collectives
        assert not diagnosis.missing
        assert {wait.call.group.name for wait in diagnosis.waits} == {"pipeline"}


@pytest.mark.parametrize("layout", [(), PP2_DP2, pytest.param(("layout.tp=2",), marks=pytest.mark.slow)])
def test_a_bad_loss_names_step_microbatch_and_rank(folder: Path, layout: tuple[str, ...]) -> None:
    error = failure_of(job(folder, *layout), at_step(3, 0, spoil_a_weight))
    last = 2 if layout == PP2_DP2 else 0  # the rank that computes the loss
    assert error.failure.name == "TrainingFailed"
    assert error.failure.message == f"step 3: the loss of microbatch 0 on rank {last} is not finite"


def test_an_absurd_learning_rate_is_reported_as_a_loss_that_is_not_finite(folder: Path) -> None:
    error = failure_of(job(folder, "optim.lr=1e30", "layout.dp=2"))
    assert error.failure.name == "TrainingFailed"
    assert "is not finite" in error.failure.message
    assert error.failure.message.startswith("step ")


def test_a_gradient_that_is_not_finite_names_its_parameter(folder: Path) -> None:
    error = failure_of(job(folder, "layout.pp=2"), at_step(2, 1, spoil_a_gradient))
    assert error.failure.name == "TrainingFailed"
    says = "step 2: the gradient norm is nan; first bad gradient: blocks.1.mlp.up.weight on rank 1"
    assert error.failure.message == says


ASYNCHRONOUS = ("layout.pp=2", "layout.dp=2", "optim.clip=null", "schedule.name=pipedream")


@pytest.mark.parametrize(
    ("overrides", "rank"),
    [
        pytest.param(("layout.dp=2",), 1, marks=pytest.mark.slow),
        (("layout.dp=2", "dp.mode=zero1", "dp.offload=cpu"), 1),
        pytest.param(("layout.dp=2", "dp.mode=zero2", "dp.reduce=microbatch"), 1, marks=pytest.mark.slow),
        (("layout.dp=2", "dp.mode=zero3"), 1),
        pytest.param(("layout.dp=2", "dp.mode=server"), 1, marks=pytest.mark.slow),
        (("layout.tp=2", "layout.dp=2"), 3),  # in a copy that the norm does not count
        (("layout.pp=2", "layout.dp=2", "batch.global_size=8"), 3),
        ((*ASYNCHRONOUS, "model.tied=false", "batch.global_size=8"), 3),
    ],
)
def test_a_gradient_that_is_not_finite_is_blamed_on_the_rank_where_it_arose(
    folder: Path, overrides: tuple[str, ...], rank: int
) -> None:
    """Of several ranks that sum their gradients, and of stages that it has spread to."""
    error = failure_of(job(folder, *overrides), plant(2, rank, "gradient"))
    layer = "blocks.1" if "layout.pp=2" in overrides else "blocks.0"
    assert f"first bad gradient: {layer}.norm1.bias on rank {rank}" in error.failure.message.replace(
        "gradients of an update are not finite, and it was not made; first:", "first bad gradient:"
    )


def test_a_gradient_of_experts_is_blamed_on_the_rank_where_it_arose(folder: Path) -> None:
    config = job(folder, "layout.dp=4", "layout.ep=2", model=MOE)
    error = failure_of(config, at_step(2, 3, spoil_an_expert))
    assert "first bad gradient: blocks.1.mlp.experts.down on rank 3" in error.failure.message


def spoil_an_expert(trainer: Any) -> None:
    weight = trainer.task.model.parameters["blocks.1.mlp.experts.down"]
    every = [
        gradient for buffer in trainer.task.model.pipeline.buffers.values() for gradient in buffer.gradients
    ]
    gradient = next(reduced for reduced in every if any(p is weight for p in reduced.unit.parameters))
    reduce = gradient.reduce

    def spoiled() -> Any:
        weight.grad.view(-1)[0] = float("nan")
        return reduce()

    gradient.reduce = spoiled


def spoil_a_gradient(trainer: Any) -> None:
    norm = trainer.task.model.gradient_norm

    def spoiled() -> Any:
        trainer.task.model.parameters["blocks.1.mlp.up.weight"].grad[0, 0] = float("nan")
        return norm()

    trainer.task.model.gradient_norm = spoiled


def test_a_failure_leaves_the_last_checkpoint_whole(folder: Path) -> None:
    config = job(folder, "layout.dp=2", "checkpoint.every=2", "run.name=whole")
    failure_of(config, at_step(4, 1, send_self, signal.SIGKILL))
    (saved,) = checkpoints(config.run.folder / "checkpoints")
    assert saved.name == "step-00000002"
    assert verify(saved) == []


# ---------------------------------------------------------------------- a stop is requested


def signal_when(ready: Callable[[], bool], *numbers: int, pause: float = 0.2) -> threading.Thread:
    """Send this process the signals once `ready`."""

    def send() -> None:
        end = time.monotonic() + 60
        while not ready() and time.monotonic() < end:
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def has_steps(config: TrainConfig, steps: int) -> Callable[[], bool]:
    path = config.run.folder / "metrics.jsonl"
    return lambda: path.exists() and path.read_text().count("\n") >= steps


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGINT, signal.SIGTERM), 130),
        *(pytest.param((number,), 75, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal_finishes_the_step_and_saves(folder: Path, numbers: tuple[int, ...], code: int) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, where a run goes on
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    name = "-".join(map(str, numbers))
    config = job(folder, *PP2_DP2, "train.steps=100000", f"run.name=signal-{name}")
    thread = signal_when(has_steps(config, 2), *numbers, pause=0.0)
    result = run_job(LANGUAGE, config, quiet=True)
    thread.join()
    assert result.stopped
    assert result.signal == numbers[0]
    assert exit_code(result) == code
    assert result.outcome is not None
    step = result.outcome["step"]
    assert result.outcome["checkpoint"].endswith(f"step-{step:08d}")
    assert verify(result.outcome["checkpoint"]) == []
    assert list(losses(config)) == list(range(1, step + 1))


def test_a_signal_during_a_save_takes_effect_after_it(folder: Path) -> None:
    config = job(folder, "layout.dp=2", "train.steps=100000", "checkpoint.every=2", "run.name=saving")
    thread = signal_when(lambda: any(config.run.folder.glob("checkpoints/*")), signal.SIGTERM)
    result = run_job(LANGUAGE, config, quiet=True)
    thread.join()
    assert result.outcome is not None
    assert result.stopped
    saved = checkpoints(config.run.folder / "checkpoints")
    assert saved[0].name == f"step-{result.outcome['step']:08d}"
    assert [verify(path) for path in saved] == [[]] * len(saved)


def test_a_signal_before_the_first_step_stops_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(folder, "layout.dp=2", "train.steps=100000", "run.name=early")

    def print_start(*arguments: Any) -> None:
        LANGUAGE.print_start(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    result = run_job(replace(LANGUAGE, print_start=print_start), config, quiet=True)
    assert result.outcome is not None
    assert (result.stopped, result.outcome["step"], exit_code(result)) == (True, 0, 75)
    assert result.outcome["checkpoint"] is None


def test_a_signal_while_text_is_read_starts_no_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(folder, "data.vocab=280", "run.name=reading")  # not tokenised yet
    monkeypatch.setattr(launch_module, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))

    def interrupted(config: TrainConfig, stop: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return LANGUAGE.prepare(config, stop)

    result = run_job(replace(LANGUAGE, prepare=interrupted), config, quiet=True)
    assert result.outcome is None
    assert (result.stopped, exit_code(result)) == (True, 130)
    assert not config.run.folder.exists()


def test_three_interrupts_end_ranks_that_do_not_stop(folder: Path) -> None:
    config = job(folder, "layout.dp=2", "run.name=stubborn")
    thread = signal_when(has_steps(config, 1), *[signal.SIGINT] * 3, pause=0.1)
    started = time.monotonic()
    with pytest.raises(RanksStopped) as caught:
        train(config, at_step(2, 0, linger, 60.0))
    thread.join()
    assert time.monotonic() - started < 20
    assert caught.value.signal == signal.SIGINT
    assert caught.value.results is None
