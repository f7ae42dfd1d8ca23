"""`stretto migrate` as it is typed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from stretto.cli.main import BAD_INPUT, DONE, NO, run
from stretto.run.config.load import load

ARGUMENTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 500 --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --train-iters 20 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr-warmup-fraction 0.1"
)
SCRIPT = f"""#!/bin/bash
OPTIONS="{ARGUMENTS} --save $1 --tensor-model-parallel-size ${{TP:-1}}"
torchrun --nproc_per_node 2 pretrain_gpt.py $OPTIONS
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def test_a_script_becomes_a_config_that_is_checked(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpt.yaml"
    command = [
        "migrate",
        str(script),
        str(tmp_path / "runs/tiny"),
        "TP=2",
        "train.steps=7",
        "--out",
        str(out),
    ]
    assert run(command) == DONE
    shown = capsys.readouterr().out
    assert shown.startswith(f"{script}: 16 arguments mapped, 0 needless here, 0 not mapped\n")
    assert "--tensor-model-parallel-size 2 -> layout.tp=2\n" in shown
    assert shown.endswith(f"next:\n  stretto config {out}\n")
    config = load(out)
    assert (config.layout.tp, config.layout.dp, config.train.steps, config.run.name) == (2, 1, 7, "tiny")
    assert run(["config", str(out)]) == DONE


def test_json_has_every_argument(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["migrate", str(script), "runs/tiny", "--json"]) == DONE
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["model"]["layers"] == 2
    assert {"arguments": {"lr": 0.001}, "fields": {}} not in report["mapped"]
    assert sum(len(mapping["arguments"]) for mapping in report["mapped"]) == 17  # with the processes
    assert report["not_mapped"] == report["needless"] == {}


def test_what_is_not_mapped_ends_with_no(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SCRIPT.replace("$OPTIONS", "$OPTIONS --decoupled-lr 5e-4"))
    assert run(["migrate", str(script)]) == NO
    printed = capsys.readouterr()
    assert printed.out.startswith(f"# From {script} (Megatron-LM")
    assert "model:\n" in printed.out
    assert "not mapped  --decoupled-lr: it changes training" in printed.err
    assert "not mapped  --save:" in printed.err


@pytest.mark.parametrize("norm", ["", "--normalization LayerNorm"])
def test_a_model_that_is_not_built_is_reported_setting_by_setting(
    norm: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"$OPTIONS --position-embedding-type rope {norm} --no-such-option 3"
    script.write_text(SCRIPT.replace("$OPTIONS", options))
    assert run(["migrate", str(script), "runs/tiny"]) == BAD_INPUT
    error = " ".join(capsys.readouterr().err.split())
    assert "mapped --num-layers 2 -> model.layers=2" in error
    assert "not mapped --no-such-option: " in error
    reason = "layer norms with rotary positions can be planned, not yet built"
    assert f"not mapped --normalization: {reason}; mapped would be --normalization RMSNorm" in error
    assert "error: this model has layer norms with rotary positions" in error
    assert "--normalization LayerNorm ->" not in error


def test_arguments_alone_and_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["migrate", *ARGUMENTS.split(), "--devices", "2"]) == DONE
    first = capsys.readouterr().out
    assert run(["migrate", ARGUMENTS, "--devices", "2"]) == DONE
    assert capsys.readouterr().out == first
    monkeypatch.setattr("sys.stdin", io.StringIO(ARGUMENTS))
    assert run(["migrate", "-", "--devices", "2"]) == DONE
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]
    assert "dp: 2" in first


LOOPS = f"""#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
TP=1
while [[ $# -gt 0 ]]; do
  case $1 in --tp) TP=$2; shift 2 ;; *) shift ;; esac
done
train() {{
  local EXTRA="--save ${{DIR#/}}"
  "$@" pretrain_gpt.py {ARGUMENTS} $EXTRA --seed $(python -c 'print(7 * 6)') --tensor-model-parallel-size $TP
}}
"""


@pytest.mark.parametrize(
    ("launch", "dp"),
    [
        ("train torchrun --nproc_per_node 4", 2),
        ("train srun python -u", 2),
        ("train python -m torch.distributed.run --nproc_per_node=2", 1),
        ('ARGS=$(train echo); srun sh -c "python $ARGS"', 2),
        ("sbatch --wait <<EOF\ntorchrun --nproc_per_node 2 $(train echo)\nEOF", 1),
    ],
)
def test_a_script_is_run_only_if_that_is_asked_for(
    launch: str, dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With loops and functions it is refused; with --run its launchers print their arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(f"{LOOPS}touch was-run\n{launch}\n")
    command = ["migrate", "run.sh", "--tp", "2", "DIR=/runs/looped", "--out", "made.yaml"]
    assert run(command) == BAD_INPUT
    assert "error: run.sh:5: `while` is not read" in (error := capsys.readouterr().err)
    assert "hint: " in error
    assert "--run" in error
    assert not (tmp_path / "was-run").exists()
    assert run([*command, "--run"]) == DONE
    config = load(tmp_path / "made.yaml")
    assert (config.layout.tp, config.layout.dp, config.train.seed) == (2, dp, 42)
    assert str(config.run.folder) == "runs/looped"


def test_a_script_that_launches_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("exit 3")
    assert run(["migrate", str(script), "--run"]) == BAD_INPUT
    assert "launched nothing and ended with 3" in capsys.readouterr().err
    assert run(["migrate", ARGUMENTS, "--run"]) == BAD_INPUT
    assert "--run needs a script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.sh"], "none.sh"),
        (["--num-layers", "2"], "the command line lacks --hidden-size, --num-attention-heads"),
        ([f"{ARGUMENTS} --tensor-model-parallel-size 3", "--devices", "4"], "4 processes do not divide"),
        ([ARGUMENTS, "--devices", "2", "optim.lrr=3"], "lrr"),
    ],
)
def test_what_is_wrong_is_one_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["migrate", *arguments]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(("name", "framework"), [("llama.toml", "torchtitan"), ("zero.json", "deepspeed")])
def test_the_config_of_another_framework_is_sent_to_what_reads_it(
    name: str, framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text('[model]\nname = "llama3"\n' if name.endswith("toml") else "{}\n")
    assert run(["migrate", str(tmp_path / name)]) == BAD_INPUT
    assert f"stretto predict --from {framework} {tmp_path / name}" in " ".join(
        capsys.readouterr().err.split()
    )
