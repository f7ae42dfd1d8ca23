"""Layouts of models with an encoder equal one process: every schedule, splits of all kinds, faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto.run.train.assemble as assemble_module
from ranks import on_ranks
from stretto.engine.documents import Packing
from stretto.engine.models.language import IGNORED, LanguageModel
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.program import names
from stretto.program.schedules.traits import updates_within
from stretto.run.config import TrainConfig
from stretto.run.data.dataset import Batch
from stretto.verify.evidence import Verdict
from stretto.verify.language.prove import prove
from stretto.verify.language.reference import Trial
from tiny_job import EIGHT, Changes, changes, job, varied

pytestmark = pytest.mark.apart

T5 = "{family: t5, layers: 3, encoder_layers: 2, hidden: 16, heads: 4, head_dim: 6, ffn: 24}"
GATED = T5.removesuffix("}") + ", mlp: geglu, tied: false}"
BART = (
    "{family: bart, layers: 3, encoder_layers: 2, hidden: 16, heads: 4, ffn: 24, dropout: 0.1, positions: 24}"
)
SEQUENCE, TARGET = 12, 10
SYNCHRONOUS = [name for name in names() if name != "forward-only" and not updates_within(name)]


def config_of(folder: Path, model: str, *overrides: str) -> TrainConfig:
    lengths = (f"data.sequence={SEQUENCE}", f"data.target_sequence={TARGET}", "batch.global_size=4")
    return job(folder, *lengths, *overrides, model=model)


def samples(steps: int, batch: int) -> list[Batch]:
    """Drawn at random, most with padding in the encoder and targets that do not count."""
    draw = torch.Generator().manual_seed(7)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, 300, (batch, length), generator=draw)

    batches = list[Batch]()
    for step in range(steps):
        targets = tokens(TARGET)
        targets[::3, TARGET - 1 - step :] = IGNORED
        lengths = torch.randint(1, SEQUENCE + 1, (batch,), generator=draw)
        batches.append(
            Batch(inputs=tokens(SEQUENCE), targets=targets, decoder=tokens(TARGET), lengths=lengths)
        )
    return batches


def _on_rank(cases: Sequence[Job]) -> list[Verdict]:
    trial = Trial(batches=samples(2, cases[0].global_batch), seed=1, total_steps=6)
    return prove(cases, trial)


def proved(config: TrainConfig, cases: Sequence[Changes]) -> list[Verdict]:
    jobs = [varied(config, case) for case in cases]
    for case_job in jobs:
        assert not problems(case_job), problems(case_job)
    return on_ranks(jobs[0].layout.world, _on_rank, jobs)[0]


def check(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        assert verdict.equal, verdict
        assert verdict["weights"].bound <= 1e-9


def test_schedules_of_every_placement_on_two_ranks(tmp_path: Path) -> None:
    """One stage a rank, several, in a V, and two copies of the model."""
    cases = [changes(pp=2, schedule=name) for name in ("1f1b", "interleaved", "zb-v", "dualpipe")]
    check(proved(config_of(tmp_path, T5), cases))


@pytest.mark.slow
@pytest.mark.parametrize("model", [T5, BART], ids=["t5", "bart"])
def test_every_synchronous_schedule_on_two_ranks(tmp_path: Path, model: str) -> None:
    cases = [changes(pp=2, schedule=name) for name in SYNCHRONOUS]
    check(proved(config_of(tmp_path, model, EIGHT), cases))


ON_TWO = [
    changes(tp=2, sequence_parallel=True, recompute="selective"),
    changes(tp=2, recompute="full", shard_inputs=True),
    changes(dp=2, mode="zero3", gather="layer"),
    changes(tp=2),
    changes(tp=2, sequence_parallel=True),
    changes(dp=2, mode="zero1"),
    changes(dp=2, mode="zero2", recompute="full"),
]
ON_FOUR = [
    changes(pp=4, schedule="zb-h1", encoder_pp=3, recompute="full"),
    changes(pp=2, tp=2, schedule="interleaved", sequence_parallel=True, recompute="selective"),
    changes(pp=4, schedule="1f1b", encoder_pp=1),
    changes(pp=4, schedule="dualpipe-v"),
    changes(pp=2, dp=2, schedule="zb-v", mode="zero3", gather="stage"),
    changes(dp=2, tp=2, mode="zero2", sequence_parallel=True),
]


@pytest.mark.parametrize(
    ("model", "cases"),
    [
        pytest.param(T5, ON_TWO[:3], id="t5"),
        pytest.param(T5, ON_TWO[3:], id="t5 more", marks=pytest.mark.slow),
        pytest.param(BART, ON_TWO, id="bart", marks=pytest.mark.slow),
    ],
)
def test_split_layers_sequences_and_states_on_two_ranks(
    tmp_path: Path, model: str, cases: list[Changes]
) -> None:
    check(proved(config_of(tmp_path, model), cases))


@pytest.mark.parametrize(
    ("model", "batch", "cases"),
    [
        pytest.param(BART, (), ON_FOUR[1:2], id="bart"),
        pytest.param(BART, (EIGHT,), ON_FOUR, id="bart more", marks=pytest.mark.slow),
        pytest.param(GATED, (EIGHT,), ON_FOUR, id="t5 version 1.1", marks=pytest.mark.slow),
    ],
)
def test_all_axes_on_four_ranks(
    tmp_path: Path, model: str, batch: tuple[str, ...], cases: list[Changes]
) -> None:
    """With a number of encoder's ranks that the costs would not give, too."""
    check(proved(config_of(tmp_path, model, *batch), cases))


def _with_faults(cases: Sequence[Job]) -> dict[str, list[Verdict]]:
    """The verdicts where one thing is wrong on the ranks, and not in the one process, for each in turn."""
    right, verdicts = assemble_module.parallelize, dict[str, list[Verdict]]()

    def wrong(model: LanguageModel, *rest: Any) -> Any:
        table = right(model, *rest)
        FAULTS[fault](model)
        return table

    for fault in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assemble_module, "parallelize", wrong)
            verdicts[fault] = _on_rank(cases)
    return verdicts


def _padding_is_seen(model: LanguageModel) -> None:
    for block in model.blocks:
        core: Any = block.get_submodule("cross.core")
        core.packing = Packing()


def _memory_has_no_gradient(model: LanguageModel) -> None:
    last = model.blocks[-1]
    run = last.forward
    last.forward = lambda x, memory: run(x, memory.detach())


def _a_head_has_the_biases_of_another(model: LanguageModel) -> None:
    for block in model.encoder:
        attention: Any = block.get_submodule("attn")
        of_head = attention._bias
        attention._bias = lambda relative, q, of_head=of_head: of_head(relative.flip(0), q)


FAULTS: dict[str, Any] = {
    "padding": _padding_is_seen,
    "memory": _memory_has_no_gradient,
    "biases": _a_head_has_the_biases_of_another,
}


def test_faults_of_a_model_with_an_encoder_are_seen(tmp_path: Path) -> None:
    case = varied(config_of(tmp_path, T5), changes(tp=2))
    verdicts = on_ranks(2, _with_faults, [case])[0]
    assert {fault: verdict.equal for fault, (verdict,) in verdicts.items()} == dict.fromkeys(FAULTS, False)


@pytest.mark.parametrize(
    ("case", "field", "says"),
    [
        (changes(cp=2), "layout.cp", "not split over context-parallel ranks"),
        (changes(dp=2, mode="server"), "dp.mode", "of one sequence"),
        (changes(pp=2, schedule="pipedream"), "schedule", "share embeddings"),
        (
            changes(pp=2, schedule="interleaved", encoder_pp=1),
            "layout.encoder_pp",
            "gives each rank 2 stages",
        ),
        (changes(pp=2, schedule="1f1b", encoder_pp=2), "layout.encoder_pp", "it may have 1"),
        (changes(pp=1, encoder_pp=1), "layout.encoder_pp", "one rank holds both"),
    ],
)
def test_what_is_not_done_is_refused(tmp_path: Path, case: Changes, field: str, says: str) -> None:
    (broken,) = [
        problem for problem in problems(varied(config_of(tmp_path, T5), case)) if problem.field == field
    ]
    assert says in broken.message


def test_a_decoder_alone_has_no_encoder_ranks(tmp_path: Path) -> None:
    (broken,) = problems(varied(job(tmp_path, EIGHT), changes(pp=2, encoder_pp=1)))
    assert "has no encoder" in broken.message


def test_lengths_are_multiples_where_the_sequence_is_split(tmp_path: Path) -> None:
    odd = config_of(tmp_path, BART, "data.target_sequence=9")
    (broken,) = problems(varied(odd, changes(tp=2, sequence_parallel=True)))
    assert broken.field == "data.target_sequence"
    assert "multiple of layout.tp=2" in broken.message
