"""Runs of models with an encoder: split over ranks they learn as one process does, go on in another layout,
and `transformers` generates with their exports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from stretto.cli.main import run
from stretto.engine.checkpoint.read import read_whole
from tiny_job import job
from train_runs import read_lines, train

T5 = "{family: t5, layers: 2, encoder_layers: 2, hidden: 16, heads: 4, head_dim: 6, ffn: 24}"


def losses(config: Any) -> list[float]:
    lines = read_lines(config.run.folder / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line and "grad_norm" in line]


def test_a_run_of_encoder_and_decoder_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("data.sequence=48", "train.dtype=float64", "checkpoint.every=3")
    alone = job(tmp_path, *shared, "run.name=alone", model=T5)
    train(alone)
    split = ("layout.pp=2", "layout.encoder_pp=1", "schedule.name=1f1b")
    begun = job(tmp_path, *shared, *split, "run.name=split", model=T5)
    train(begun)
    expected, first = losses(alone), losses(begun)
    assert len(expected) == 6
    assert first == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]

    # from its third step on, tensor-parallel
    (begun.run.folder / "checkpoints" / "step-00000006").rename(tmp_path / "end")
    again = job(
        tmp_path,
        *shared,
        "layout.tp=2",
        "layout.sequence_parallel=true",
        "data.target_sequence=null",
        "checkpoint.resume=auto",
        "run.name=split",
        model=T5,
    )
    train(again)
    ended, _ = read_whole(again.run.folder / "checkpoints" / "step-00000006")
    want, _ = read_whole(tmp_path / "end")
    assert ended.keys() == want.keys()
    for name, weight in want.items():
        assert torch.allclose(ended[name], weight, rtol=1e-7, atol=1e-9), name

    out = tmp_path / "out"
    assert run(["checkpoint", "export", str(again.run.folder), "--out", str(out)]) == 0
    exported = AutoModelForSeq2SeqLM.from_pretrained(out)
    assert exported.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape[0] == 1
    assert run(["generate", str(again.run.folder), "--prompt", "x"]) == 2
    assert "generation is not supported for models with an encoder" in capsys.readouterr().err
