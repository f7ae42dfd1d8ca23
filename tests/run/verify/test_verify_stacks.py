"""Layouts of models with an encoder equal one process: every schedule, splits of all kinds, faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ranks import on_ranks
from stretto.engine.models.language import IGNORED
from stretto.program import names
from stretto.program.schedules.traits import updates_within
from stretto.prove.diagnose import Verdict
from stretto.run.config import TrainConfig
from stretto.run.data.dataset import Batch
from stretto.run.verify.prove import prove
from stretto.run.verify.reference import Trial
from stretto.spec.job import Job
from stretto.spec.rules import problems
from tiny_job import Changes, changes, job, varied

pytestmark = pytest.mark.apart

T5 = "{family: t5, layers: 3, encoder_layers: 2, hidden: 16, heads: 4, head_dim: 6, ffn: 24}"
GATED = T5.removesuffix("}") + ", mlp: geglu, tied: false}"
BART = (
    "{family: bart, layers: 3, encoder_layers: 2, hidden: 16, heads: 4, ffn: 24, dropout: 0.1, positions: 24}"
)
SEQUENCE, TARGET = 12, 10
SYNCHRONOUS = [name for name in names() if name != "forward-only" and not updates_within(name)]


def config_of(folder: Path, model: str, *overrides: str) -> TrainConfig:
    lengths = (f"data.sequence={SEQUENCE}", f"data.target_sequence={TARGET}", "batch.global_size=8")
    return job(folder, *lengths, *overrides, model=model)


def samples(steps: int, batch: int) -> list[Batch]:
    """Drawn at random, most with padding in the encoder and targets that do not count."""
    draw = torch.Generator().manual_seed(7)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, 300, (batch, length), generator=draw)

    made = list[Batch]()
    for step in range(steps):
        targets = tokens(TARGET)
        targets[::3, TARGET - 1 - step :] = IGNORED
        lengths = torch.randint(1, SEQUENCE + 1, (batch,), generator=draw)
        made.append(Batch(inputs=tokens(SEQUENCE), targets=targets, decoder=tokens(TARGET), lengths=lengths))
    return made


def _on_rank(cases: Sequence[Job]) -> list[Verdict]:
    trial = Trial(batches=samples(3, cases[0].global_batch), seed=1, total_steps=6)
    return prove(cases, trial)


def proved(config: TrainConfig, cases: Sequence[Changes]) -> list[Verdict]:
    jobs = [varied(config, case) for case in cases]
    for one in jobs:
        assert not problems(one), problems(one)
    return on_ranks(jobs[0].layout.world, _on_rank, jobs)[0]


def check(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        assert verdict.equal, verdict
        assert verdict.tolerance <= 1e-9


@pytest.mark.parametrize("model", [T5, BART], ids=["t5", "bart"])
def test_every_synchronous_schedule_on_two_ranks(tmp_path: Path, model: str) -> None:
    cases = [changes(pp=2, schedule=name) for name in SYNCHRONOUS]
    check(proved(config_of(tmp_path, model), cases))
