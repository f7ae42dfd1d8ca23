"""Every legal layout of small models equals one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from proofs import verify
from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.job.rules import fits_tp
from stretto.run.config import TrainConfig
from stretto.run.config.job import job_of
from stretto.verify.evidence import Verdict
from stretto.verify.language.asynchronous import Delays, promised, run_delayed
from stretto.verify.language.cases import configured_job, describe, every_layout, smaller, vary
from stretto.verify.language.every import Every, ways
from stretto.verify.language.proof import batches
from stretto.verify.language.reference import Trial, build_reference, run_reference
from texts import open_tokens
from tiny_job import EIGHT, GPT, LLAMA, Changes, changes, job

pytestmark = pytest.mark.apart

EXPERTS = ("model.moe.experts=4", "model.moe.shared_ffn=32", "model.moe.z=0.01")
THREE = ("model.heads=6", "model.kv_heads=3", "model.head_dim=8", "model.ffn=48")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


def spread(cases: list[Job], first: int, every: int) -> list[Job]:
    """Every n-th schedule once, on layouts and with options in turn."""
    by_schedule: dict[str, list[Job]] = {}
    for case in cases:
        by_schedule.setdefault(case.schedule, []).append(case)
    return [alike[at % len(alike)] for at, alike in enumerate(by_schedule.values())][first::every]


def every_case(config: TrainConfig, ranks: int) -> list[Job]:
    return Every(configured_job(config), ranks).cases


def prove(config: TrainConfig, cases: list[Job], steps: int = 2) -> list[Verdict]:
    verdicts = verify(config, cases, steps)
    assert [v.layout for v in verdicts] == [describe(case) for case in cases]
    for verdict in verdicts:
        assert verdict.equal, verdict
        assert verdict.diagnosis is None
        assert [quantity.name for quantity in verdict.quantities] == ["loss", "gradients", "norm", "weights"]
        assert all(quantity.bound <= 1e-9 for quantity in verdict.quantities)
        read = [verdict[name].error is not None for name in ("gradients", "norm")]
        assert read == [verdict.updates is None] * 2
    return verdicts


@pytest.mark.parametrize(
    ("ranks", "model", "schedules", "overrides"),
    [
        (4, GPT, (1, 12), ("data.sequence=14", "batch.global_size=8", "batch.micro_size=2")),
        (3, LLAMA, (2, 12), (*THREE, "batch.global_size=6")),
        (2, LLAMA, (3, 12), (*EXPERTS, "data.sequence=15", "optim.name=sgd", "batch.micro_size=2")),
        (1, GPT, (0, 5), ("optim.clip=null",)),
    ],
)
def test_every_schedule_equals_one_process(
    folder: Path, ranks: int, model: str, schedules: tuple[int, int], overrides: tuple[str, ...]
) -> None:
    config = job(folder, *overrides, model=model)
    prove(config, spread(every_case(config, ranks), *schedules), steps=1)


@pytest.mark.parametrize("thin", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_data_parallel_modes_equal_one_process(folder: Path, thin: bool) -> None:
    """With tied embeddings, dropout and clipping; modes of two copies on several layouts in turn."""
    config = job(folder, "train.bucket_mib=0.01", EIGHT)
    base = configured_job(config)
    two = [
        vary(base, tp=2, dp=2, sequence_parallel=True),
        vary(base, dp=2, pp=2, schedule="zb-v"),
        vary(base, pp=2, schedule="dualpipe", cp=2, recompute="full"),
        vary(base, dp=2, pp=2, schedule="interleaved", recompute="selective"),
    ]
    cases = [vary(two[at // 2 % len(two)], **way) for at, way in enumerate(ways(2))]
    cases += [vary(base, dp=4, **way) for way in list(ways(4))[len(cases) :]]
    if thin:  # each mode, and of zero3 parameters in stages, and in fewer parts than states
        cases = [cases[at] for at in (1, 3, 7, 9, 12, 18)]
    assert {case.dp.mode for case in cases} == {"server", "ddp", "zero1", "zero2", "zero3"}
    prove(config, cases, steps=1 if thin else 2)


@pytest.mark.parametrize("name", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
def test_rounding_that_an_update_amplifies_is_no_error(folder: Path, name: str) -> None:
    """Gradients of key biases are rounding alone, which such an eps would turn into a step of full size."""
    config = job(folder, f"optim.name={name}", "optim.eps=1e-15")
    base = configured_job(config)
    prove(config, [vary(base, tp=2), vary(base, dp=2)])
    assert base.optimiser.eps == 1e-8
    assert configured_job(job(folder, "optim.eps=1e-5")).optimiser.eps == 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (GPT, ()),
        (GPT, ("model.tied=false", "batch.global_size=16", "batch.micro_size=2")),
        (LLAMA, ("optim.name=sgd", "optim.momentum=0.9", "optim.clip=null")),
    ],
)
def test_every_case_equals_one_process(folder: Path, model: str, overrides: tuple[str, ...]) -> None:
    config = job(folder, *overrides, model=model)
    assert len(prove(config, every_case(config, 4))) > 100


SYNCHED = {"vertical_sync": True}
STAGES = [  # and the updates of two steps without a drain, and of one more
    (changes(pp=4, schedule="pipedream", options=SYNCHED, recompute="selective", offload="cpu"), 24),
    (changes(pp=4, schedule="pipedream-2bw", options={"group": 5}, offload="nvme"), 6),
]
PLAIN = [(changes(pp=4, schedule="pipedream"), 24)]
REPLICAS = [
    (changes(dp=2, pp=2, schedule="pipedream", options=SYNCHED, mode="zero1", offload="nvme"), 12),
    (changes(dp=2, pp=2, schedule="pipedream-2bw", recompute="full", mode="server"), 6),
]


@pytest.mark.parametrize(
    ("model", "overrides", "within", "cases"),
    [
        (LLAMA, ("optim.name=sgd", "optim.momentum=0.9"), 1e-12, STAGES),
        (GPT, ("model.tied=false",), 1e-9, REPLICAS),  # with dropout, AdamW and clipping, which is left out
        pytest.param(LLAMA, ("optim.name=sgd", "optim.momentum=0.9"), 1e-12, PLAIN, marks=pytest.mark.slow),
    ],
    ids=["stages", "replicas", "plain"],
)
def test_asynchronous_schedules_equal_a_replay_of_their_delayed_updates(
    folder: Path, model: str, overrides: tuple[str, ...], within: float, cases: list[tuple[Changes, int]]
) -> None:
    config = job(folder, EIGHT, *overrides, model=model)
    base = configured_job(config)
    verdicts = prove(config, [vary(base, **case) for case, _ in cases])
    assert {v["weights"].bound for v in verdicts} == {within}
    assert [v.updates for v in verdicts] == [updates for _, updates in cases]


def test_the_replay_is_plain_training_where_nothing_is_late(folder: Path) -> None:
    config = job(folder, EIGHT, "optim.clip=null", model=LLAMA)
    trial = trial_of(config)
    (samples,) = {len(batch.inputs) for batch in trial.batches}
    assert samples == 8
    late = vary(configured_job(config), pp=2, schedule="pipedream")
    plain, replayed = run_reference(late, trial), run_delayed(late, trial, Delays((0, 0), 8), (1, 1))
    for delayed, expected in zip(replayed, plain, strict=True):
        assert float(delayed.loss) == pytest.approx(float(expected.loss), rel=1e-14)
        for name, weight in expected.weights.items():
            assert (delayed.weights[name] - weight).abs().max() < 1e-9, name


def test_one_late_update_by_hand(folder: Path) -> None:
    """Two updates of four microbatches, each late by one: both gradients are at the first weights."""
    config = job(folder, EIGHT, "optim.clip=null", "optim.name=sgd", "optim.rate.warmup=0", model=LLAMA)
    late = vary(configured_job(config), schedule="pipedream-2bw", options={"group": 4})
    trial = trial_of(config)
    trial = replace(trial, batches=trial.batches[:1])
    (delayed,) = run_delayed(late, trial, promised("pipedream-2bw", late.options, 1, 8), (1,))
    first = build_reference(late, trial.seed).model
    rate = trial.rate(late)(0)
    first_gradients, two = grads(late, trial)
    for name, parameter in first.named_parameters():
        decay = 1 - rate * (late.optimiser.weight_decay if parameter.dim() > 1 else 0.0)
        weight = parameter.detach() * decay - rate * first_gradients[name]
        weight = weight * decay - rate * two[name]  # decay is of the newest weights, the gradient is not
        torch.testing.assert_close(delayed.weights[name], weight, rtol=1e-12, atol=1e-14)


def test_late_stages_learn_at_a_share_of_the_rate(folder: Path) -> None:
    """One update: by PipeMare's T1 the first of three stages, whose gradients are two late, learns half."""
    config = job(folder, "optim.clip=null", "optim.name=sgd", model=LLAMA)
    trial = trial_of(config)
    trial = replace(trial, batches=trial.batches[:1])
    plain = vary(configured_job(config), pp=3, schedule="pipedream")
    rate = replace(plain.optimiser.rate, rescheduling_steps=4)
    slow = replace(plain, optimiser=replace(plain.optimiser, rate=rate))
    (full,), (less,) = (run_delayed(variant, trial, Delays((2, 1, 0), 8), (1,)) for variant in (plain, slow))
    shares = dict[str, float]()
    for name, before in build_reference(plain, trial.seed).model.named_parameters():
        step, short = full.weights[name] - before.detach(), less.weights[name] - before.detach()
        shares[name] = float(short.norm() / step.norm())
    assert {round(share, 9) for share in shares.values()} == {0.5, 1.0}
    assert shares[next(iter(shares))] == pytest.approx(0.5)
    assert shares[list(shares)[-1]] == 1.0


def test_late_stages_of_a_pipeline_learn_as_their_replay(folder: Path) -> None:
    config = job(folder, "optim.clip=null", "optim.rate.rescheduling_steps=3", "optim.name=sgd", model=LLAMA)
    (verdict,) = prove(config, [vary(configured_job(config), pp=3, schedule="pipedream")])
    assert verdict.equal, verdict.diagnosis
    assert verdict["weights"].bound == 1e-12


def grads(job: Job, trial: Trial) -> list[dict[str, Tensor]]:
    """Of each half of the batch, at the first weights."""
    halves = []
    (batch,) = trial.batches
    for rows in (slice(0, 4), slice(4, 8)):
        model, half = build_reference(job, trial.seed).model, batch.take(rows)
        (model.loss(model(half.inputs), half.targets) / int((half.targets != IGNORED).sum())).backward()
        halves.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return halves


def trial_of(config: TrainConfig) -> Trial:
    tokens = open_tokens(config)
    return Trial(batches=batches(config, tokens, 2), seed=config.train.seed, total_steps=config.train.steps)


def test_delays_promised_by_each_schedule() -> None:
    assert promised("pipedream", {}, 4, 8) == Delays((3, 2, 1, 0), 1)
    assert promised("pipedream", {"vertical_sync": True}, 3, 8) == Delays((2, 2, 2), 1)
    assert promised("pipedream", {"vertical_sync": False}, 4, 8) == Delays((3, 2, 1, 0), 1)
    assert promised("pipedream-2bw", {}, 4, 8) == Delays((1, 1, 1, 1), 4)
    assert promised("pipedream-2bw", {}, 4, 3) == Delays((1, 1, 1, 1), 3)
    late = promised("pipedream-2bw", {"group": 5}, 2, 8)
    assert late == Delays((1, 1), 5)
    assert late.updates(8) == 2
    with pytest.raises(StrettoError, match="there is no replay of its updates"):
        promised("1f1b", {}, 2, 4)


def test_equal_programs_are_run_once(folder: Path) -> None:
    config = job(folder)
    cases = [vary(configured_job(config), schedule=name) for name in ("naive", "1f1b", "gpipe")]
    verdicts = prove(config, cases)
    assert [v.same_as for v in verdicts] == [None, "tp1 dp1 pp1 naive", None]


def test_all_layouts_are_proved_on_little_of_the_model_and_the_batch(folder: Path) -> None:
    overrides = ("batch.global_size=96", "batch.micro_size=4", "data.sequence=64", "model.positions=80")
    config = job(folder, *overrides)
    small = smaller(config, 4)
    assert (small.batch.global_size, small.batch.micro_size, small.data.sequence) == (
        16,
        2,
        31,
    )  # odd: cp ranks pad it
    assert small.shape() == replace(config.shape(), ffn=64)


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (("model.preset=llama3-8b",), (16, 32 * 16, 32, 8, 16, 64, None, 0)),
        (("model.preset=gpt2", "model.ffn=3070"), (12, 12 * 16, 12, 12, 16, 66, None, 0)),
        (
            ("model.preset=gpt2", "model.moe.experts=6", "model.moe.ffn=99", "model.moe.shared_ffn=1001"),
            (12, 12 * 16, 12, 12, 16, 64, 67, 65),
        ),
    ],
)
def test_a_narrow_model_is_split_by_the_same_ranks(
    folder: Path, overrides: tuple[str, ...], sizes: tuple[int | None, ...]
) -> None:
    """For 4 ranks: at most 4 stages a rank, heads unchanged, widths with the same remainders."""
    config = job(folder, *overrides, model="{}")
    shape, full = smaller(config, 4).shape(), config.shape()
    widths = (shape.moe.ffn, shape.moe.shared_ffn) if shape.moe else (None, 0)
    actual = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, *widths)
    assert actual == sizes
    assert (shape.vocab, shape.sequence, shape.tied) == (full.vocab, full.sequence, full.tied)
    for tp in (1, 2, 4):
        assert fits_tp(shape, tp) == fits_tp(full, tp)


def sizes(cases: list[Job]) -> list[tuple[int, int, int]]:
    return [(case.layout.tp, case.layout.dp, case.layout.pp) for case in cases]


def test_every_layout_of_the_configured_schedule(folder: Path) -> None:
    assert sizes(every_layout(job(folder), 4)) == [
        (1, 1, 4),
        (1, 2, 2),
        (1, 4, 1),
        (2, 1, 2),
        (2, 2, 1),
        (4, 1, 1),
    ]
    waves = job(folder, "schedule.name=hanayo", "schedule.waves=1", "layout.pp=2", "layout.dp=2")
    assert sizes(every_layout(waves, 4)) == [
        (1, 2, 2),
        (1, 4, 1),
        (2, 1, 2),
        (2, 2, 1),
        (4, 1, 1),
    ]
    late = job(folder, "schedule.name=pipedream", "optim.clip=null")  # tied
    assert {pp for _, _, pp in sizes(every_layout(late, 4))} == {1}
    searched = every_layout(job(folder, "schedule.name=auto"), 2)
    assert "tp1 dp1 pp2 auto" in [describe(case) for case in searched]


def test_the_configured_case_is_the_configs(folder: Path) -> None:
    config = job(folder, "layout.pp=2", "schedule.name=interleaved", "schedule.chunks=2", "schedule.group=4")
    case, trained = configured_job(config), job_of(config)
    assert describe(case) == "tp1 dp1 pp2 interleaved chunks=2 group=4"
    assert case.precision.dtype == "float64"
    assert case == replace(trained, precision=case.precision)


def test_a_model_that_is_too_large_for_the_proof_is_refused_at_once(folder: Path) -> None:
    config = job(folder, "model.hidden=65536", "model.layers=80")
    with pytest.raises(StrettoError, match="GiB, this machine has") as caught:
        verify(config, [configured_job(config)])
    assert "model.layers=2" in (caught.value.hint or "")


def test_more_ranks_than_cores_can_bear_are_refused_at_once(folder: Path) -> None:
    with pytest.raises(StrettoError, match="100000 ranks are too many for the"):
        verify(job(folder), [vary(configured_job(job(folder)), dp=100000)])


def test_updates_that_begin_beside_the_backward_equal_one_process(folder: Path) -> None:
    """Without clipping, offloaded states are updated as soon as their gradients are reduced."""
    away = [("zero1", "cpu"), ("zero3", "nvme")]
    config = job(folder, "optim.clip=null", "train.bucket_mib=0.005")
    base = configured_job(config)
    prove(config, [vary(base, dp=2, mode=mode, offload=place) for mode, place in away])
