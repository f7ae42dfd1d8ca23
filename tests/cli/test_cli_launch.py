"""`stretto launch slurm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def test_ranks_are_shared_out_over_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["launch", "slurm", CONFIG, "optim.lr=2e-4", "--nodes", "2", "--time", "2:00:00"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n")
    assert "--nnodes=2 --nproc-per-node=2 " in text
    assert "#SBATCH --time=2:00:00" in text
    assert "optim.lr=2e-4 --resume auto" in text


def test_json_holds_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["launch", "slurm", CONFIG, "--nodes", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks_per_node"] == 4
    assert facts["script"].endswith("\n")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--nodes", "3"], "nodes=3", "--nodes 2 --ranks-per-node 2"),
        (["--nodes", "2", "--ranks-per-node", "8"], "= 16", "--nodes 2 --ranks-per-node 2"),
        (["--nodes", "2", "--time", "soon"], "time='soon'", "HH:MM:SS"),
        (["no.such=1", "--nodes", "2"], "no", ""),
    ],
)
def test_bad_input(arguments: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["launch", "slurm", CONFIG, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert error in lines[0]
    assert hint in lines[-1]
