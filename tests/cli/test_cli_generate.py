"""`stretto generate`: the same text whatever layout trained the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli.main import run
from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from tiny_job import LLAMA, job, job_file
from train_runs import tensors, train

LAYOUTS = {
    "single": (),
    "tp2": ("layout.tp=2",),
    "pp2": ("layout.pp=2", "schedule.name=interleaved", "schedule.chunks=2"),
    "dp2": ("layout.dp=2",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one job on several layouts; in float64, so that their weights are equal in float32."""
    folder = tmp_path_factory.mktemp("generate")
    for name, layout in LAYOUTS.items():
        train(job(folder, *layout, "train.dtype=float64", "train.steps=3", f"run.name={name}", model=LLAMA))
    return folder


def written(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, str]:
    assert run(["generate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_layout_writes_the_same_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = folder / "runs"
    texts = [written(capsys, runs / name, "--prompt", "a ", "--tokens", 24)["text"] for name in LAYOUTS]
    assert len(set(texts)) == 1
    assert texts[0].startswith("a ")
    assert len(texts[0]) > 12


def test_text_is_a_function_of_the_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ = folder / "runs" / "single"
    one, two, other = (written(capsys, run_, "--tokens", 24, "--seed", seed)["text"] for seed in (3, 3, 4))
    assert one == two != other
    greedy = [written(capsys, run_, "--temperature", 0, "--seed", seed)["text"] for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_a_run_its_checkpoints_and_one_checkpoint_are_all_names_of_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ = folder / "runs" / "single"
    newest = run_ / "checkpoints" / "step-00000003"
    for name in (run_, run_ / "checkpoints", newest):
        assert written(capsys, name, "--tokens", 4)["checkpoint"] == str(newest)


def test_people_get_the_text_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(folder / "runs" / "single"), "--prompt", "b", "--tokens", "8"]
    text = written(capsys, *arguments)["text"]
    assert run(["generate", *arguments]) == 0
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize(
    ("path", "says"),
    [("none", "none: no checkpoint there"), ("text.txt", "text.txt: no checkpoint there")],
)
def test_no_checkpoint_ends_with_2(
    folder: Path, path: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(folder / path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.startswith("error: ")


def test_a_damaged_newest_checkpoint_is_passed_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(folder, "train.steps=4", "checkpoint.every=2", "run.name=damaged", model=LLAMA)
    train(config)
    checkpoints = config.run.folder / "checkpoints"
    (checkpoints / "step-00000004" / "manifest.json").write_text("{}")
    assert run(["generate", str(config.run.folder), "--tokens", "4", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["checkpoint"] == str(checkpoints / "step-00000002")
    assert "step-00000004 is damaged" in captured.err


def test_a_tokenizer_that_is_gone_ends_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(folder, "train.steps=1", "optim.rate.warmup=0", "run.name=bare", model=LLAMA)
    train(config)
    (config.run.folder / "tokenizer.json").unlink()
    assert run(["generate", str(config.run.folder)]) == 2
    assert "no tokenizer.json beside checkpoint" in capsys.readouterr().err


def test_the_sample_at_the_end_of_training_equals_generate(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job_file(tmp_path, LLAMA)
    assert run(["train", str(config), "layout.tp=2", "train.steps=2"]) == 0
    shown = capsys.readouterr().out.split("what it writes now:\n\n")[1].split("\n\nrun folder")[0]
    options = ["--prompt", "def ", "--tokens", 8, "--seed", 1]
    assert written(capsys, tmp_path / "runs" / "tiny", *options)["text"] == shown


def test_what_training_saves_can_be_exported(folder: Path, tmp_path: Path) -> None:
    """The names under which a run writes its facts are those that the export reads."""
    config = job(folder, "run.name=single", model=LLAMA)
    files = export_huggingface(config.run.folder / "checkpoints" / "step-00000003", tmp_path / "out")
    assert {path.name for path in files} == {"config.json", "model.safetensors"}
    assert tensors(config, 3).keys() >= {"model.embed.tok.weight", "optim.exp_avg.embed.tok.weight"}
