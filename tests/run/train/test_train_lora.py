"""Low-rank adapters: every layout trains them as one process does, and the base keeps its bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from planted_faults import Planted, prove_planted
from proofs import verify
from stretto.engine.models.weights import initial_values
from stretto.engine.parallel.adapters import ReplicatedFactor
from stretto.errors import StrettoError
from stretto.job.lora import is_adapter
from stretto.job.rules import problems
from stretto.run.config.schema import TrainConfig
from tiny_job import GPT, LLAMA, MOE, Changes, changes, job, varied
from train_runs import at_step, losses, same, send_self, tensors, train

pytestmark = pytest.mark.apart

RANK = ("lora.rank=4", "lora.alpha=8")
STOP_AT_3 = at_step(3, 0, send_self, signal.SIGTERM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


def lora(folder: Path, *overrides: str, model: str = LLAMA) -> TrainConfig:
    return job(folder, "batch.global_size=4", *RANK, *overrides, model=model)


CASES = [
    changes(tp=2, sequence_parallel=True, recompute="full"),
    changes(pp=2, schedule="pipedream"),
    changes(cp=2, mode="zero3"),
]
MORE = [
    changes(tp=2),
    changes(tp=2, sequence_parallel=True),
    changes(pp=2, schedule="zb-h1"),
    changes(dp=2, mode="zero2", offload="cpu"),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_layouts_train_adapters_as_one_process_does(folder: Path, cases: list[Changes]) -> None:
    config = lora(folder)
    assert all(v.equal for v in verify(config, [varied(config, case) for case in cases], steps=1))


@pytest.mark.parametrize(
    ("model", "targets", "cases"),
    [
        (GPT, ["q_proj", "c_fc"], [changes(tp=2, sequence_parallel=True)]),
        (MOE, ["all-linear"], [changes(tp=2), changes(dp=2, ep=2)]),
        pytest.param(
            LLAMA.replace("kv_heads: 2", "kv_heads: 1"),
            ["attn.*"],
            [changes(tp=2, sequence_parallel=True)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_models_and_targets(folder: Path, model: str, targets: list[str], cases: list[object]) -> None:
    named = ", ".join(f'"{target}"' for target in targets)
    config = lora(folder, f"lora.targets=[{named}]", "lora.rslora=true", model=model)
    assert all(v.equal for v in verify(config, [varied(config, case) for case in cases], steps=1))  # pyright: ignore


def test_dropout_of_adapters_drops_the_same_on_every_layout(folder: Path) -> None:
    config = lora(folder, "lora.dropout=0.2")
    cases = [changes(tp=2, sequence_parallel=True), changes(cp=2)]
    assert all(v.equal for v in verify(config, [varied(config, case) for case in cases], steps=1))


def sum_nothing(patch: pytest.MonkeyPatch) -> None:
    """Gradients of factors that every rank has whole stay those of its own tokens."""
    right = ReplicatedFactor.parts

    def parts(self: ReplicatedFactor, *arguments: object) -> object:
        return right(ReplicatedFactor(sequence=False), *arguments)  # pyright: ignore

    patch.setattr(ReplicatedFactor, "parts", parts)


ALL = [Planted(sum_nothing, changes(tp=2, sequence_parallel=True), ("lora",))]


def test_a_factor_whose_gradient_is_not_summed_is_seen(folder: Path) -> None:
    for at, verdict in prove_planted(lora(folder), __name__, range(len(ALL))).items():
        ALL[at].check(verdict)


def test_adapters_train_and_the_base_keeps_its_bits(folder: Path) -> None:
    how = ("layout.dp=2", "dp.mode=zero3", "train.dtype=bfloat16")
    uninterrupted = lora(folder, "run.name=whole", *how)
    train(uninterrupted)
    parts = lora(folder, "run.name=parts", *how)
    train(parts, STOP_AT_3)
    train(lora(folder, "run.name=parts", *how, "checkpoint.resume=auto"))
    saved = tensors(uninterrupted, 6)
    assert same(saved, tensors(parts, 6))
    assert losses(uninterrupted) == losses(parts)
    moved = 0
    for key, value in saved.items():
        if key.startswith("model."):
            name = key.removeprefix("model.")
            first = initial_values(
                name, tuple(value.shape), uninterrupted.train.seed, uninterrupted.shape(300)
            )
            assert torch.equal(value, first.to(value.dtype)) is not is_adapter(name), name
            moved += is_adapter(name)
        else:
            assert is_adapter(key), key
    assert moved == 2 * 2 * 7


@pytest.mark.parametrize(
    ("override", "model", "message"),
    [
        ('lora.targets=["gate_proj"]', GPT, "no block of the model has it"),
        (
            'lora.targets=["gate_proj"]',
            MOE.replace(", shared_ffn: 16", ""),
            "routed experts take no adapters",
        ),
        ("precision.fp8=row", LLAMA, "do not support 8-bit products"),
    ],
)
def test_adapters_that_cannot_be_are_refused(folder: Path, override: str, model: str, message: str) -> None:
    config = lora(folder, override, model=model)
    assert any(message in problem.rule for problem in problems(varied(config, changes())))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (('lora.targets=["q_prj"]', "lora.rank=2"), "did you mean q_proj?"),
        (("lora.alpha=2",), "lora.rank=8"),
    ],
)
def test_sections_without_sense_name_the_fix(folder: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(StrettoError) as error:
        job(folder, *overrides, model=LLAMA)
    assert message in str(error.value) + str(error.value.hint)


def test_new_adapters_start_beside_the_weights_of_a_run(folder: Path) -> None:
    base = job(folder, "run.name=base", model=LLAMA)
    train(base)
    at = f"checkpoint.resume={base.run.folder}"
    tuned = lora(folder, "run.name=tuned", at, "layout.tp=2")
    assert train(tuned)["step"] == 6
    before, after = tensors(base, 6), tensors(tuned, 6)
    weights = [key for key in before if key.startswith("model.")]
    assert all(torch.equal(before[key], after[key]) for key in weights)
    assert losses(tuned)[1] < losses(base)[1] - 0.1  # it starts with what the base has learned
    assert len([key for key in after if is_adapter(key) and key.startswith("model.")]) == 28
    with pytest.raises(StrettoError, match=r"lora\.rank is 4, the config's is 2"):
        train(
            job(folder, "run.name=other", "lora.rank=2", f"checkpoint.resume={tuned.run.folder}", model=LLAMA)
        )
