"""Training under every kind of schedule: asynchronous ones update within the step, copies share a batch."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from stretto.errors import StrettoError
from stretto.program import names, schedule
from stretto.program.action import ActionKind
from stretto.run.config import TrainConfig
from stretto.run.config.job import job_of
from stretto.run.data.dataset import WindowSamples
from stretto.run.train.metrics import read_lines
from stretto.run.train.rank_model import loss_weights, update_numbers
from stretto.verify.language.reference import build_reference
from texts import banner_of, open_tokens
from tiny_job import EIGHT, LLAMA, job
from train_runs import at_step, keep_notes, losses, same, send_self, spoil_a_weight, tensors, train

pytestmark = pytest.mark.apart

PP2 = ("layout.pp=2", "optim.clip=null")
STASHING = (*PP2, "schedule.name=pipedream")
SYNCHED = (*STASHING, "schedule.vertical_sync=true")
TWO = (*PP2, "schedule.name=pipedream-2bw", "schedule.group=3")
UPDATES = {STASHING: 8, SYNCHED: 8, TWO: 3}
STOP_AT_3 = at_step(3, 0, send_self, signal.SIGTERM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


def llama(folder: Path, name: str, *overrides: str) -> TrainConfig:
    return job(folder, EIGHT, *overrides, f"run.name={name}", model=LLAMA)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(STASHING, id="stashing"),
        pytest.param(SYNCHED, id="synched", marks=pytest.mark.slow),
        pytest.param(TWO, id="2bw"),
    ],
)
def test_asynchronous_schedules_learn_and_resume_bitwise(folder: Path, overrides: tuple[str, ...]) -> None:
    name = "-".join(overrides[2:])
    drains = (*overrides, "checkpoint.every=4")
    uninterrupted, parts = llama(folder, f"whole-{name}", *drains), llama(folder, f"parts-{name}", *drains)
    assert train(uninterrupted)["step"] == 6
    # that a rank was asked to stop is known one step later, when a step more has begun
    assert train(parts, at_step(2, 0, send_self, signal.SIGTERM))["step"] == 4
    assert train(llama(folder, f"parts-{name}", *drains, "checkpoint.resume=auto"))["step"] == 6
    assert same(tensors(uninterrupted, 6), tensors(parts, 6))
    assert losses(uninterrupted) == losses(parts)
    assert losses(uninterrupted)[6] < losses(uninterrupted)[1] - 0.3
    rows = list(read_lines(uninterrupted.run.folder / "metrics.jsonl"))
    assert [row["grad_norm"] for row in rows] == [None] * 6
    assert [row["lr"] for row in rows][:2] == [0.005, 0.01]
    tokens = open_tokens(uninterrupted)
    first_line = banner_of(tokens, uninterrupted).splitlines()[0]
    assert first_line.endswith(f"8 microbatches of 1, {UPDATES[overrides]} updates of the weights a step")


def test_a_stop_ends_a_window_at_the_first_step_that_no_rank_has_gone_beyond(folder: Path) -> None:
    """Asked to before step 1, which all ranks know after step 2, with step 3 under way."""
    config = llama(folder, "asked", *STASHING)
    assert train(config, at_step(1, 0, send_self, signal.SIGTERM))["step"] == 3
    assert train(llama(folder, "asked", *STASHING, "checkpoint.resume=auto"))["step"] == 6
    assert len(losses(config)) == 6  # each once, in order
    assert losses(config)[6] < losses(config)[1] - 0.3


def test_runs_resume_across_synchronous_and_asynchronous_schedules(folder: Path) -> None:
    """From 1f1b to an asynchronous schedule on another layout and back: the optimiser counts all updates."""
    start = llama(folder, "handed", "optim.clip=null", "layout.pp=2")
    assert train(start, STOP_AT_3)["step"] == 3
    before = losses(start)
    overrides = ("layout.pp=2", "layout.dp=2", "optim.clip=null", "schedule.name=pipedream")
    middle = llama(folder, "handed", *overrides, "checkpoint.resume=auto", "train.steps=5")
    assert train(middle)["step"] == 5
    last = llama(folder, "handed", "checkpoint.resume=auto", "layout.tp=2")
    assert train(last, at_step(6, 0, counted))["step"] == 6
    by_step = losses(last)
    assert {step: by_step[step] for step in before} == before
    assert by_step[6] < by_step[1]


def counted(trainer: object) -> None:
    """3 updates of 1f1b, and 4 in each of 2 steps of pipedream."""
    steps = {
        int(state["step"])
        for optimizer in trainer.task.model.optimizers  # type: ignore[attr-defined]
        for state in optimizer.state.values()
    }
    assert steps == {11}, steps


def test_one_rank_of_pipedream_is_plain_training_on_small_batches(folder: Path) -> None:
    """With one stage nothing is late: 8 updates a step are 8 steps of 1f1b with an eighth of the batch."""
    overrides = (
        "train.dtype=float64",
        "optim.clip=null",
        "optim.rate.schedule=constant",
        "optim.rate.warmup=0",
    )
    asynchronous = llama(folder, "small-async", *overrides, "schedule.name=pipedream", "train.steps=2")
    plain = llama(folder, "small-plain", *overrides, "batch.global_size=1", "train.steps=16")
    train(asynchronous)
    train(plain)
    plain_losses = losses(plain)
    for step, loss in losses(asynchronous).items():
        assert loss == pytest.approx(
            sum(plain_losses[i] for i in range(8 * step - 7, 8 * step + 1)) / 8, rel=1e-12
        )
    a, b = tensors(asynchronous, 2), tensors(plain, 16)
    assert a.keys() == b.keys()
    assert all((a[name] - b[name]).abs().max() < 1e-12 for name in a)


def test_weights_that_are_not_finite_end_the_run(folder: Path) -> None:
    with pytest.raises(Exception, match="step 2: the loss of microbatch 0 on rank 1 is not finite"):
        train(llama(folder, "spoiled", *STASHING), at_step(2, 1, spoil_a_weight))
    with pytest.raises(
        Exception, match=r"step 2: its updates left weights that are not finite; .* on rank 1"
    ):
        train(llama(folder, "overflowed", *STASHING), at_step(2, 1, overflow))


def overflow(trainer: object) -> None:
    """The last update of the step overflows; all losses were finite."""
    import torch

    optimizer = trainer.task.model.optimizers[0]  # type: ignore[attr-defined]
    inner, calls = optimizer.step, list[int]()

    def step() -> None:
        inner()
        calls.append(1)
        if len(calls) == 8:
            torch.nn.init.constant_(optimizer.param_groups[0]["params"][0], float("inf"))

    optimizer.step = step


def overflow_of_a_replica(trainer: object) -> None:
    """A gradient of rank 3 alone overflows: of the second stage in the second replica."""
    optimizer = trainer.task.model.optimizer  # type: ignore[attr-defined]
    inner, calls = optimizer._overflows, list[int]()

    def overflows(stage: int) -> bool:
        calls.append(stage)
        if len(calls) == 3:
            optimizer.states.buffers[stage].flats[-1][0] = float("inf")
        return inner(stage)

    optimizer._overflows = overflows


def test_float16_skips_a_delayed_update_on_all_ranks_of_its_stage(folder: Path) -> None:
    """The scale falls once the ranks have agreed on it; a run that was interrupted comes to the same bits."""
    half = (
        *("layout.dp=2", "layout.pp=2", "optim.clip=null", "schedule.name=pipedream", "dp.mode=zero1"),
        *("train.dtype=float16", "precision.loss_scale=1024", "optim.rate.decay_steps=8"),
        *("train.steps=5", "checkpoint.every=3"),
    )
    spoil = at_step(2, 3, overflow_of_a_replica)
    uninterrupted, parts = llama(folder, "half", *half), llama(folder, "half-parts", *half)
    train(uninterrupted, spoil)
    rows = list(read_lines(uninterrupted.run.folder / "metrics.jsonl"))
    assert [row["loss_scale"] for row in rows] == [1024.0, *[512.0] * 4]
    assert rows[-1]["skipped"] == 1
    assert losses(uninterrupted)[5] < losses(uninterrupted)[1] - 0.3
    train(llama(folder, "half-parts", *half[:-2], "train.steps=3", "checkpoint.every=3"), spoil)
    train(llama(folder, "half-parts", *half, "checkpoint.resume=auto"))
    assert {step: loss for step, loss in losses(parts).items() if step > 3} == {
        step: loss for step, loss in losses(uninterrupted).items() if step > 3
    }


SYNCHRONOUS = ("hanayo", "dualpipe")
MORE = ("zb-h2", "dualpipe-v", "chimera")


@pytest.mark.parametrize("schedules", [SYNCHRONOUS, pytest.param(MORE, marks=pytest.mark.slow)])
def test_synchronous_schedules_train_alike_and_evaluate(tmp_path: Path, schedules: tuple[str, ...]) -> None:
    folder = tmp_path
    overrides = ("layout.pp=2", "train.dtype=float64", "train.steps=3", "eval.every=3", "eval.batches=1")
    plain = llama(folder, "plain", *overrides[1:])
    train(plain)
    wanted, held_out = losses(plain), next(read_lines(plain.run.folder / "eval.jsonl"))["loss"]
    weights = tensors(plain, 3)
    for name in schedules:
        config = llama(folder, name, *overrides, f"schedule.name={name}")
        train(config)
        assert losses(config) == pytest.approx(wanted, rel=1e-12)
        (row,) = read_lines(config.run.folder / "eval.jsonl")
        assert row["loss"] == pytest.approx(held_out, rel=1e-12)
        saved = tensors(config, 3)
        assert saved.keys() == weights.keys()
        assert all((saved[key] - weights[key]).abs().max() < 1e-9 for key in weights)


def test_evaluation_is_of_the_held_out_samples(folder: Path) -> None:
    """After an update that all but changes nothing: the loss of the initial model on the first of them."""
    overrides = ("train.dtype=float64", "train.steps=1", "optim.lr=1e-12", "eval.every=1", "eval.batches=1")
    config = llama(folder, "held", *overrides, "data.split=8,2,0", "optim.rate.warmup=0")
    train(config)
    samples = WindowSamples(
        open_tokens(config),
        "valid",
        config.data.sequence,
        ratio=config.data.split,
        shuffle=False,
    )
    batch = samples.batch(range(config.batch.global_size))
    model = build_reference(job_of(config), config.train.seed).model
    wanted = float(model.loss(model(batch.inputs), batch.targets).detach()) / batch.targets.numel()
    (row,) = read_lines(config.run.folder / "eval.jsonl")
    assert row["loss"] == pytest.approx(wanted, rel=1e-9)


def test_a_second_epoch_is_shown_and_told_once(folder: Path) -> None:
    overrides = ("train.steps=6", EIGHT, "data.split=5,95,0", "run.name=again", "checkpoint.every=5")
    config = job(folder, *overrides, model=LLAMA)
    epoch = len(WindowSamples(open_tokens(config), "train", 16, ratio=config.data.split))
    assert 2 * 8 < epoch < 3 * 8, "the third step is the first to reach into the second epoch"
    notes = folder / "notes"
    train(config, keep_notes(str(notes)))
    again = "checkpoint.resume=auto"
    train(job(folder, *overrides[1:], "train.steps=7", again, model=LLAMA), keep_notes(str(notes)))
    rows = list(read_lines(config.run.folder / "metrics.jsonl"))
    assert [row["epoch"] for row in rows] == pytest.approx([8 * step / epoch for step in range(1, 8)])
    notices = [line for line in notes.read_text().splitlines() if "epoch" in line]
    assert [line.partition(":")[0] for line in notices] == [
        f"step 3 begins a second epoch of {epoch} training samples"
    ]


def test_update_numbers_are_where_every_stage_applies_a_microbatch() -> None:
    for name in names():
        for options in ({}, {"group": 3}, {"vertical_sync": True}):
            try:
                program = schedule(name, 4, 8, **options)
            except StrettoError:
                continue
            numbers = update_numbers(program)
            if not program.versions:
                assert numbers == [0] * 8
                continue
            for order in program.orders:
                done, applied = 0, dict[int | None, int]()
                for action in order:
                    applied.update({action.microbatch: done} if action.kind is ActionKind.B else {})
                    done += action.kind is ActionKind.UPDATE
                assert [applied[i] for i in range(8)] == numbers
                assert done == max(numbers) + 1


def test_the_loss_of_a_microbatch_is_scaled_by_the_tokens_of_its_update() -> None:
    assert loss_weights([0, 1, 0, 1], torch.tensor([3.0, 0.0, 1.0, 8.0])).tolist() == [
        0.25,
        0.125,
        0.25,
        0.125,
    ]
    assert loss_weights([0, 1], torch.tensor([0.0, 4.0])).tolist() == [1.0, 0.25]
