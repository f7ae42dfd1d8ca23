"""`--emit` and `--from` of torchtitan, DeepSpeed and TorchRec, from the command line."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from stretto.cli.main import run

DCN = ["plan", "--model", "dlrm-dcnv2", "--cluster", "dgx-a100:16", "--batch", "65536"]


def shardings(text: str) -> dict[str, tuple[str, str, float | None, object]]:
    """The constant of that name in a module for TorchRec."""
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SHARDINGS":
            return ast.literal_eval(statement.value)
    raise AssertionError("no SHARDINGS")


def test_a_recommenders_plan_is_one_that_torchrec_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sharding.py"
    assert run([*DCN, "--emit", "torchrec", "--output", str(path)]) == 0
    assert "samples/s" in capsys.readouterr().out
    tables = shardings(path.read_text())
    assert len(tables) == 26
    assert {kind for kind, *_ in tables.values()} <= {
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "data_parallel",
    }
    assert run([*DCN, "--emit", "torchrec", "--fix", "split=row,table", "--json"]) == 0
    emitted = json.loads(capsys.readouterr().out)["emitted"]
    assert {kind for kind, *_ in shardings(emitted).values()} <= {"row_wise", "table_row_wise", "table_wise"}


def test_a_recommenders_config_says_its_optimiser(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["config", "configs/dlrm.yaml", "tables.placement=row", "tables.wire=float16"]
    assert run([*command, "--emit", "torchrec"]) == 0
    text = capsys.readouterr().out
    assert {kind for kind, *_ in shardings(text).values()} == {"row_wise"}
    assert '"learning_rate": 0.15' in text
    assert "CommType.FP16" in text


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        (["config", "configs/dlrm.yaml"], "tables.placement is auto", "stretto plan configs/dlrm.yaml"),
        (
            ["config", "configs/quickstart.yaml"],
            "torchrec is for recommenders",
            "megatron, nemo, torchtitan, deepspeed",
        ),
        (["plan", "configs/quickstart.yaml", "--cluster", "h100:8"], "torchrec is for recomm", "megatron"),
        (
            ["config", "configs/dlrm.yaml", "tables.placement=table", "optim.tables.name=split_sgd"],
            "optim.tables.name is split_sgd",
            "rowwise_adagrad",
        ),
    ],
)
def test_what_torchrec_is_not_for(
    command: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--emit", "torchrec"]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert hint in text


def test_others_train_no_recommenders(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([*DCN], ["config", "configs/dlrm.yaml"]):
        assert run([*command, "--emit", "deepspeed"]) == 2
        assert "deepspeed trains no recommenders" in capsys.readouterr().err


TODAY = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 100,
}


def test_a_deepspeed_json_is_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TODAY))
    command = ["predict", "--from", "deepspeed", str(path), "--model", "llama3-8b", "--cluster", "h100:16"]
    assert run([*command, "data.sequence=2048", "--seconds", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    row = report["rows"][0]
    assert (row["global_batch"], row["sequence"], row["zero"]) == (64, 2048, "zero2")
    assert report["overlapped_s"] < row["step_time_s"]  # stage 2 overlaps nothing unless it is told to
    assert report["ignored"] == {"logging, profiling and checks": ["steps_per_print"]}
    assert run([*command[:4], "--cluster", "h100:16"]) == 2
    assert "say it with --model" in capsys.readouterr().err


def test_a_torchtitan_config_is_written_and_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planned.py"
    command = ["config", "configs/llama-tiny-tp2.yaml", "train.dtype=bfloat16"]
    assert run([*command, "--emit", "torchtitan", "--output", str(path)]) == 0
    capsys.readouterr()
    predict = ["predict", "--from", "torchtitan", str(path), "--cluster", "h100:2", "--seconds", "1"]
    assert run([*predict, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["layout"], row["global_batch"], row["micro_batch"]) == ("tp2", 16, 8)
