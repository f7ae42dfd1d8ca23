"""Jobs whose samples hold several documents, each kept apart: every kind of layout equals one process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import stretto.run.train.assemble as assemble_module
import stretto.run.train.batches as batches_module
from proofs import verify
from stretto.engine.documents import DocumentStarts
from stretto.engine.models.language import IGNORED
from stretto.run.config import TrainConfig
from stretto.run.data.dataset import samples_of
from stretto.verify.language.proof import batches
from texts import open_tokens
from tiny_job import EIGHT, GPT, LLAMA, Changes, changes, job, name_of, varied
from train_runs import read_lines, train

OSS = (
    "{family: gpt_oss, layers: 2, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, ffn: 16, "
    "attention: {window: 5, full_every: 2}, moe: {experts: 4}}"
)
LATENT = (
    "{family: deepseek_v3, layers: 2, hidden: 32, heads: 4, head_dim: 12, ffn: 32, attention: "
    "{latent: {kv_rank: 8, rope_dim: 4, value_dim: 8}}}"
)
CASES = [
    (GPT, changes(tp=1, dp=1, pp=2, cp=2, schedule="interleaved", recompute="full")),
    (GPT, changes(tp=1, dp=2, cp=2, context="ulysses")),
    (LLAMA, changes(tp=2, dp=1, cp=2, sequence_parallel=True)),
    (LLAMA, changes(tp=1, dp=2, pp=2, schedule="pipedream")),
    (OSS, changes(tp=1, dp=2, pp=2, ep=2, schedule="1f1b")),
]
MORE = [
    (GPT, changes(tp=2, dp=1, pp=2, schedule="1f1b", sequence_parallel=True, recompute="full")),
    (GPT, changes(tp=1, dp=1, pp=4, schedule="zb-h1", recompute="selective")),
    (GPT, changes(tp=1, dp=2, pp=2, schedule="dualpipe")),
    (LLAMA, changes(tp=1, dp=4, mode="server")),
    (LLAMA, changes(tp=1, dp=2, pp=2, mode="zero3", schedule="1f1b")),
    (OSS, changes(tp=2, dp=1, cp=2, sequence_parallel=True)),
    (LATENT, changes(tp=1, dp=1, cp=4)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one word to some twenty, so that samples of 16 tokens hold all kinds of edges."""
    folder, draw = tmp_path_factory.mktemp("packed"), random.Random(3)
    vocabulary = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(80)]
    with (folder / "short.jsonl").open("w") as file:
        for _ in range(400):
            file.write(
                json.dumps({"text": " ".join(draw.choices(vocabulary, k=draw.choice((1, 2, 5, 20))))}) + "\n"
            )
    return folder


def config_of(folder: Path, *overrides: str, model: str = LLAMA) -> TrainConfig:
    return job(
        folder, f"data.source={folder / 'short.jsonl'}", "data.packing=documents", *overrides, model=model
    )


def test_samples_hold_all_kinds_of_documents(folder: Path) -> None:
    config = config_of(folder)
    batch, *_ = batches(config, open_tokens(config), 1)
    assert batch.begins is not None
    runs = DocumentStarts(batch.begins).runs(batch.begins.new_tensor(range(16)))
    assert len({len(row) for row in runs}) > 2
    assert {1, 2} & {last - first for row in runs for _, first, last in row}
    assert bool((batch.targets == IGNORED).any())


def test_samples_of_one_document_are_cut_for_a_proof(folder: Path) -> None:
    """The text of the tiny job is one document, whose edges no sample would hold."""
    config = job(folder, EIGHT, "data.packing=documents", "data.sequence=5", model=LLAMA)
    batch, *_ = batches(config, open_tokens(config), 1)
    assert batch.begins is not None
    edges = batch.begins.diff(dim=1) != 0
    assert edges.sum(1).tolist() == [0, 1, 1, 1] * 2
    assert len(edges.int().argmax(1).unique()) > 2, "in different places"
    assert torch.equal(batch.targets[:, :-1] == IGNORED, edges)


@pytest.mark.parametrize(
    ("model", "cases"),
    [
        *((model, [case for of, case in CASES if of == model]) for model in (GPT, LLAMA, OSS)),
        *(pytest.param(model, [case], marks=pytest.mark.slow) for model, case in MORE),
    ],
    ids=lambda x: ", ".join(map(name_of, x)) if isinstance(x, list) else "",
)
def test_a_layout_of_a_packed_job_equals_one_process(folder: Path, model: str, cases: list[Changes]) -> None:
    config = config_of(folder, model=model)
    every = [varied(config, {"tp": 1, "pp": 1, "schedule": "1f1b", **case}) for case in cases]
    assert [verdict.diagnosis for verdict in verify(config, every, steps=1)] == [None] * len(cases)


def share_nothing() -> None:
    """The layers of the job know of no documents."""
    assemble_module.share_packing = lambda model, packing: None


def documents_of_the_first_microbatch() -> None:
    """Every microbatch of a rank gets them."""
    documents = list[DocumentStarts]()

    def first(begins: Tensor) -> DocumentStarts:
        documents.append(DocumentStarts(begins))
        return documents[0]

    batches_module.DocumentStarts = first


@pytest.mark.parametrize("fault", [share_nothing, documents_of_the_first_microbatch])
def test_documents_that_are_mixed_up_are_caught(folder: Path, fault: Callable[[], None]) -> None:
    config = config_of(folder)
    case = varied(config, changes(tp=1, dp=1, pp=2, schedule="1f1b"))
    (verdict,) = verify(config, [case], on_rank=fault)
    assert not verdict.equal
    assert verdict.error("loss") > 1e-6


def test_a_packed_run_trains_and_evaluates_packed(folder: Path) -> None:
    """Evaluation keeps documents apart too: its targets are all tokens but the first of each document."""
    steps = ("train.steps=3", "eval.every=3", "eval.batches=1000")
    overrides = ("layout.pp=2", "layout.cp=2", *steps, "run.name=apart")
    config = config_of(folder, *overrides, "data.split=8,2,0")
    source = open_tokens(config)
    train(config)
    records = list(read_lines(config.run.folder / "metrics.jsonl"))
    evaluations = list(read_lines(config.run.folder / "eval.jsonl"))
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["targets"] < records[-1]["tokens"]
    split = samples_of(source, config.data, "valid", once=True)
    batch = split.batch(range(len(split)))
    assert evaluations[-1]["tokens"] == int((batch.targets != IGNORED).sum())
    firsts = set(source.offsets.tolist())
    inside = [at for at in range(split.range.start + 1, split.range.stop) if at not in firsts]
    assert evaluations[-1]["tokens"] == len(inside)
    assert "bits_per_byte" not in evaluations[-1] or evaluations[-1]["bits_per_byte"] is None
