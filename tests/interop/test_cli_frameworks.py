"""`--emit` of plan and config, and `--from` of predict, from the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from stretto.cli.main import run

SIZES = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257 --seq-length 1024"
SIZES += " --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --bf16"
PLAN = ["plan", "--model", "gpt2", "--cluster", "h100:8", "--batch", "64", "--seconds", "3"]


def test_a_plan_is_printed_as_a_script_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*PLAN, "--emit", "megatron"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/usr/bin/env bash\n# Megatron-LM core_v0.19.0 on 8 processes")
    path = tmp_path / "run.sh"
    path.write_text(text)
    arguments = [
        "predict",
        "--from",
        "megatron",
        str(path),
        "--cluster",
        "h100:8",
        "--seconds",
        "2",
        "--json",
    ]
    assert run(arguments) == 0
    today = json.loads(capsys.readouterr().out)["rows"][0]
    predicted = float(text.split("predicted on 8 x h100-80gb-sxm: ")[1].split(" s a step")[0])
    assert today["step_time_s"] == pytest.approx(predicted, rel=1e-3)


def test_a_row_is_written_beside_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    assert run([*PLAN, "--emit", "nemo", "--row", "1", "--output", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    assert "OVERRIDES=(" in path.read_text()
    assert run([*PLAN, "--emit", "nemo", "--row", "99"]) == 2
    assert "the plan has" in capsys.readouterr().err


def test_what_runs_today_is_priced_and_something_faster_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipeline and full recomputation are of no use to a model that fits one device many times."""
    slow = " --pipeline-model-parallel-size 4 --recompute-granularity full --recompute-method uniform"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{SIZES}{slow} --log-interval 10 --num-workers 2"))
    assert run(["predict", "--from", "megatron", "-", "--cluster", "h100:8", "--seconds", "3"]) == 0
    text = capsys.readouterr().out
    for part in (
        "pp4 on 8 x h100",
        "ignored   num-workers: what is read",
        "overlap",
        "what would be faster:",
    ):
        assert part in text
    assert " 1. " in text.split("what would be faster:")[1]


def test_a_job_that_does_not_fit_is_a_no(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = SIZES.replace("--hidden-size 768", "--hidden-size 24576")
    monkeypatch.setattr("sys.stdin", io.StringIO(large))
    assert run(["predict", "--from", "megatron", "-", "--cluster", "h100:8", "--seconds", "1"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --model gpt2 --cluster h100:8 --batch 8 --row 2", "--row is for --emit"),
        ("config configs/llama-tiny-tp2.yaml --output x.sh", "--output is for --emit"),
        ("config configs/llama-tiny-tp2.yaml --emit megatrn", "framework 'megatrn' is not one of"),
        ("config configs/llama-tiny-tp2.yaml --emit megatron", "train.device is cpu: Megatron-LM trains on"),
        ("config configs/dlrm.yaml --emit megatron --no-check", "megatron trains no recommenders"),
        ("predict --from megatron", "--from megatron takes a file"),
        ("predict --from runs.csv", "hint: --table reads a CSV"),
        ("predict --from megatron x.sh --table t.csv", "--from reads the job, so --table conflicts"),
        (
            "predict --from nemo configs/dlrm.yaml --cluster h100:8",
            "what Megatron-Bridge v0.3.1 runs cannot be",
        ),
        ("predict --model gpt2 --cluster h100:8 --seconds 3", "--seconds is for --from"),
        (
            "predict --from megatron README.md --cluster h100:8 layout.up=2",
            "'layout.up=2' is no choice of a job",
        ),
    ],
)
def test_bad_input_is_one_error(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.split()) == 2
    assert message in capsys.readouterr().err
