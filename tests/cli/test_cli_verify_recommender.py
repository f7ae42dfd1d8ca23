"""`stretto verify` for a recommender: what it prints, how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import stretto.verify.run as verify_run
from stretto.cli.main import run
from stretto.recommender.tables.sharded import TableBatch
from stretto.verify.recommender.proof import RecommenderProof

pytestmark = pytest.mark.apart

_JOB = """
model: {family: dlrm, dense: 4, bottom: [6, 8], top: [5, 1], rows: [10, 60, 30]}
data: {source: synthetic, synthetic: {samples: 2000}}
layout: {ranks: 2}
tables: {placement: column}
batch: {global_size: 33}
train: {device: cpu, steps: 5, timeout_s: 60}
optim: {tables: {name: rowwise_adagrad, lr: 0.05}}
"""


def scale_table_gradients() -> None:
    original = TableBatch.send_gradient

    def twice(self: TableBatch, gradient: Tensor) -> None:
        original(self, gradient * 2)

    TableBatch.send_gradient = twice


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("verify") / "tiny.yaml"
    path.write_text(_JOB)
    return str(path)


def test_an_equal_placement_ends_with_0(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", config, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["equal"], report["dtype"], report["tolerance"], report["steps"]) == (
        True,
        "float64",
        1e-9,
        3,
    )
    (layout,) = report["layouts"]
    assert layout["layout"] == "column rowwise_adagrad+adamw dot data overlap"
    assert layout["placement"] == dict.fromkeys(("C1", "C2", "C3"), "column on 0, 1")
    for key in ("loss_error", "grad_error", "norm_error", "weight_error", "state_error", "predict_error"):
        assert 0 <= layout[key] <= 1e-9, key


def test_placements_that_differ_end_with_1_and_say_why(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_run, "run_proof", partial(verify_run.run_proof, on_rank=scale_table_gradients))
    cases = tmp_path / "cases.yaml"
    cases.write_text("- {placement: row, rule: sgd}\n- {placement: table, clip: 0.1, samples: ragged}\n")
    assert run(["verify", config, "--layouts", str(cases)]) == 1
    out = capfd.readouterr().out
    assert "row sgd+adamw dot data overlap: the gradient" in out
    assert "the gradient of every table is 2 times the reference: wrong gradient scale" in out
    assert "2 placements in" in out
    assert "2 DIFFER" in out


def test_all_placements_are_offered(
    config: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prove two of all cases only."""
    every = verify_run.run_proof

    def some(proof: RecommenderProof, **how: Any) -> verify_run.Findings:
        return every(replace(proof, cases=proof.cases[::120]), **how)

    monkeypatch.setattr(verify_run, "run_proof", some)
    assert run(["verify", config, "--layouts", "all", "--ranks", "2", "--steps", "2"]) == 0
    out = capfd.readouterr().out
    assert "2 placements in" in out
    assert "all equal to one process" in out
    assert "table-row needs nodes of several ranks" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2"], "--ranks 2 goes with --layouts all"),
        (["tables.placement=colum"], "tables.placement is colum"),
        (["--layouts", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_bad_input_ends_with_2(
    config: str, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", config, *arguments]) == 2
    assert message in capfd.readouterr().err
