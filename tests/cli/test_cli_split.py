"""`stretto split` from the command line: what it prints and draws, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import CommandLine

EXAMPLE = Path(__file__).parents[2] / "examples" / "split_layers.py"
FILE = """
import torch


def nothing():
    return 7


def two():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.empty(6, 8)
"""


def test_the_plan_of_an_example(tmp_path: Path, stretto: CommandLine) -> None:
    svg = tmp_path / "splits.svg"
    arguments = ["split", f"{EXAMPLE}:alexnet", "--cluster", "a100:4", "--svg", str(svg)]
    shown = stretto(*arguments)
    assert "all-to-all + all-to-all" in shown
    assert shown.endswith(f"wrote {svg}\n")
    assert svg.read_text().startswith("<svg")
    report = stretto.json(*arguments, "--fix", "1.0=column")
    style_of = {operator["name"]: operator["style"] for operator in report["operators"]}
    assert (style_of["0.0"], style_of["1.0"], style_of["0.1"]) == ("batch", "column", None)
    assert report["step_s"] == pytest.approx(sum(report["parts_s"].values()))
    assert report["beside"]["data parallel"]["step_s"] > report["step_s"]
    kinds = [exchange["kind"] for conversion in report["conversions"] for exchange in conversion["exchanges"]]
    assert {"all-gather", "reduce-scatter"} <= set(kinds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing returned int, must return a model and its input"),
        (
            ["two", "--fix", "0=rwo"],
            "must be one of replicate, batch, column, row\nhint: did you mean 'row'?",
        ),
        (["two", "--fix", "row"], "--fix row\nhint: NAME=STYLE"),
        (["two", "--precision", "fp46"], "--precision is 'fp46', must be one of bf16, fp16, tf32, fp32"),
        (["two", "--leaf", "2"], "the model has no module '2'"),
        (
            ["two", "--cluster", "a100:4"],
            "batch of 6 samples does not divide over 4 devices\nhint: a batch of 8",
        ),
        (["three"], "defines no three"),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path, stretto: CommandLine) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert message in stretto.error("split", f"{file}:{arguments[0]}", "--cluster", "a100:2", *arguments[1:])
