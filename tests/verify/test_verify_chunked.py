"""Head and loss in chunks of tokens, under layouts and schedules of all kinds, beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from proofs import verify
from stretto.job.job import Job
from stretto.run.config.schema import TrainConfig
from stretto.verify.language.cases import configured_job, vary
from tiny_job import EIGHT, LLAMA, changes, job, varied

ODD = ("train.loss_chunk=5", "data.sequence=15", EIGHT)  # chunks end inside samples, and the last is shorter
SPLIT = [changes(tp=2, pp=2, schedule="zb-h1", sequence_parallel=True)]
CAPPED = LLAMA.replace("{family: llama", "{family: gemma2, logit_softcap: 3.0, attention: {softcap: 4.0}")


def prove(config: TrainConfig, cases: list[Job], steps: int = 2) -> None:
    verdicts = verify(config, cases, steps)
    assert [verdict.diagnosis for verdict in verdicts] == [None] * len(cases)
    assert all(case.loss_chunk == 5 for case in cases)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunked")


def test_layouts_equal_one_process(folder: Path) -> None:
    """With tied embeddings, whose two copies are summed, and dropout."""
    config = job(folder, *ODD, "batch.micro_size=2")
    prove(config, [varied(config, case) for case in SPLIT], steps=1)


@pytest.mark.slow
def test_layouts_of_all_kinds_equal_one_process(folder: Path) -> None:
    config = job(folder, *ODD, "train.bucket_mib=0.005")
    base = configured_job(config)
    cases = [
        vary(base, tp=2, cp=2),
        vary(base, dp=2, pp=2, schedule="gpipe", mode="zero3"),
        vary(base, dp=2, pp=2, schedule="zb-h1", mode="zero2"),
        vary(base, dp=2, tp=2, mode="zero1", sequence_parallel=True),
        vary(base, dp=4, mode="zero3"),
        vary(base, dp=2, pp=2, schedule="zb-v"),
        vary(base, pp=4, schedule="dualpipe"),
        vary(base, dp=2, pp=2, schedule="interleaved", recompute="full"),
    ]
    prove(config, cases)
    capped = job(folder, *ODD, model=CAPPED)
    prove(capped, [vary(configured_job(capped), tp=2, pp=2, sequence_parallel=True)])
    late = job(folder, *ODD, "model.tied=false", "optim.clip=null")
    prove(late, [vary(configured_job(late), pp=4, schedule="pipedream")])
    adapted = job(folder, *ODD, "lora.rank=2", model=LLAMA)
    prove(adapted, [vary(configured_job(adapted), tp=2, pp=2)])


def forget_a_chunk() -> None:
    """The second chunk's rows get no gradient."""
    from stretto.engine.parallel.tensor import chunked_loss

    inner = chunked_loss._Chunk.gradient

    def gradient(self: chunked_loss._Chunk, scale: Tensor) -> Tensor:
        return inner(self, scale) * (self.at.start != 5)

    chunked_loss._Chunk.gradient = gradient  # type: ignore[method-assign]


def test_a_chunk_without_a_gradient_is_caught(folder: Path) -> None:
    config = job(folder, *ODD)
    (verdict,) = verify(config, [varied(config, changes(tp=2))], steps=1, on_rank=forget_a_chunk)
    assert not verdict.equal
    assert verdict.error("loss") < 1e-12
    assert verdict.error("gradients") > 1e-4
