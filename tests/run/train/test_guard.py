"""Steps whose numbers cannot be right: no rank applies them, and the run stops, skips them or goes back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from planted_numbers import plant
from stretto.errors import StrettoError
from stretto.run.config.check import check
from stretto.run.config.schema import GuardConfig
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.local import RankFailed
from stretto.run.train.guard import Guard, add_range, deviations
from stretto.run.train.metrics import read_lines
from tiny_job import job
from train_runs import keep_notes, keep_samples, losses, same, tensors, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


def events(config: Any) -> list[dict[str, Any]]:
    return list(read_lines(config.run.folder / "guard.jsonl"))


SKIP = ("guard.on_nonfinite=skip", "checkpoint.every=2", "checkpoint.keep=9")


@pytest.mark.parametrize(
    ("layout", "target", "rank"),
    [
        (("layout.dp=2", "dp.mode=zero2"), "gradient", 1),
        (("layout.pp=2", "optim.clip=null"), "loss", 1),
    ],
)
def test_a_skipped_step_leaves_every_weight_and_state(
    folder: Path, layout: tuple[str, ...], target: str, rank: int
) -> None:
    config = job(folder, *layout, *SKIP, f"run.name=skip-{target}", "train.steps=4")
    train(config, plant(3, rank, target))
    rows = list(read_lines(config.run.folder / "metrics.jsonl"))
    assert [row["bad"] is not None for row in rows] == [False, False, True, False]
    (event,) = events(config)
    assert event["step"] == 3
    assert event["action"] == "skip"
    assert event["samples"] == [8, 12]
    # as if the run had never had the samples: the third step's updates are those of the fourth batch
    again = job(folder, *layout, *SKIP, f"run.name=again-{target}", "train.steps=4")
    train(again, plant(3, None, "no update"))
    assert same(tensors(config, 4), tensors(again, 4))


def test_a_run_that_goes_on_behind_a_skipped_step_has_the_same_bits(folder: Path) -> None:
    layout = ("layout.dp=2", *SKIP, "optim.rate.decay_steps=6")
    reference = job(folder, *layout, "run.name=whole")
    train(reference, plant(3, 0, "loss"))
    parts = job(folder, *layout, "run.name=parts", "train.steps=4")
    train(parts, plant(3, 0, "loss"))
    train(job(folder, *layout, "run.name=parts", "checkpoint.resume=auto"))
    assert same(tensors(reference, 6), tensors(parts, 6))
    manifest = json.loads((parts.run.folder / "checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["meta"]["skipped"] == [[8, 12]]
    assert manifest["meta"]["updates"] == 5


def test_a_rollback_goes_on_behind_the_samples_of_the_bad_step(folder: Path) -> None:
    back = (
        *("guard.on_nonfinite=rollback", "checkpoint.every=2", "checkpoint.keep=9"),
        *("layout.dp=2", "optim.rate.decay_steps=6"),
    )
    seen, notes = folder / "seen", folder / "notes"
    config = job(folder, *back, "run.name=back")
    train(config, plant(4, 1, "weight"), keep_samples(str(seen)), keep_notes(str(notes)))
    steps = [json.loads(line) for line in seen.read_text().splitlines()]
    ledger = {
        step: sorted({i for at, indices in steps for i in indices if at == step}) for step in range(1, 7)
    }
    assert list(losses(config)) == [1, 2, 3, 4, 5, 6]
    assert ledger[6] == [
        28,
        29,
        30,
        31,
    ]  # two batches were passed over
    manifest = json.loads((config.run.folder / "checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["meta"]["skipped"] == [[8, 16]]
    assert manifest["meta"]["samples"] == 32
    assert manifest["meta"]["counted_from"] == {"step": 2, "samples": 16}
    assert "going back to a checkpoint" in notes.read_text()
    # and a run that goes on from the checkpoint behind it has the same bits
    parts = job(folder, *back, "run.name=back-parts", "train.steps=4")
    train(parts, plant(4, 1, "weight"))
    train(job(folder, *back, "run.name=back-parts", "checkpoint.resume=auto"))
    assert same(tensors(config, 6), tensors(parts, 6))


def test_after_too_many_bad_steps_the_run_stops(folder: Path) -> None:
    config = job(folder, "layout.dp=2", "guard.on_nonfinite=skip", "guard.max_skips=2", "run.name=many")
    with pytest.raises(RankFailed) as caught:
        train(config, *[plant(step, 0, "loss") for step in (2, 3, 4)])
    assert caught.value.failure.name == "TrainingFailed"
    says = "step 4: the loss of microbatch 0 on rank 0 is not finite; these are 3 bad steps in a row"
    assert caught.value.failure.message.startswith(says)


def test_bad_weights_are_not_skipped(folder: Path) -> None:
    config = job(folder, "guard.on_nonfinite=skip", "run.name=bad-weights")
    with pytest.raises(RankFailed, match="nor are weights, which skipping does not mend"):
        train(config, plant(2, 0, "weight"))


# ---------------------------------------------------------------------- spikes


def noisy(steps: int, seed: int) -> list[float]:
    """Losses of a run that learns: a curve that falls, with noise of a twentieth."""
    draw = random.Random(seed)
    return [(2 + 6 / (1 + step / 300)) * draw.lognormvariate(0, 0.05) for step in range(steps)]


def judge(losses: list[float], norms: list[float] | None = None, **fields: Any) -> list[int]:
    """The steps that are spikes."""
    guard, bad = Guard(GuardConfig(on_spike="skip", **fields), []), list[int]()
    for step, loss in enumerate(losses):
        norm = None if norms is None else norms[step]
        if guard.spike(loss, norm) is None:
            guard.record_good_step(step + 1, loss, norm)
        else:
            bad.append(step)
    return bad


def test_noise_is_no_spike_in_ten_thousand_steps() -> None:
    draw = random.Random(1)
    norms = [draw.lognormvariate(0, 0.3) for _ in range(2000)]
    for seed in range(5):
        assert judge(noisy(2000, seed), norms) == []


def test_spikes_are_found_one_after_the_other_and_of_the_norm_alone() -> None:
    losses = noisy(400, 1)
    for step in (200, 201, 300):
        losses[step] *= 2
    assert judge(losses) == [200, 201, 300]
    norms = [1.0 + 0.1 * (step % 3) for step in range(400)]
    norms[350] = 10.0
    assert judge(noisy(400, 1), norms) == [350]
    assert judge([*losses[:64], 1e9]) == [64]
    assert judge([*losses[:63], 1e9]) == []  # the window is not half full
    assert judge([2.0] * 100 + [2.001]) == []  # numbers that hardly change


def test_deviations_are_those_of_a_normal_distribution() -> None:
    draw = random.Random(3)
    past = [draw.lognormvariate(1.0, 0.2) for _ in range(20_000)]
    assert deviations(2.718281828 * 1.2214, past) == pytest.approx(1.0, abs=0.05)


def test_a_spike_is_skipped_and_judged_alike_behind_a_checkpoint(folder: Path) -> None:
    spiky = (
        *("guard.on_spike=skip", "guard.spike_window=4", "guard.spike_sigma=1e6", "layout.dp=2"),
        *("checkpoint.every=2", "optim.rate.decay_steps=6"),
    )
    config = job(folder, *spiky, "run.name=spiky", "train.steps=4")
    train(config)
    manifest = json.loads((config.run.folder / "checkpoints/step-00000004/manifest.json").read_text())
    history = manifest["meta"]["history"]
    assert [loss for loss, _ in history] == list(losses(config).values())
    assert all(norm is not None for _, norm in history)


# ---------------------------------------------------------------------- rules


def test_ranges_that_touch_become_one() -> None:
    assert add_range([(0, 4)], range(4, 8)) == [(0, 8)]
    assert add_range([(0, 4)], range(5, 8)) == [(0, 4), (5, 8)]
    assert add_range([(0, 4)], range(4, 4)) == [(0, 4)]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("guard.on_nonfinite=rollback",), "checkpoint.every is null"),
        (("guard.on_mismatch=rollback", "checkpoint.every=2"), "without check_replicas or check_memory"),
        (("guard.check_memory=1", "schedule.name=pipedream", "layout.pp=2"), "within the step"),
        (
            ("guard.on_nonfinite=rollback", "checkpoint.every=2", "schedule.name=pipedream", "layout.pp=2"),
            "has begun others",
        ),
        (("guard.on_spike=skip", "schedule.name=pipedream", "layout.pp=2"), "has begun others"),
    ],
)
def test_rules_that_the_job_does_not_allow_are_refused(
    folder: Path, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(StrettoError, match=says):
        check(job(folder, "batch.global_size=8", "optim.clip=null", "model.tied=false", *overrides))


def test_stop_names_the_step_and_no_checkpoint_has_its_update(folder: Path) -> None:
    with pytest.raises(TrainingFailed, match="step 7: x"):
        Guard(GuardConfig(), []).handle_bad_step(7, "x", spike=False, samples=range(4), suspects=[range(4)])


def test_steps_that_a_rollback_repeats_do_not_end_a_row_of_bad_ones() -> None:
    """Else a run that fails at the same step again and again would go back for ever."""
    guard = Guard(GuardConfig(on_nonfinite="rollback", max_skips=2), [])
    for _ in range(2):
        guard.handle_bad_step(5, "x", spike=False, samples=range(4), suspects=[range(4)])
        guard.record_good_step(3, 1.0, 1.0)
        guard.record_good_step(4, 1.0, 1.0)
    with pytest.raises(TrainingFailed, match="these are 3 bad steps in a row"):
        guard.handle_bad_step(5, "x", spike=False, samples=range(4), suspects=[range(4)])
    guard.record_good_step(6, 1.0, 1.0)
    guard.handle_bad_step(7, "x", spike=False, samples=range(4), suspects=[range(4)])
