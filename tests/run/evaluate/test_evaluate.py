"""`stretto evaluate`: every token of a split, the same loss under every layout as of the plain model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stretto.cli.main import run
from stretto.engine.checkpoint.read import read_whole, shape_of
from stretto.engine.models.build import build
from stretto.engine.models.language import LanguageModel
from stretto.run.config import TrainConfig
from stretto.run.data.token_source import TokenSource
from stretto.run.train.metrics import read_lines
from texts import open_tokens
from tiny_job import GPT, LLAMA, MOE, job, write_text
from train_runs import train

SPLIT = "data.split=60,20,20"
EVAL = ("eval.every=3", "eval.batches=1000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of each kind of model."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_text(folder / "text.txt", count=600)
    for name, model in (("gpt", GPT), ("llama", LLAMA), ("moe", MOE)):
        train(config_of(folder, name, model))
    return folder


def config_of(folder: Path, name: str, model: str) -> TrainConfig:
    overrides = (SPLIT, *EVAL, "train.steps=3", "train.dtype=float64", f"run.name={name}")
    return job(folder, *overrides, model=model)


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(["evaluate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def tokens_of(config: TrainConfig) -> TokenSource:
    return open_tokens(config)


def plain_model(checkpoint: Path) -> LanguageModel:
    weights, loaded = read_whole(checkpoint)
    model = build(shape_of(checkpoint, loaded.meta)).double()
    model.load_state_dict(weights, strict=False)  # a tied head is not saved
    return model.eval()


def plain_loss(checkpoint: Path, ids: Sequence[int], sequence: int) -> tuple[float, int]:
    """Mean loss of the plain model on every id but the first, in windows; and their number."""
    model, total = plain_model(checkpoint), 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, sequence):
            window = torch.tensor(ids[start : start + sequence + 1], dtype=torch.int64)
            logits = model(window[None, :-1])[0]
            total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    return total / (len(ids) - 1), len(ids) - 1


LAYOUTS = {
    "gpt": [
        ("layout.dp=2", "dp.mode=server"),
        ("layout.pp=2", "schedule.name=dualpipe", "batch.micro_size=2"),
    ],
    "llama": [
        ("layout.cp=2",),
        ("layout.dp=2", "dp.mode=zero3"),
        ("layout.pp=2", "schedule.name=pipedream"),
    ],
    "moe": [("layout.tp=2", "layout.sequence_parallel=true", "layout.ep=2", "layout.expert_tp=1")],
    "more llama": [
        ("layout.tp=2", "layout.sequence_parallel=true"),
        ("layout.pp=2", "schedule.name=interleaved", "schedule.chunks=2"),
    ],
}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt", GPT),
        ("llama", LLAMA),
        ("moe", MOE),
        pytest.param("more llama", LLAMA, marks=pytest.mark.slow),
    ],
)
def test_every_layout_gives_the_loss_of_the_plain_model(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, model: str
) -> None:
    config = config_of(folder, name.removeprefix("more "), model)
    text = tokens_of(config)
    start, stop = 0.8 * text.size, text.size
    ids = text.tokens[round(start) :].tolist()
    assert abs(stop - len(ids) - start) < 1, "one document is cut where the ratio says"
    wanted, count = plain_loss(config.run.folder / "checkpoints" / "step-00000003", ids, config.data.sequence)
    assert count % config.data.sequence
    assert -(-count // config.data.sequence) % config.batch.global_size, "the last batch is incomplete"
    for layout in LAYOUTS[name]:
        report = evaluated(capsys, config.run.folder, *layout)
        assert (report["tokens"], report["split"], report["step"]) == (count, "test", 3), layout
        assert report["loss"] == pytest.approx(wanted, rel=1e-12), layout
        assert report["perplexity"] == pytest.approx(math.exp(wanted))


def test_float32_is_bitwise_the_same_where_microbatches_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, single = folder / "runs", "train.dtype=float32"
    plain = evaluated(capsys, runs / "llama", single)["loss"]
    for layout in (("layout.dp=2", "dp.mode=zero3"), ("layout.pp=2",)):
        assert evaluated(capsys, runs / "llama", single, *layout)["loss"] == plain
    assert evaluated(capsys, runs / "llama", single, "layout.tp=2")["loss"] == pytest.approx(plain, rel=1e-6)
    half = evaluated(capsys, runs / "llama", "train.dtype=bfloat16", "layout.dp=2")["loss"]
    assert half == pytest.approx(plain, rel=1e-2)


def test_training_evaluates_by_the_same_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`eval.batches` beyond the split does not read it twice."""
    config = config_of(folder, "gpt", GPT)
    trained = next(read_lines(config.run.folder / "eval.jsonl"))
    assert trained["split"] == "valid"
    report = evaluated(capsys, config.run.folder, "--split", "valid")
    assert {key: report[key] for key in ("loss", "tokens", "text_bytes")} == {
        key: trained[key] for key in ("loss", "tokens", "text_bytes")
    }
    assert list(read_lines(config.run.folder / "eval.jsonl"))[-1]["split"] == "valid"
    first = evaluated(capsys, config.run.folder, "--split", "valid", "--limit", 1)
    assert first["tokens"] == config.batch.global_size * config.data.sequence
    model, text = plain_model(Path(report["checkpoint"])), tokens_of(config)
    start = round(0.6 * text.size)
    ids = torch.from_numpy(text.tokens[start : start + first["tokens"] + 1].astype("int64"))
    windows = [w.view(-1, config.data.sequence) for w in (ids[:-1], ids[1:])]
    with torch.no_grad():
        wanted = float(model.loss(model(windows[0]), windows[1])) / first["tokens"]
    assert first["loss"] == pytest.approx(wanted, rel=1e-12)


def test_other_text_is_encoded_by_the_runs_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "other.txt"
    other.write_text("abc dëf, again: 中.\n" * 9, encoding="utf-8")
    report = evaluated(capsys, folder / "runs" / "llama", "--data", other)
    assert (report["split"], report["data"]) == ("all", str(other))
    # all but the first token, which is one character of one byte
    assert report["text_bytes"] == len(other.read_bytes()) - 1
    bits = report["loss"] * report["tokens"] / math.log(2)
    assert report["bits_per_byte"] == pytest.approx(bits / report["text_bytes"])
    assert run(["data", "build", str(other), "--out", str(folder / "other"), "--vocab", "260"]) == 0
    assert run(["evaluate", str(folder / "runs" / "llama"), "--data", str(folder / "other")]) == 2
    errors = capsys.readouterr().err
    assert "are not of the tokenizer that" in errors
    assert f"{folder / 'runs' / 'llama' / 'tokenizer.json'} encodes it" in errors


def test_an_imported_model_needs_no_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder, imported = folder / "runs" / "llama", folder / "imported"
    assert run(["checkpoint", "export", str(run_folder), "--out", str(folder / "exported")]) == 0
    assert run(["checkpoint", "import", str(folder / "exported"), "--out", str(imported)]) == 0
    assert run(["evaluate", str(imported)]) == 2
    errors = capsys.readouterr().err
    assert "data.source is REQUIRED" in errors
    assert "name it with --data" in errors
    text = folder / "text.txt"
    report = evaluated(capsys, imported, "--data", text, "--split", "test", SPLIT, "train.dtype=float64")
    assert report["step"] == 0
    assert report["loss"] == pytest.approx(evaluated(capsys, run_folder)["loss"], rel=1e-12)
    assert list(read_lines(imported / "eval.jsonl"))[-1]["loss"] == report["loss"]


def test_adapters_are_evaluated_beside_their_base(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = f"checkpoint.resume={folder / 'runs' / 'llama' / 'checkpoints' / 'step-00000003'}"
    overrides = (SPLIT, *EVAL, "train.steps=3", "train.dtype=float64", "run.name=lora", "lora.rank=2", start)
    config = job(folder, *overrides, model=LLAMA)
    train(config)
    trained = list(read_lines(config.run.folder / "eval.jsonl"))[-1]["loss"]
    plain = evaluated(capsys, folder / "runs" / "llama", "--split", "valid")["loss"]
    assert abs(trained - plain) > 1e-6, "the adapters are trained"
    for layout in ((), ("layout.tp=2",)):
        report = evaluated(capsys, config.run.folder, "--split", "valid", *layout)
        assert report["loss"] == pytest.approx(trained, rel=1e-12)


def test_a_checkpoint_outside_a_run_is_evaluated_and_nothing_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step-00000003").symlink_to(folder / "runs" / "gpt" / "checkpoints" / "step-00000003")
    report = evaluated(capsys, tmp_path / "step-00000003", "--limit", 1)
    assert report["written"] is None
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--split", "tests"), "split 'tests': allowed are train, valid, test, all"),
        (("data.split=9,1,0",), "the test split (data.split=9,1,0) of the"),
        (("--checkpoint", "2"), "--checkpoint 2: "),
        (("data.sequence=32",), "data.sequence is 32: the model has 16 positions"),
        (("--data", "nowhere.txt"), "data.source is nowhere.txt: there is no such file or folder"),
        (("model.hidden=64",), "is of another model: its hidden is 32, the config's is 64"),
        (("hidden",), "config hidden does not exist"),
        (("layout.tp=2", "hidden"), "hidden is neither a config after the run's name nor an override"),
        (("layout.tp=3",), "heads"),
    ],
)
def test_what_cannot_be_evaluated_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run(["evaluate", str(folder / "runs" / "gpt"), *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    lines = errors.splitlines()
    assert all(line.startswith(("error: ", "hint: ")) for line in lines)
    assert sum(line.startswith("error: ") for line in lines) == (3 if arguments == ("layout.tp=3",) else 1)


def test_a_folder_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(tmp_path)]) == 2
    assert "no checkpoint there" in capsys.readouterr().err
    file = write_text(tmp_path / "text.txt", 10)
    assert run(["evaluate", str(file)]) == 2
    assert "is a file" in capsys.readouterr().err


def test_the_lines_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(folder / "runs" / "gpt"), "--limit", "2"]) == 0
    first, numbers, rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"evaluate step 3 of {folder / 'runs' / 'gpt'} on the test split of ")
    assert "at most 8 sequences" in first
    assert [part.split()[0] for part in numbers.split(" | ")] == ["loss", "perplexity", "bits/byte"]
    assert rest.startswith("128 tokens in ")
    assert rest.endswith(f"added to {folder / 'runs' / 'gpt' / 'eval.jsonl'}")
