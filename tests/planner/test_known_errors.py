"""What is known to be wrong is named where it concerns the job, and nowhere else."""

from __future__ import annotations

import pytest

from command_line import CommandLine
from stretto.planner.estimate import estimate
from stretto.planner.runs import read_run

BIG = {"tp": "8", "gpus": "64", "pp": "4", "micro_batch": "1", "global_batch": "64", "seq": "4096"}


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        ({"model": "llama3-70b", "gpu": "dgx-h100"}, ""),
        ({"model": "llama3-70b", "gpu": "dgx-b200"}, "bf16 on Blackwell"),
        ({"model": "llama3-70b", "gpu": "dgx-b200", "precision": "fp8"}, ""),
        ({"model": "gpt-oss-120b", "gpu": "dgx-b200", "ep": "8"}, "GPT-OSS in bf16"),
        ({"model": "qwen3-235b-a22b", "gpu": "dgx-h100", "ep": "8", "tp": "4"}, "Qwen3-235B was predicted"),
        ({"model": "qwen3-235b-a22b", "gpu": "dgx-b200", "ep": "8", "tp": "4"}, ""),
        ({"model": "mixtral-8x7b", "gpu": "dgx-h100", "ep": "8"}, ""),
        ({"model": "deepseek-v3", "gpu": "dgx-h100", "ep": "16", "tp": "1"}, "DeepSeek-V3 with PyTorch's"),
        ({"model": "deepseek-v3", "gpu": "dgx-h100", "ep": "8", "tp": "1"}, ""),
        ({"model": "gpt3-175b", "gpu": "dgx-a100-80gb", "framework": "deepspeed"}, "about 8 ms more a layer"),
        ({"model": "gpt3-175b", "gpu": "dgx-a100-80gb", "framework": "megatron"}, ""),
    ],
)
def test_a_prediction_names_what_is_known_to_be_wrong(cells: dict[str, str], named: str) -> None:
    run = read_run({**BIG, **cells})
    errors = estimate(run.job, run.cluster, run.assumptions, memory=False).known_errors
    assert bool(errors) == bool(named)
    assert len(errors) <= 1
    assert all(named in error for error in errors)


def test_known_errors_are_printed(stretto: CommandLine) -> None:
    layout = ["predict", "--model", "llama3-8b", "tp=8", "batch=8", "seq=4096"]
    assert "known error: dense models in bf16 on Blackwell" in stretto(*layout, "--cluster", "dgx-b200:8")
    assert "known error" not in stretto(*layout, "--cluster", "dgx-h100:8")
    plan = ["plan", "--model", "llama3-8b", "--batch", "8", "--fix", "tp=8", "--seconds", "0.5"]
    report = stretto.json(*plan, "--cluster", "dgx-b200:8")
    assert report["known_errors"][0] in " ".join(stretto(*plan, "--cluster", "dgx-b200:8").split())
