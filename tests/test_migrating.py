"""The page on moving a Megatron-LM job, typed from its first command to its last: a script of Megatron-LM
with its tokens, tokenizer and checkpoint, all made here, becomes a run that continues in another layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import megatron_models as megatron
from pages import blocks, commands, run_here, run_in_turn, text_of, unprinted
from stretto.job.shape import ModelShape
from stretto.run.config.load import load
from tiny_job import write_text

TOUR = text_of("docs/do/megatron.md")
TIMED = ("predict", "verify", "train")  # they print times and losses, which differ from machine to machine
SHAPE = ModelShape(family="gpt", layers=4, hidden=64, heads=4, vocab=512, sequence=64)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a person has of Megatron-LM."""
    folder = tmp_path_factory.mktemp("brought")
    (folder / "pretrain_gpt.sh").write_text(blocks(TOUR, "bash")[0])
    for name, seed in (("corpus", 1), ("more", 2)):
        lines = write_text(folder / f"{name}.txt", count=30000, seed=seed).read_text().splitlines()
        documents = ("\n".join(lines[i : i + 10]) for i in range(0, len(lines), 10))
        rows = (json.dumps({"text": text}) + "\n" for text in documents)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    prefix = "my-gpt2_text_document"
    build = ["stretto", "data", "build", "corpus.jsonl", "--vocab", "500", "--format", "megatron"]
    run_here([*build, "--out", prefix], folder)
    trained = folder / f"{prefix}.tokenizer.json"
    model = json.loads(trained.read_text())["model"]
    trained.unlink()  # Megatron-LM leaves none there
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n")
    write_checkpoint(folder, prefix)
    return folder


def write_checkpoint(folder: Path, prefix: str) -> None:
    """Iteration 20 of the small model, as Megatron-LM with its optimiser and arguments writes it."""
    weights = {
        name: tensor if name.endswith("norm_weight") else 0.08 * tensor
        for name, tensor in megatron.weights(SHAPE).items()
    }
    states = {kind: {n: 1e-4 * t.abs() for n, t in weights.items()} for kind in ("exp_avg", "exp_avg_sq")}
    args: dict[str, Any] = {
        "fp16": True,
        "train_iters": 40,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "lr": 6e-3,
        "min_lr": 6e-4,
        "lr_decay_style": "cosine",
        "lr_decay_iters": 40,
        "clip_grad": 1.0,
        "weight_decay": 0.1,
        "consumed_train_samples": 320,
        "data_path": [str(folder / prefix)],
        "split": "949,50,1",
        "vocab_file": str(folder / "vocab.json"),
        "merge_file": str(folder / "merges.txt"),
        "tokenizer_type": "GPT2BPETokenizer",
    }
    half = {name: tensor.half() for name, tensor in weights.items()}
    everything = {**states, "fp32_param": weights}
    optimiser = megatron.adam(20)
    megatron.write(
        folder / "checkpoints", SHAPE, half, states=everything, optimiser=optimiser, args=args, iteration=20
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_from_a_script_to_a_run_in_another_layout(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    typed = [*commands(TOUR)]
    outputs = run_in_turn([command.argv for command in typed], place)
    for command, printed in zip(typed, outputs, strict=True):
        shown = unprinted(command, printed, numbers=command.argv[1] not in TIMED)
        assert not shown, f"{command.line}\n{printed}"
    subcommands = {command.argv[1] for command in typed}
    assert subcommands == {"migrate", "config", "predict", "data", "verify", "train", "checkpoint"}
    assert lines_of(place, "trial") == list(range(1, 13))  # one step after the other, in both layouts
    assert load(place / "trial.yaml").layout.to_layout().describe() == "tp2 pp2"
    assert load(place / "runs/trial/config.yaml").layout.to_layout().describe() == "dp2"
    assert lines_of(place, "gpt-tuned") == [21, 22]
    assert (place / "back/latest_checkpointed_iteration.txt").read_text().strip() == "22"


def lines_of(place: Path, name: str) -> list[int]:
    """The steps that a run has written."""
    text = (place / "runs" / name / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]
