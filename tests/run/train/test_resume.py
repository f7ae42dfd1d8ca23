"""A run that is stopped and resumed equals the run that was never stopped."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from run_checkpoints import forge
from stretto.engine.checkpoint.manifest import load_manifest
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.parallel.control import this_rank
from stretto.errors import StrettoError
from stretto.run.config import TrainConfig
from stretto.run.config.job import job_of
from stretto.run.config.section import plain_section
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job, unused_run
from stretto.run.train.resume import _check_optimizer
from tiny_job import GPT, LLAMA, job, write_text
from train_runs import at_step, keep_notes, keep_samples, losses, same, send_self, tensors, train

pytestmark = pytest.mark.apart

TP2, DP2, PP2 = ("layout.tp=2",), ("layout.dp=2",), ("layout.pp=2",)
PP2_DP2 = ("layout.pp=2", "layout.dp=2")
TP4 = ("layout.tp=4",)
INTERLEAVED = ("layout.pp=2", "schedule.name=interleaved", "schedule.chunks=2")
Layout = tuple[str, ...]
Pairs = dict[Layout, list[Layout]]
STOP_AT_3 = at_step(3, 0, send_self, signal.SIGTERM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


def copied(config: TrainConfig, name: str, folder: Path, *overrides: str, model: str) -> TrainConfig:
    """Another run with copies of the checkpoints, which resumes from them."""
    there = job(folder, *overrides, f"run.name={name}", "checkpoint.resume=auto", model=model)
    shutil.copytree(config.run.folder, there.run.folder)
    return there


@pytest.mark.parametrize(
    "layout", [*(pytest.param(layout, marks=pytest.mark.slow) for layout in ((), TP2)), PP2_DP2]
)
def test_resuming_on_the_same_layout_is_bitwise_equal(folder: Path, layout: Layout) -> None:
    name = "-".join(layout) or "single"
    uninterrupted = job(folder, *layout, f"run.name=whole-{name}")
    parts = job(folder, *layout, f"run.name=parts-{name}")
    assert train(uninterrupted)["stopped"] is False
    outcome = train(parts, STOP_AT_3)
    assert (outcome["stopped"], outcome["step"]) == (True, 3)
    outcome = train(job(folder, *layout, f"run.name=parts-{name}", "checkpoint.resume=auto"))
    assert (outcome["stopped"], outcome["step"]) == (False, 6)
    assert same(tensors(uninterrupted, 6), tensors(parts, 6))
    assert losses(uninterrupted) == losses(parts)
    states = [key for key in tensors(uninterrupted, 6) if key.startswith("optim.exp_avg_sq.")]
    assert states
    assert len([key for key in tensors(uninterrupted, 6) if key.startswith("model.")]) == len(states)


def test_states_of_generators_in_a_checkpoint_come_from_the_seed(folder: Path) -> None:
    config = job(folder, "run.name=seeded", "train.steps=1", "train.seed=7")
    train(config)
    _, loaded = read_whole(config.run.folder / "checkpoints" / "step-00000001")
    unused = torch.Generator().manual_seed(7).get_state()  # nothing in training draws from it
    assert torch.equal(loaded.per_rank["cpu"], unused)


def draw(trainer: Any) -> None:
    """As a layer of a user, draw numbers that differ by rank."""
    torch.rand(this_rank() + 1)


def keep_state(trainer: Any, path: str) -> None:
    torch.save(torch.get_rng_state(), f"{path}-{this_rank()}")


def test_generators_go_on_where_they_were_or_begin_anew_on_other_ranks(folder: Path, tmp_path: Path) -> None:
    states, notes = str(tmp_path / "state"), tmp_path / "notes"
    config = job(folder, *DP2, "run.name=drawn", "train.seed=7")
    train(config, at_step(2, None, draw), STOP_AT_3)
    (config.run.folder / "checkpoints" / "step-00000009.partial").mkdir()
    there = copied(config, "fewer", folder, "train.seed=7", model=GPT)
    train(
        job(folder, *DP2, "run.name=drawn", "train.seed=7", "checkpoint.resume=auto", "checkpoint.every=1"),
        at_step(4, None, keep_state, states),
    )
    for rank in (0, 1):
        torch.manual_seed(7)
        torch.rand(rank + 1)
        assert torch.equal(torch.load(f"{states}-{rank}"), torch.get_rng_state())
    left_over = there.run.folder / "checkpoints" / "step-00000009.partial"
    assert left_over.is_dir()
    train(there, at_step(4, None, keep_state, states), keep_notes(str(notes)))
    torch.manual_seed(crc32(b"7 3"))  # of the seed and the step
    assert torch.equal(torch.load(f"{states}-0"), torch.get_rng_state())
    says = "random generators begin anew, from the seed and step 3: other ranks wrote it"
    assert says in notes.read_text()
    assert not left_over.exists()


PAIRS = {PP2: [()], TP2: [INTERLEAVED]}
MORE = {TP2: [PP2], DP2: [TP2], INTERLEAVED: [PP2], (): [TP4], TP4: [DP2, INTERLEAVED], PP2_DP2: [()]}


@pytest.mark.parametrize(
    ("dtype", "within", "pairs"),
    [
        ("float64", 1e-12, PAIRS),
        pytest.param("float64", 1e-12, MORE, marks=pytest.mark.slow),
        pytest.param("float32", 1e-5, {TP2: [PP2_DP2]}, marks=pytest.mark.slow),
    ],
)
def test_resuming_on_another_layout_continues_the_same_losses(
    tmp_path: Path, dtype: str, within: float, pairs: Pairs
) -> None:
    """Ordered pairs of layouts, of a Llama with grouped heads, of which every rank of tp has a copy."""
    folder = tmp_path
    overrides = (f"train.dtype={dtype}", "model.kv_heads=1")
    uninterrupted = job(folder, *overrides, f"run.name=whole-{dtype}", model=LLAMA)
    train(uninterrupted)
    expected = losses(uninterrupted)
    for i, (first, others) in enumerate(pairs.items()):
        start = job(folder, *overrides, *first, f"run.name={dtype}-{i}", model=LLAMA)
        assert train(start, STOP_AT_3)["step"] == 3
        for j, then in enumerate(others):
            rest = copied(start, f"{dtype}-{i}-{j}", folder, *overrides, *then, model=LLAMA)
            assert train(rest)["step"] == 6
            resumed = losses(rest)
            assert resumed.keys() == expected.keys()
            for step, loss in resumed.items():
                assert loss == pytest.approx(expected[step], rel=within), (first, then, step)
                assert step < 4 or resumed[step] < resumed[1]


def test_resuming_in_any_data_parallel_mode_continues_the_same_losses(folder: Path) -> None:
    """A run whose data-parallel mode changes at every stop, beside one that never stops."""
    overrides = ("train.dtype=float64",)
    uninterrupted = job(folder, *overrides, "run.name=whole-shared", model=LLAMA)
    train(uninterrupted)
    for stop, sharing in (
        (2, ("dp.mode=zero3", *PP2_DP2)),
        (4, ("dp.mode=zero2", "layout.dp=4", "dp.shard_states=2", "dp.offload=cpu")),
        (None, ("dp.mode=server", "layout.dp=2")),
    ):
        on = () if stop is None else (at_step(stop, 0, send_self, signal.SIGTERM),)
        parts = job(folder, *overrides, *sharing, "run.name=shared", "checkpoint.resume=auto", model=LLAMA)
        assert train(parts, *on)["step"] == (stop or 6)
    resumed, expected = losses(parts), losses(uninterrupted)
    assert resumed.keys() == expected.keys()
    assert [resumed[step] for step in resumed] == pytest.approx(
        [expected[step] for step in resumed], rel=1e-12
    )
    resumed_tensors, expected_tensors = tensors(parts, 6), tensors(uninterrupted, 6)
    assert resumed_tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        if not name.startswith("per_rank"):
            torch.testing.assert_close(resumed_tensors[name], tensor, rtol=1e-8, atol=1e-12, msg=name)


def test_resuming_with_weights_of_another_type_keeps_the_masters(folder: Path) -> None:
    """A checkpoint has the optimiser's own values, whatever the weights are rounded to."""
    start = job(folder, "run.name=types", "train.dtype=bfloat16", "dp.mode=zero3", *DP2, model=LLAMA)
    assert train(start, STOP_AT_3)["step"] == 3
    dtypes = {name: t.dtype for name, t in tensors(start, 3).items() if not name.startswith("per_rank")}
    assert set(dtypes.values()) == {torch.float32}
    rest = job(folder, "run.name=types", "checkpoint.resume=auto", *TP2, model=LLAMA)
    assert train(rest)["step"] == 6
    by_step = losses(rest)
    assert by_step.keys() == set(range(1, 7))
    assert by_step[6] < by_step[1]


@pytest.mark.parametrize(
    ("wrote", "reads", "says"),
    [
        (("optim.name=lamb",), ("optim.name=adamw",), "its optim.name is lamb, the config's is adamw"),
        (("optim.name=sgd", "optim.momentum=0.9"), ("optim.name=sgd",), "its optim.momentum is 0.9"),
        (("optim.name=muon", "optim.momentum=0.9"), ("optim.name=muon",), None),
        (("optim.states=bfloat16", "dp.mode=zero2", "train.dtype=bfloat16"), ("dp.offload=cpu",), None),
    ],
)
def test_states_must_be_those_of_the_optimiser(
    folder: Path, wrote: Layout, reads: Layout, says: str | None
) -> None:
    meta = {"config": plain_section(job(folder, *wrote))}
    if says is None:
        _check_optimizer(Path("step-1"), meta, job_of(job(folder, *reads)))
    else:
        with pytest.raises(StrettoError, match=f"checkpoint step-1 is of another optimiser: {says}"):
            _check_optimizer(Path("step-1"), meta, job_of(job(folder, *reads)))


def test_no_sample_is_repeated_or_lost(folder: Path, tmp_path: Path) -> None:
    seen = str(tmp_path / "samples.jsonl")
    config = job(folder, *DP2, "run.name=samples")
    train(config, STOP_AT_3, keep_samples(seen))
    train(job(folder, *TP2, "run.name=samples", "checkpoint.resume=auto"), keep_samples(seen))
    by_step: dict[int, list[int]] = {}
    for line in Path(seen).read_text().splitlines():
        step, samples = json.loads(line)
        by_step.setdefault(step, []).extend(samples)
    assert {step: sorted(samples) for step, samples in by_step.items()} == {
        step: list(range(4 * (step - 1), 4 * step)) for step in range(1, 7)
    }


def test_samples_are_counted_from_where_the_batch_has_changed(folder: Path, tmp_path: Path) -> None:
    first = job(folder, "run.name=counted", "train.steps=2")
    train(first)
    more = job(folder, "run.name=counted", "batch.global_size=8", "checkpoint.resume=auto")
    train(more)
    last = more.run.folder / "checkpoints/step-00000006"
    meta = load_manifest(last).meta
    assert (meta["samples"], meta["counted_from"]) == (2 * 4 + 4 * 8, {"step": 2, "samples": 8})
    forge(last, meta=meta | {"samples": 7})
    notes = tmp_path / "notes"
    train(more, keep_notes(str(notes)))  # goes on from step 2
    assert (
        "checkpoint step-00000006 is damaged: file manifest.json: samples is 7 at step 6" in notes.read_text()
    )
    forge(last, meta=meta | {"samples": 7})
    with pytest.raises(StrettoError, match="is 7 at step 6, but steps of 8 from 8 at step 2 add up to 40"):
        run_job(LANGUAGE, replace(more, checkpoint=resume_at(more, last)))


def resume_at(config: TrainConfig, path: Path) -> Any:
    return replace(config.checkpoint, resume=str(path))


def test_a_damaged_checkpoint_is_skipped_with_a_warning(folder: Path, tmp_path: Path) -> None:
    overrides = ("checkpoint.every=2", "checkpoint.keep=null", *PP2)
    undamaged = job(folder, *overrides, "run.name=undamaged")
    train(undamaged)
    damaged = copied(undamaged, "damaged", folder, *overrides, model=GPT)
    newest = damaged.run.folder / "checkpoints" / "step-00000006"
    shard = newest / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    (damaged.run.folder / "checkpoints" / "step-00000008.partial").mkdir()  # half written
    notes = tmp_path / "notes"
    outcome = train(damaged, keep_notes(str(notes)))
    assert outcome["step"] == 6
    lines = notes.read_text().splitlines()
    assert lines[0].startswith("checkpoint step-00000006 is damaged: file shard-00001.safetensors: crc32 is")
    assert lines[0].endswith("falling back to step-00000004")
    assert lines[1].endswith("step-00000004 at step 4")
    assert losses(damaged) == losses(undamaged)
    assert same(tensors(damaged, 6), tensors(undamaged, 6))


def test_when_no_checkpoint_is_whole_the_run_does_not_start_over(folder: Path) -> None:
    config = job(folder, "run.name=broken")
    train(config, STOP_AT_3)
    (config.run.folder / "checkpoints" / "step-00000003" / "metadata.json").unlink()
    with pytest.raises(StrettoError, match=r"no checkpoint in .* is whole"):
        train(job(folder, "run.name=broken", "checkpoint.resume=auto"))


def test_a_finished_run_has_nothing_to_do(folder: Path) -> None:
    overrides = ("run.name=finished", "train.steps=2", "optim.rate.warmup=1")
    config = job(folder, *overrides)
    first = train(config)
    again = run_job(LANGUAGE, job(folder, *overrides, "checkpoint.resume=auto"), quiet=True).outcome
    assert again is not None
    assert again == {**first, "tokens_per_s": None}
    assert list(losses(config)) == [1, 2]


def test_resuming_from_another_run_leaves_that_run_alone(folder: Path) -> None:
    config = job(folder, "run.name=origin")
    train(config, STOP_AT_3)
    other = job(folder, "run.name=branch", f"checkpoint.resume={config.run.folder}")
    assert train(other)["step"] == 6
    assert [p.name for p in (config.run.folder / "checkpoints").iterdir()] == ["step-00000003"]
    assert unused_run(other.checkpoint.resume, other.run).name == "branch-2"


@pytest.mark.parametrize(
    ("overrides", "says", "hint"),
    [
        (("model.layers=3",), "is of another model: its layers is 2, the config's is 3", "config.yaml"),
        (("model.hidden=64",), "is of another model: its hidden is 32, the config's is 64", "config.yaml"),
        (("model.moe.experts=4",), "its moe.experts is None, the config's is 4", "config.yaml"),
        (("data.vocab=290",), "was trained with another tokenizer", "tokenizer.json"),
        (("optim.name=sgd",), "its optim.name is adamw, the config's is sgd", "optim.name=adamw"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_ranks_start(
    folder: Path, overrides: tuple[str, ...], says: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(folder, "run.name=mine")
    if not config.run.folder.exists():
        train(config, STOP_AT_3)
    monkeypatch.setattr(
        "stretto.run.train.launch.run_ranks", lambda *_, **__: pytest.fail("ranks were started")
    )
    with pytest.raises(StrettoError) as caught:
        run_job(LANGUAGE, job(folder, *overrides, "run.name=mine", "checkpoint.resume=auto"), quiet=True)
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")


def test_another_text_is_warned_of(folder: Path, tmp_path: Path) -> None:
    config = job(folder, "run.name=text")
    train(config, STOP_AT_3)
    other = write_text(tmp_path / "other.txt", seed=2)
    notes = tmp_path / "notes"
    tokenizer = config.run.folder / "tokenizer.json"
    overrides = (f"data.source={other}", f"data.tokenizer={tokenizer}", "train.seed=5", "run.name=text")
    train(job(folder, *overrides, "checkpoint.resume=auto"), keep_notes(str(notes)))
    text = notes.read_text()
    assert "warning: the text or data.sequence differ" in text
    assert "warning: train.seed is 5, the run began with 1" in text


def test_a_fresh_run_takes_a_name_of_its_own(folder: Path) -> None:
    config = job(folder, "run.name=name", "train.steps=1", "optim.rate.warmup=0")
    assert unused_run("never", config.run) == config.run
    train(config)
    second = unused_run("never", config.run)
    assert second.name == "name-2"
    train(replace(config, run=second))
    assert unused_run("never", config.run).name == "name-3"
    assert unused_run("auto", config.run).name == "name"
